"""Digests recorded with a published file, so that what is read back can be checked.

A record lies in the extended attribute `user.ckptfs` of the file, so it follows every rename and
vanishes with it. Where it does not fit (ext4 gives about 4 KiB, some 240 chunks) or the file
system has no user attributes, it is the file `.ckptfs/manifests/<st_ino>`. A record counts only
while the file's size and mtime are the recorded ones: after anybody else's change the file is
unverified, never wrong.

Format, little-endian: `CKF1`, size u64, mtime_ns i64, chunk u64, count u32, length of the version
u16, the version, the digests, xxh3-64 (big-endian, as xxhash gives it) of all before. With
`chunk` > 0 the digests are 16 bytes each, for chunks of that size; with 0 each one is preceded by
its offset and length, u64 both.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from dataclasses import dataclass, replace

import xxhash

from ckptfs.tiers.base import Digest
from ckptfs.tiers.file_root import DIRECTORY, MANIFESTS, make_dirs

XATTR = "user.ckptfs"
_MAGIC = b"CKF1"
_HEAD = struct.Struct("<4sQqQIH")
_SPAN = struct.Struct("<QQ")
_DIGEST = 16
_CHECK = 8
_LIMIT = 64 << 20
"""No record is larger (a 10,000-chunk version takes 160 KB)."""

_NO_ROOM = frozenset(
    {
        errno.ENOSPC,  # ext4: the attribute block is full, which says nothing about the disk
        errno.E2BIG,
        errno.ERANGE,
        errno.EDQUOT,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EACCES,
        errno.EINVAL,
    }
)


@dataclass(frozen=True, slots=True)
class Record:
    """What was published: identity of the content (size, mtime) and its digests."""

    size: int
    mtime_ns: int
    version: str
    digests: tuple[Digest, ...]

    def describes(self, st: os.stat_result) -> bool:
        """Whether the file is still as it was when this was recorded."""
        return st.st_size == self.size and st.st_mtime_ns == self.mtime_ns


def encode(record: Record) -> bytes:
    """The record's stored form."""
    chunk = _uniform_chunk(record)
    version = record.version.encode()
    parts = [
        _HEAD.pack(_MAGIC, record.size, record.mtime_ns, chunk, len(record.digests), len(version)),
        version,
    ]
    for item in record.digests:
        if not chunk:
            parts.append(_SPAN.pack(item.offset, item.length))
        parts.append(item.xxh3)
    body = b"".join(parts)
    return body + xxhash.xxh3_64_digest(body)


def _uniform_chunk(record: Record) -> int:
    """The chunk size when the digests cover the file in equal chunks, else 0."""
    chunk = record.digests[0].length if record.digests else 0
    at = 0
    for item in record.digests:
        if item.offset != at or item.length != min(chunk, record.size - at) or item.length <= 0:
            return 0
        at += item.length
    return chunk if at == record.size else 0


def decode(data: bytes) -> Record | None:
    """The record, or None for anything that is not one, whoever wrote it."""
    body, check = data[:-_CHECK], data[-_CHECK:]
    if len(body) < _HEAD.size or xxhash.xxh3_64_digest(body) != check:
        return None
    magic, size, mtime_ns, chunk, count, version_length = _HEAD.unpack_from(body)
    at = _HEAD.size + version_length
    step = _DIGEST if chunk else _SPAN.size + _DIGEST
    if magic != _MAGIC or len(body) != at + count * step:
        return None
    digests = []
    for index in range(count):
        if chunk:
            offset, length = index * chunk, min(chunk, size - index * chunk)
        else:
            offset, length = _SPAN.unpack_from(body, at)
            at += _SPAN.size
        if length < 0 or offset + length > size:
            return None
        digests.append(Digest(offset, length, body[at : at + _DIGEST]))
        at += _DIGEST
    version = body[_HEAD.size : _HEAD.size + version_length].decode("utf-8", "replace")
    return Record(size, mtime_ns, version, tuple(digests))


def store(root_fd: int, target: int | str, ino: int, record: Record) -> bool:
    """Record it for the file `target` (a descriptor, or its path under /proc/self/fd).

    False when neither place takes it: the file is then unverified. ENOSPC of the manifest is
    raised: a full tier is to be waited for.
    """
    data = encode(record)
    try:
        os.setxattr(target, XATTR, data)
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise
    else:
        drop_manifest(root_fd, ino)
        return True
    try:
        os.removexattr(target, XATTR)  # an older one would win
    except OSError:
        pass  # usually there is none; one that stays describes another size or mtime
    try:
        _write_manifest(root_fd, ino, data)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EIO, errno.ESTALE):
            raise
        return False
    return True


def load(root_fd: int, target: int | str, st: os.stat_result) -> Record | None:
    """The stored record of a file, if there is one that can be read; check `describes` before use."""
    data = b""
    try:
        data = os.getxattr(target, XATTR)
    except OSError as exc:
        if exc.errno in (errno.EIO, errno.ESTALE):
            raise
        data = _read_manifest(root_fd, st.st_ino)
    return decode(data) if data else None


def refresh(root_fd: int, target: int | str, old: Record, st: os.stat_result) -> bool:
    """Follow a change of mtime that ckptfs made itself."""
    return store(root_fd, target, st.st_ino, replace(old, mtime_ns=st.st_mtime_ns))


def _manifest(ino: int) -> bytes:
    return MANIFESTS + b"/%d" % ino


def _write_manifest(root_fd: int, ino: int, data: bytes) -> None:
    make_dirs(root_fd, MANIFESTS)
    name = _manifest(ino)
    temporary = name + b"." + secrets.token_hex(6).encode()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=root_fd)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=root_fd, dst_dir_fd=root_fd)
    except OSError:
        os.unlink(temporary, dir_fd=root_fd)
        raise
    dir_fd = os.open(MANIFESTS, DIRECTORY, dir_fd=root_fd)
    try:
        os.fsync(dir_fd)
    finally:
        os.close(dir_fd)


def _read_manifest(root_fd: int, ino: int) -> bytes:
    try:
        fd = os.open(_manifest(ino), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return b"" if size > _LIMIT else b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    finally:
        os.close(fd)


def drop_manifest(root_fd: int, ino: int) -> None:
    """Forget the manifest of a file that is gone, if it had one."""
    try:
        os.unlink(_manifest(ino), dir_fd=root_fd)
    except OSError:
        pass  # nearly always ENOENT; one that stays describes a size and mtime nobody has
