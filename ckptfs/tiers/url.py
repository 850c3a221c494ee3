"""Tier URLs: `file:///absolute/path`."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote_to_bytes

from ckptfs.errors import CkptfsError, Exit


def parse_tier_url(url: str) -> tuple[str, bytes]:
    """Scheme and root of a tier URL; percent-escapes are decoded, `.` and `..` resolved.

    Raises `CkptfsError(Exit.USAGE)` with one sentence when the URL cannot be used.
    """
    if not url:
        raise CkptfsError("The tier URL is empty; write file:///absolute/path.", Exit.USAGE)
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found:
        hint = f"file://{url}" if url.startswith("/") else "file:///absolute/path"
        raise CkptfsError(f"Tier {url!r} is not a URL; write {hint}.", Exit.USAGE)
    if scheme == "s3":
        raise CkptfsError(
            f"Tier {url!r} cannot be used: this build has no S3 tier yet; use file:///absolute/path.",
            Exit.USAGE,
        )
    if scheme != "file":
        raise CkptfsError(
            f"Tier {url!r} has the unknown scheme {scheme!r}; use file:///absolute/path.", Exit.USAGE
        )
    # By hand: urlsplit drops tabs and line ends, which are legal in a path.
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise CkptfsError(
            f"Tier {url!r} names the host {host!r}; a file tier is a local path with three "
            "slashes, file:///absolute/path.",
            Exit.USAGE,
        )
    if "?" in path or "#" in path:
        raise CkptfsError(
            f"Tier {url!r} contains '?' or '#'; write them as %3F and %23 in a path.", Exit.USAGE
        )
    # Bytes that are not UTF-8 may come from the command line as surrogates, or as percent-escapes.
    root = unquote_to_bytes((slash + path).encode("utf-8", "surrogateescape"))
    if not root.startswith(b"/") or b"\0" in root:
        raise CkptfsError(f"Tier {url!r} has no absolute path; write file:///absolute/path.", Exit.USAGE)
    root = posixpath.normpath(b"/" + root.lstrip(b"/"))
    if root == b"/":
        raise CkptfsError(f"Tier {url!r} is the root of the machine; name a directory.", Exit.USAGE)
    return scheme, root
