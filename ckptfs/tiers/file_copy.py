"""Copying between files inside the kernel, holes kept."""

from __future__ import annotations

import errno
import os

from ckptfs.tiers.linux import data_ranges, drop_cache, punch_hole
from ckptfs.tiers.window import WriteBehind

_STEP = 8 << 20
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def copy_range(src_fd: int, dst_fd: int, offset: int, length: int, behind: WriteBehind | None = None) -> int:
    """Copy `[offset, offset+length)` to the same range of another file with sendfile(2).

    Holes of the source become holes of the target. Returns the number of bytes, short only at the
    end of the source. Moves the target's file position; copy_file_range(2) is not used because
    between two file systems it gives EXDEV.
    """
    end = min(offset + length, os.fstat(src_fd).st_size)
    if end <= offset:
        return 0
    for start, stop, is_data in data_ranges(src_fd, offset, end):
        if not is_data:
            if any(data for _, _, data in data_ranges(dst_fd, start, stop)) and not punch_hole(
                dst_fd, start, stop - start
            ):
                _copy(src_fd, dst_fd, start, stop, behind)
            continue
        reached = _copy(src_fd, dst_fd, start, stop, behind)
        if reached < stop:  # truncated meanwhile
            return reached - offset
    if os.fstat(dst_fd).st_size < end:
        os.ftruncate(dst_fd, end)
    return end - offset


def _copy(src_fd: int, dst_fd: int, start: int, stop: int, behind: WriteBehind | None) -> int:
    """Copy a range that is data; returns where it ended."""
    os.lseek(dst_fd, start, os.SEEK_SET)
    at = start
    while at < stop:
        want = min(_STEP, stop - at)
        try:
            sent = os.sendfile(dst_fd, src_fd, at, want)
        except OSError as exc:
            if exc.errno not in _NO_SENDFILE:
                raise
            sent = _copy_buffered(src_fd, dst_fd, at, want)
        if sent == 0:
            break
        drop_cache(src_fd, at, sent)
        at += sent
        if behind is not None:
            behind.wrote(at)
    return at


def _copy_buffered(src_fd: int, dst_fd: int, at: int, want: int) -> int:
    """For file systems whose files cannot be spliced from."""
    data = os.pread(src_fd, min(want, 1 << 20), at)
    done = 0
    while done < len(data):
        done += os.write(dst_fd, memoryview(data)[done:])
    return done
