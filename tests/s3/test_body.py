"""Staged windows as request bodies, and their checksums: the bytes are those a file tier would write."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import itertools
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from ckptfs.tiers import s3_body
from ckptfs.tiers.base import Source, TierError, Trouble
from ckptfs.tiers.s3_body import Body, Checks, checks, checks_of, load
from ckptfs.tiers.window import copy_window

EXTENT = 1 << 16
KINDS = ("ram", "hole in ram", "spilled", "hole in the spill")


def stage(home: Path, kinds: tuple[str, ...], tail: int = 0) -> Callable[[int, int], Source]:
    """Staging files with one extent of each kind, and `tail` bytes in RAM; returns what makes windows."""
    ram, spill = home / "ram", home / "spill"
    size = EXTENT * len(kinds) + tail
    make = random.Random(str(kinds))
    for path in (ram, spill):
        with open(path, "wb") as file:
            file.truncate(size)
    for index, kind in enumerate(kinds):
        if "hole" not in kind:
            with open(spill if kind == "spilled" else ram, "r+b") as file:
                file.seek(index * EXTENT)
                file.write(make.randbytes(EXTENT))
    with open(ram, "r+b") as file:
        file.seek(size - tail)
        file.write(make.randbytes(tail))
    spilled = frozenset(index for index, kind in enumerate(kinds) if "spill" in kind)
    return lambda offset, length: Source(str(ram), offset, length, str(spill), EXTENT, spilled)


def copied(source: Source, home: Path) -> tuple[bytes, bytes]:
    """What a file tier would write of a window, and the digest it would record."""
    target = home / "target"
    with open(target, "w+b") as file:
        file.truncate(source.length)
        digest, _ = copy_window(source, file.fileno(), 0)
    return target.read_bytes(), digest


def sums(data: bytes) -> Checks:
    """The checksums, each taken on its own."""
    crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
    return Checks(xxhash.xxh3_128_digest(data), crc, md5)


def drained(body: Body, size: int = 16384) -> bytes:
    """As urllib3 reads it."""
    pieces = []
    while piece := body.read(size):
        pieces.append(bytes(piece))
    return b"".join(pieces)


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)), ids="-".join)
def test_every_mix_of_pieces(tmp_path: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    window = stage(tmp_path, kinds, tail=777)
    whole = 3 * EXTENT + 777
    for offset, length in [
        (0, whole), (0, EXTENT), (EXTENT, EXTENT), (EXTENT - 1, EXTENT + 2), (5, whole - 9),
        (3 * EXTENT, 777), (whole - 1, 1), (0, 1), (4096, 8192),
    ]:  # fmt: skip
        source = window(offset, length)
        data, digest = copied(source, tmp_path)
        assert len(data) == length
        assert (
            checks(source, md5=True) == load(source, md5=True)[1] == sums(data) == checks_of(data, md5=True)
        )
        assert checks(source).md5 == ""
        assert load(source)[0] == data
        assert sums(data).xxh3 == digest
        for step in (s3_body.SENT, 4096):
            monkeypatch.setattr(s3_body, "SENT", step)
            body = Body(source)
            assert len(body) == length
            assert drained(body) == data
            assert body.tell() == length


@pytest.fixture
def window(tmp_path: Path) -> Callable[[int, int], Source]:
    return stage(tmp_path, ("ram", "spilled", "hole in ram", "ram", "spilled"), tail=100)


def test_a_body_is_read_again_from_anywhere(window: Callable[[int, int], Source], tmp_path: Path) -> None:
    source = window(100, 4 * EXTENT)
    data, _ = copied(source, tmp_path)
    body = Body(source)
    assert body.readable()
    assert body.seekable()
    first = bytes(body.read(1))
    assert data.startswith(first)
    assert body.tell() == len(first) > 1  # more than was asked for, on purpose
    for where in (0, 1, EXTENT - 101, EXTENT, 3 * EXTENT + 5, len(data) - 1, len(data), len(data) + 5):
        assert body.seek(where) == body.tell() == where
        assert drained(body) == data[where:]
        assert body.seek(where) == where
        assert body.read() == data[where:]
        assert body.read(1) == b""
    assert body.seek(-3, io.SEEK_END) == len(data) - 3
    assert body.read(None) == data[-3:]
    body.rewind()
    assert body.tell() == 0
    body.rewind()
    assert drained(body) == data
    body.rewind()
    body.seek(7)
    assert body.read() == data[7:]
    body.rewind()
    body.close()
    assert drained(body) == data
    body.seek(10)
    assert body.seek(5, io.SEEK_CUR) == 15
    assert body.read(0) == b""
    with pytest.raises(ValueError, match="before the body"):
        body.seek(-1)
    body.close()
    assert body.read(-1) == data[15:]


def test_an_empty_body() -> None:
    source = Source("", 0, 0)
    body = Body(source)
    body.rewind()
    assert (len(body), body.read(10), body.read(), bool(len(body))) == (0, b"", b"", False)
    assert checks(source, md5=True) == sums(b"")
    assert load(source) == (b"", checks(source))


def test_closing_gives_everything_back(window: Callable[[int, int], Source]) -> None:
    """Also in the middle, with a slice of it still in somebody's hands."""

    def held() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            mapped = sum("/ram" in line or "/spill" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mapped

    before = held()
    for position in (0, EXTENT, 2 * EXTENT):
        body = Body(window(0, 5 * EXTENT))
        body.seek(position)
        piece = body.read(1)
        body.close()
        body.close()
        del piece
    assert held() == before


@pytest.mark.parametrize("which", ["ram", "spill"])
def test_staging_that_is_short_or_gone_is_to_be_done_again(
    window: Callable[[int, int], Source], tmp_path: Path, which: str
) -> None:
    source = window(0, 5 * EXTENT)
    os.truncate(tmp_path / which, EXTENT // 2)
    body = Body(source)
    for _ in range(2):  # what failed once does not look like an end
        with pytest.raises(TierError):
            drained(body)
    if which == "ram":
        for _ in range(2):
            with pytest.raises(TierError):
                body.rewind()
    for call in (lambda: drained(Body(source)), lambda: checks(source), lambda: load(source)):
        with pytest.raises(TierError) as caught:
            call()
        assert (caught.value.trouble, caught.value.errno) == (Trouble.REDO, errno.ENODATA)
    (tmp_path / which).unlink()
    with pytest.raises(TierError) as caught:
        drained(Body(source))
    assert (caught.value.trouble, caught.value.errno) == (Trouble.REDO, errno.ENOENT)


def test_a_failing_disk_is_not_the_stores_fault(
    window: Callable[[int, int], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TierError) as caught:
        drained(Body(window(0, 5 * EXTENT)))
    assert (caught.value.trouble, caught.value.errno) == (Trouble.DOWN, errno.EIO)
    assert "reading " in caught.value.message
