"""Paths of the mount and keys of the bucket, and which path cannot be a key.

The path `a/b` is the key `prefix/a/b`; everything that is ckptfs's own is below `prefix/.ckptfs/`. Keys are
UTF-8 of at most 1,024 bytes (S3 API reference, "Object key names"); requests and answers are XML 1.0,
which cannot carry most control characters.
"""

from __future__ import annotations

import errno
import re

from ckptfs.tiers.base import RESERVED, TierError, Trouble
from ckptfs.tiers.file_errors import show

KEY_MAX = 1024
"""Bytes of a key."""
NAME_MAX = 255
"""Bytes of one component: what the mount can show."""
RECORD_OVERHEAD = len(b".ckptfs/attrs/") + len(b".ckptfs-")
"""Bytes that the key of an attribute record is longer than that of its object."""

_UNFIT = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
"""What XML 1.0 has no way to write (production Char)."""


def trouble_with(path: bytes) -> int:
    """The errno for a path that no key of ours can stand for, whatever the prefix; 0 for one that can."""
    try:
        text = path.decode()
    except UnicodeDecodeError:
        return errno.EILSEQ
    if _UNFIT.search(text):
        return errno.EILSEQ
    for name in path.split(b"/"):
        if name in (b"", b".", b"..") or name.startswith(RESERVED):
            return errno.EINVAL
        if len(name) > NAME_MAX:
            return errno.ENAMETOOLONG
    return 0


def forbids(path: bytes, prefix: bytes) -> int:
    """The errno for a path that must not be made in the mount, 0 for one that may (`Traits.forbids`).

    Counts what the key of its attribute record needs, so that every object can have one.
    """
    code = trouble_with(path)
    if not code and len(path) + len(prefix) + bool(prefix) + RECORD_OVERHEAD > KEY_MAX:
        return errno.ENAMETOOLONG
    return code


def check_name(path: bytes, prefix: bytes) -> None:
    """Raise `TierError(REFUSED)` with EILSEQ, EINVAL or ENAMETOOLONG for a path that `forbids` names."""
    code = forbids(path, prefix)
    if code:
        raise _refused(path, code)


def _refused(path: bytes, code: int) -> TierError:
    reason = {
        errno.EILSEQ: "keys are UTF-8 text without control characters",
        errno.ENAMETOOLONG: f"a name may have {NAME_MAX} bytes and a key {KEY_MAX} with all before it",
    }.get(code, "it is no path, or has a name that is ckptfs's own")
    return TierError(Trouble.REFUSED, f"{show(path)} cannot be a key: {reason}; rename it", code)


class Keys:
    """Keys below one prefix, which has no slash at its ends and may be empty."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix.strip(b"/")
        self._base = (self.prefix + b"/" if self.prefix else b"").decode()

    def key(self, path: bytes) -> str:
        """The key of an object. Raises `TierError(REFUSED)` for a path that has none (the root has none)."""
        code = trouble_with(path)
        if not code and len(self._base.encode()) + len(path) > KEY_MAX:
            code = errno.ENAMETOOLONG
        if code:
            raise _refused(path, code)
        return self._base + path.decode()

    def dir(self, path: bytes) -> str:
        """What keys in a directory begin with, and the key of its marker; `""` for an empty root prefix."""
        return self.key(path) + "/" if path else self._base

    def has(self, path: bytes) -> bool:
        """Whether a path can be a key (the root counts as one that can)."""
        return not path or (not trouble_with(path) and len(self._base.encode()) + len(path) < KEY_MAX)

    def path(self, key: str) -> bytes:
        """The path that a key below the prefix stands for; what is `own` gives a path, too."""
        if not key.startswith(self._base):
            raise ValueError(f"{key!r} is not below {self._base!r}")
        return key[len(self._base) :].encode("utf-8", "surrogateescape")

    def own(self, *parts: str | bytes) -> str:
        """A key of ckptfs's own, below `.ckptfs/`; the parts are joined with slashes."""
        text = [part if isinstance(part, str) else part.decode() for part in parts]
        return self._base + "/".join([RESERVED.decode(), *text])
