"""Tier URLs: `file:///absolute/path` and `s3://bucket/prefix`."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import unquote_to_bytes

from ckptfs.errors import CkptfsError, Exit

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)
"""Wider than what AWS creates today (lower case, 63 characters): older buckets and other stores differ."""
LONGEST_PREFIX = 800
"""Bytes. Of a key's 1,024 the rest is for names, our own records included."""


def parse_tier_url(url: str) -> tuple[str, bytes]:
    """Scheme and root of a tier URL; percent-escapes are decoded, `.` and `..` of a path resolved.

    The root of an s3 tier is `bucket` or `bucket/prefix` (`bucket_of` splits it). Raises
    `CkptfsError(Exit.USAGE)` with one sentence when the URL cannot be used.
    """
    if not url:
        raise CkptfsError(
            "The tier URL is empty; write file:///absolute/path or s3://bucket/prefix.", Exit.USAGE
        )
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found:
        hint = f"file://{url}" if url.startswith("/") else "file:///absolute/path"
        raise CkptfsError(f"Tier {url!r} is not a URL; write {hint}.", Exit.USAGE)
    if scheme == "s3":
        return scheme, _bucket_and_prefix(url, rest)
    if scheme != "file":
        raise CkptfsError(
            f"Tier {url!r} has the unknown scheme {scheme!r}; use file:///absolute/path or"
            " s3://bucket/prefix.",
            Exit.USAGE,
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


def bucket_of(root: bytes) -> tuple[str, bytes]:
    """Bucket and prefix (without slashes at its ends; may be empty) of an s3 tier's root."""
    bucket, _, prefix = root.partition(b"/")
    return bucket.decode(), prefix


def _bucket_and_prefix(url: str, rest: str) -> bytes:
    def wrong(reason: str) -> CkptfsError:
        return CkptfsError(f"Tier {url!r} {reason}.", Exit.USAGE)

    bucket, _, written = rest.partition("/")
    if not bucket:
        raise wrong("names no bucket; write s3://bucket/prefix")
    if "?" in rest or "#" in rest:
        raise wrong("contains '?' or '#'; write them as %3F and %23 in a prefix")
    if "@" in bucket:  # what stands before it may be a secret: not shown
        raise CkptfsError(
            "The tier URL has an '@' in place of the bucket; the store's address goes to --endpoint-url and"
            " credentials to ~/.aws/credentials.",
            Exit.USAGE,
        )
    if ":" in bucket:
        raise wrong(f"has {bucket!r} in place of the bucket; the store's address goes to --endpoint-url")
    if not _BUCKET.fullmatch(bucket):
        raise wrong(
            f"has the bucket {bucket!r}; a bucket name is 3 to 255 letters, digits, dots, hyphens and"
            " underscores"
        )
    prefix = unquote_to_bytes(written.encode("utf-8", "surrogateescape"))
    if not prefix:
        return bucket.encode()
    segments = prefix.removesuffix(b"/").split(b"/")
    if b"" in segments:
        raise wrong("has an empty name between slashes; a prefix is a/b, without slashes beside each other")
    if b"." in segments or b".." in segments:
        raise wrong("has '.' or '..' in its prefix; in a bucket these are names, which many tools misread")
    if any(segment.startswith(b".ckptfs") for segment in segments):
        raise wrong("has a name that starts with .ckptfs, which ckptfs keeps for itself; choose another")
    try:
        text = prefix.decode()
    except UnicodeDecodeError:
        raise wrong("has a prefix that is not UTF-8, as keys have to be") from None
    # XML 1.0, in which stores list keys, has no control characters.
    if any(ord(char) < 0x20 or char in "\x7f\ufffe\uffff" for char in text):
        raise wrong("has a control character in its prefix, which stores can't list")
    if len(prefix) > LONGEST_PREFIX:
        raise wrong(f"has a prefix of {len(prefix)} bytes; {LONGEST_PREFIX} is the most")
    return b"/".join([bucket.encode(), *segments])
