"""Names, tokens and identities of objects on a file tier.

Tokens: files `f<ino>-<size>-<mtime_ns>`, links `l<ino>-<xxh3-64 of the target>`, directories
`d<ino>` (what is inside does not change a directory's token). Identity: `st_ino`, which survives
rename(2). Device numbers are left out: they change when a tier is mounted again.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass

import xxhash

from ckptfs.tiers.base import RESERVED, Attrs, Found, Kind, TierError, Trouble
from ckptfs.tiers.file_errors import show

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\Z")
_TOKEN_INO = re.compile(r"[fld]([0-9]+)(?:-|\Z)")


@dataclass(frozen=True, slots=True)
class Seen:
    """What lstat(2) (and readlink(2)) say about one name."""

    st: os.stat_result
    kind: Kind | None
    """None for devices, sockets and pipes: nothing ckptfs shows or makes."""
    token: str
    target: bytes = b""

    @property
    def ident(self) -> str:
        """How the object is recognised after a rename."""
        return str(self.st.st_ino)

    def found(self, name: bytes) -> Found:
        """The same as the protocol's answer; the kind must be known."""
        assert self.kind is not None
        size = {Kind.FILE: self.st.st_size, Kind.LINK: len(self.target), Kind.DIR: 0}[self.kind]
        return Found(name, self.kind, size, attrs_of(self.st), self.token, self.target, self.ident)


def attrs_of(st: os.stat_result) -> Attrs:
    """Attributes as published: permission bits only, times in nanoseconds."""
    return Attrs(stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, st.st_atime_ns, st.st_mtime_ns)


def seen(st: os.stat_result, target: bytes = b"") -> Seen:
    """Classify a stat result."""
    if stat.S_ISREG(st.st_mode):
        return Seen(st, Kind.FILE, f"f{st.st_ino}-{st.st_size}-{st.st_mtime_ns}")
    if stat.S_ISDIR(st.st_mode):
        return Seen(st, Kind.DIR, f"d{st.st_ino}")
    if stat.S_ISLNK(st.st_mode):
        return Seen(st, Kind.LINK, f"l{st.st_ino}-{xxhash.xxh3_64_hexdigest(target)}", target)
    return Seen(st, None, f"x{st.st_ino}")


def look(dir_fd: int, name: bytes) -> Seen | None:
    """The object under a name, not following links; None when there is none."""
    for _ in range(10):
        try:
            st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            target = os.readlink(name, dir_fd=dir_fd) if stat.S_ISLNK(st.st_mode) else b""
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno == errno.EINVAL:  # replaced between lstat and readlink
                continue
            raise
        return seen(st, target)
    raise OSError(errno.EAGAIN, "the name keeps changing")


def ident_of_token(token: str) -> str:
    """The identity that a token carries; empty when it carries none."""
    match = _TOKEN_INO.match(token)
    return match.group(1) if match else ""


def components(path: bytes) -> list[bytes]:
    """The names of a tier path. REFUSED for what is no such path or is ckptfs's own."""
    if not path:
        return []
    names = path.split(b"/")
    for name in names:
        if name in (b"", b".", b"..") or b"\0" in name:
            raise TierError(Trouble.REFUSED, f"{show(path)} is not a path on the tier", errno.EINVAL)
        if name.startswith(RESERVED):
            raise TierError(Trouble.REFUSED, f"{show(path)} uses a name reserved for ckptfs", errno.EPERM)
    return names


def split(path: bytes) -> tuple[bytes, bytes]:
    """Parent directory and name."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


def checked_version(version: str) -> str:
    """A version is part of a file name, so it must look like one."""
    if not _VERSION.match(version):
        raise TierError(Trouble.REFUSED, f"{version!r} cannot be a version name", errno.EINVAL)
    return version


def handle_of(path: bytes) -> str:
    """A root-relative path as text that survives pickling and SQLite: undecodable bytes escaped."""
    return path.decode("utf-8", "surrogateescape")


def path_of(handle: str) -> bytes:
    """The inverse of `handle_of`."""
    return handle.encode("utf-8", "surrogateescape")
