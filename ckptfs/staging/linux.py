"""The two Linux calls that Python's os module lacks."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2


def punch(fd: int, offset: int, length: int) -> None:
    """Give back the pages of `[offset, offset+length)`; reads there give zeros. See fallocate(2)."""
    if _libc.fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
