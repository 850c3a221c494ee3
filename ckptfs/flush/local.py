"""Jobs on staging files that run in workers because they move bytes, but call no tier.

Failures of the local disk or tmpfs are `TierError(DOWN)` with their errno, so the caller sees one
kind of error; a staging file that is missing or short is `TierError(REDO)`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptfs.tiers.base import Digest, Source, TierError, Trouble
from ckptfs.tiers.linux import data_ranges, punch_hole
from ckptfs.tiers.window import WriteBehind, copy_window, write_all
from ckptfs.tiers.window import digest as _digest
from ckptfs.tiers.window import digest_chunks as _digest_chunks

_ZEROS = memoryview(bytes(1 << 20))


def _local_error(exc: OSError, what: str) -> TierError:
    code = exc.errno or errno.EIO
    return TierError(Trouble.DOWN, f"{what}: {os.strerror(code)}", code)


def _open_target(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _make_empty(fd: int, offset: int, length: int) -> None:
    """Let the range read as zeros, freeing what it held, and the file reach to its end.

    Others may be writing other ranges and the file's end at this moment: ftruncate(2) could cut off what
    they have just written.
    """
    end = offset + length
    if os.fstat(fd).st_size < end:
        write_all(fd, _ZEROS[:1], end - 1)
    for start, stop, is_data in data_ranges(fd, offset, end):
        if is_data and not punch_hole(fd, start, stop - start):
            for at in range(start, stop, len(_ZEROS)):
                write_all(fd, _ZEROS[: min(len(_ZEROS), stop - at)], at)


def clone(source: Source, into: str) -> int:
    """Copy the window to the same offsets of the staging file `into` (made when missing).

    Holes stay holes. Returns the number of bytes written, without holes. ENOSPC when the staging
    file system has no room; `into` is then incomplete.
    """
    try:
        fd = _open_target(into)
        try:
            _make_empty(fd, source.offset, source.length)
            _, written = copy_window(source, fd, source.offset)
            return written
        finally:
            os.close(fd)
    except OSError as exc:
        raise _local_error(exc, f"cloning {source.ram_path} to {into}") from exc


def spill(ram_path: str, spill_path: str, offset: int, length: int, durable: bool = False) -> int:
    """Copy an extent of a staging file to the same offsets of its spill file (made when missing).

    The page cache of the spill file is written back and dropped, or spilling would only move the
    bytes within RAM. `durable` adds fdatasync(2), for staging that outlives the machine. Past the
    end of the staging file nothing is copied. Returns the number of bytes written, without holes.
    """
    try:
        try:
            size = os.stat(ram_path).st_size
        except FileNotFoundError as exc:
            raise TierError(Trouble.REDO, f"staging file {ram_path} is gone", errno.ENOENT) from exc
        extent, length = length, min(length, size - offset)
        if length <= 0:
            return 0
        fd = _open_target(spill_path)
        try:
            # An earlier spill of the same extent may have left bytes where now is a hole. All of the
            # extent exists in the spill file, since the staging file may grow later.
            _make_empty(fd, offset, extent)
            behind = WriteBehind(fd, offset)
            _, written = copy_window(Source(ram_path, offset, length), fd, offset, behind)
            behind.finish(durable)
            return written
        finally:
            os.close(fd)
    except OSError as exc:
        raise _local_error(exc, f"spilling {ram_path} to {spill_path}") from exc


def digest(source: Source) -> bytes:
    """xxh3-128 of the window."""
    try:
        return _digest(source)
    except OSError as exc:
        raise _local_error(exc, f"reading {source.ram_path}") from exc


def digest_chunks(source: Source, chunk: int) -> tuple[Digest, ...]:
    """xxh3-128 of the window cut at multiples of `chunk` bytes of the version."""
    try:
        return _digest_chunks(source, chunk)
    except OSError as exc:
        raise _local_error(exc, f"reading {source.ram_path}") from exc


JOBS: Mapping[str, Callable[..., Any]] = {
    "clone": clone,
    "spill": spill,
    "digest": digest,
    "digest_chunks": digest_chunks,
}
"""What a `Call` may name besides the methods of a tier (whose `digests` is another thing)."""
