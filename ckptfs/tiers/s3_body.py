"""Staged bytes as request bodies, and the checksums an object store can verify.

One pass takes all checksums of a window, a second one sends it: both read the very pages the application
wrote, in large slices (`window.py`). Measured: a body that hands out large slices of a mapping costs
a quarter of the client CPU of one given as bytes, because nothing is copied and `sendall` is called rarely.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import os
from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import xxhash

from ckptfs.tiers.base import Source, TierError, Trouble
from ckptfs.tiers.window import SLICE, Slice, narrow, slices

try:
    # The same sum as zlib's, at the speed of xxh3: 35 GiB/s measured, zlib's 7.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32


SENT = 4 << 20
"""Bytes handed to the socket at a time. Measured over loopback, CPU seconds per GiB: 0.155 with 1 MiB at a
time, 0.115 with 4 MiB; 0.083 is sendfile(2)."""


class Checks(NamedTuple):
    """Checksums of one body."""

    xxh3: bytes
    """xxh3-128, ours."""
    crc32: str
    """For `x-amz-checksum-crc32` (`ChecksumCRC32=`): base64 of the big-endian value."""
    md5: str
    """For `Content-MD5` (`ContentMD5=`): base64; empty unless asked for."""


class _Sums:
    """Checksums over bytes that come in slices."""

    def __init__(self, md5: bool) -> None:
        self._xxh3 = xxhash.xxh3_128()
        self._crc = 0
        # Not for security, and so allowed on machines that forbid md5 elsewhere.
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 else None

    def update(self, data: bytes | memoryview) -> None:
        self._xxh3.update(data)
        self._crc = crc32(data, self._crc)
        if self._md5 is not None:
            self._md5.update(data)

    def done(self) -> Checks:
        md5 = base64.b64encode(self._md5.digest()).decode() if self._md5 is not None else ""
        return Checks(self._xxh3.digest(), base64.b64encode(self._crc.to_bytes(4, "big")).decode(), md5)


def checks(source: Source, *, md5: bool = False) -> Checks:
    """All checksums of a window in one pass. TierError as from `window.slices`; DOWN when a disk fails."""
    sums = _Sums(md5)
    with closing(_slices(source)) as parts:
        for part in parts:
            sums.update(part.view)
    return sums.done()


def checks_of(data: bytes, *, md5: bool = False) -> Checks:
    """All checksums of some bytes."""
    sums = _Sums(md5)
    sums.update(data)
    return sums.done()


def load(source: Source, *, md5: bool = False) -> tuple[bytes, Checks]:
    """The bytes of a small window and their checksums.

    A body of `bytes` leaves in one packet with the request's head and without `Expect: 100-continue`,
    which saves small objects a round trip.
    """
    sums = _Sums(md5)
    data = bytearray()
    with closing(_slices(source)) as parts:
        for part in parts:
            sums.update(part.view)
            data += part.view
    return bytes(data), sums.done()


class Body:
    """A window as a request body: seekable, and read in slices of its own choice.

    `read(n)` returns *more* than `n` bytes when `n` is small (urllib3 asks for 16 KiB at a time; sending
    megabytes at a time is what makes it cheap), never less than one byte before the end. What it returns is
    valid until the next call. The staging files must not change meanwhile, as for `window.slices`.
    Failures of staging are `TierError`; `Store.run` finds them again inside the client's own errors.
    For one thread at a time.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0
        self._parts: Generator[Slice, None, None] | None = None
        self._ahead: Slice | None = None

    def __len__(self) -> int:
        return self._source.length

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be sent again."""
        return True

    def tell(self) -> int:
        """Bytes from the start of the window."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go somewhere in the window; returns where."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self)}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} lies before the body")
        if base + offset != self._at:
            self.close()
            self._at = base + offset
        return self._at

    def rewind(self) -> None:
        """Go to the start and get its first bytes ready; raises what would keep them from being sent.

        To be done before the request is: SeaweedFS takes a request whose connection ends before the first
        byte of the body for one with an empty body.
        """
        self.close()
        self._at = 0
        if len(self):
            self._ahead = self._slice()

    def read(self, size: int | None = -1) -> bytes | memoryview:
        """The next slice, all that is left when `size` is negative or None, `b""` at the end."""
        if size is None or size < 0:
            rest = bytearray()
            while slice_ := self._next():
                rest += slice_
            return bytes(rest)
        return self._next() if size else b""

    def _next(self) -> memoryview | bytes:
        part, self._ahead = self._ahead or self._slice(), None
        if part is None:
            return b""
        self._at += len(part.view)
        return part.view

    def _slice(self) -> Slice | None:
        """What comes next. After a failure everything is opened anew."""
        if self._parts is None:
            left = len(self) - self._at
            if left <= 0:
                return None
            self._parts = _slices(narrow(self._source, self._source.offset + self._at, left), SENT)
        try:
            return next(self._parts, None)
        except TierError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap and close the staging files; a later read opens them again."""
        if self._parts is not None:
            self._parts.close()
            self._parts = self._ahead = None


def _slices(source: Source, step: int = SLICE) -> Generator[Slice, None, None]:
    """`slices` whose OSErrors say that it was staging that failed, not the connection."""
    try:
        yield from slices(source, step)
    except OSError as exc:
        code = exc.errno or errno.EIO
        raise TierError(Trouble.DOWN, f"reading {source.ram_path}: {os.strerror(code)}", code) from exc
