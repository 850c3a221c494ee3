"""What an errno of the tier's file system means. The one place where that is decided."""

from __future__ import annotations

import errno
import os

from ckptfs.tiers.base import Failed, TierError, Trouble

REFUSED = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EDQUOT,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EILSEQ,
        errno.ELOOP,
        errno.EMLINK,
        errno.EFBIG,
        errno.EOPNOTSUPP,
        errno.EXDEV,
    }
)
"""Asking again gives the same answer until somebody changes a permission, a quota or a name.

Everything else is `DOWN`: a full, read-only, stale, unmounted or unreachable file system gets
better without a change to the entry, and a race with another writer is over by the next try.
EROFS is in that group because it is what ext4 turns to after an I/O error.
"""

GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


def trouble_of(code: int) -> Trouble:
    """How a call that failed with this errno is to be handled."""
    return Trouble.REFUSED if code in REFUSED else Trouble.DOWN


def show(path: bytes) -> str:
    """A path for messages: readable, printable, never raising."""
    text = path.decode("utf-8", "backslashreplace") or "the tier's root"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def advice(code: int, known: bool = False) -> str:
    """What to do about a directory that can't be a tier because of this errno.

    `known`: it has been the tier before, so that a new directory will not do.
    """
    user = f"let uid {os.geteuid()} read and write there"
    return {
        errno.ENOENT: "mount the file system it lies on, or "
        + ("put it back" if known else "make it with mkdir -p"),
        errno.ENOTDIR: "name a directory",
        errno.EACCES: user,
        errno.EPERM: user,
        errno.EROFS: "mount that file system read-write",
        errno.ENOSPC: "make room there",
        errno.EDQUOT: "make room there",
    }.get(code, "look at the file system it lies on")


def tier_error(exc: OSError, what: str) -> TierError:
    """The `TierError` for an OSError met while doing `what`."""
    code = exc.errno or errno.EIO
    return TierError(trouble_of(code), f"{what}: {exc.strerror or os.strerror(code)}", code)


def failed(exc: OSError | TierError, what: str) -> Failed:
    """The same as part of an `Outcome`."""
    error = exc if isinstance(exc, TierError) else tier_error(exc, what)
    return Failed(error.trouble, error.message, error.errno)
