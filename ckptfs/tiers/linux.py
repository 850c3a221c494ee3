"""The few Linux calls Python has no name for. Each one is an optimisation or has a fallback.

Facts are from sync_file_range(2), posix_fadvise(2), fallocate(2) and prctl(2). A C library or a
kernel without one of them makes the function a no-op that says so in its result.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

_SYNC_WAIT_BEFORE = 1
_SYNC_WRITE = 2
_SYNC_WAIT_AFTER = 4
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_PR_SET_PDEATHSIG = 1

_NOT_HERE = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.ENODEV})

_libc = ctypes.CDLL(None, use_errno=True)


def _bound(name: str, *argtypes: Any) -> Any:
    """The C function, or None when this C library lacks it."""
    function = getattr(_libc, name, None)
    if function is not None:
        function.argtypes = argtypes
        function.restype = ctypes.c_int
    return function


_sync_file_range = _bound("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_fallocate = _bound("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64) or _bound(
    "fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
)
_prctl = _bound("prctl", ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def _sync_range(fd: int, offset: int, length: int, flags: int) -> bool:
    if _sync_file_range is None or length <= 0:
        return False
    if _sync_file_range(fd, offset, length, flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    # A wait consumes the error mark of this descriptor (a later fdatasync would return 0), so a
    # write-back failure seen here must not be dropped.
    raise OSError(code, os.strerror(code))


def start_writeback(fd: int, offset: int, length: int) -> bool:
    """Begin writing dirty pages of the range to storage, without waiting. OSError on I/O errors."""
    return _sync_range(fd, offset, length, _SYNC_WRITE)


def finish_writeback(fd: int, offset: int, length: int) -> bool:
    """Write dirty pages of the range and wait for them. No promise about metadata or disk caches."""
    return _sync_range(fd, offset, length, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER)


def drop_cache(fd: int, offset: int, length: int) -> None:
    """Give the clean page cache of the range back to the machine; dirty pages stay."""
    try:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError:
        return  # advice only


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Free the range of a file, keeping its size; False where the file system cannot."""
    if _fallocate is None or length <= 0:
        return False
    if _fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code))


def die_with_parent(signal_number: int) -> bool:
    """Have the kernel send `signal_number` to this process when the thread that started it ends."""
    return _prctl is not None and _prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) == 0


def data_ranges(fd: int, offset: int, end: int) -> list[tuple[int, int, bool]]:
    """`[offset, end)` of a file as consecutive `(start, stop, is_data)` ranges.

    Holes matter twice: they need no bytes moved, and *touching* a hole of a tmpfs file through a
    mapping allocates the page (shmem fills holes on a read fault), which would break the byte
    budget. Where SEEK_DATA is not supported all is data.
    """
    ranges: list[tuple[int, int, bool]] = []
    at = offset
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # nothing but a hole up to the end of the file
                ranges.append((at, end, False))
                break
            if exc.errno not in _NOT_HERE:
                raise
            ranges.append((at, end, True))
            break
        if data > at:
            ranges.append((at, min(data, end), False))
        if data >= end:
            break
        hole = min(os.lseek(fd, data, os.SEEK_HOLE), end)
        ranges.append((data, hole, True))
        at = hole
    return ranges
