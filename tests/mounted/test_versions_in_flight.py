"""Invariant 5: a sealed version does not change, whatever is done to its file while it is on its way."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for

MIB = 1 << 20


@contextmanager
def tier_away(mount: Mount) -> Iterator[Path]:
    """The tier is gone while the block runs; gives where it is."""
    aside = mount.tier.with_name("tier-aside")
    mount.tier.rename(aside)
    try:
        yield aside
    finally:
        aside.rename(mount.tier)


def versions(tier: Path, name: str, stop: threading.Event, seen: list[bytes]) -> None:
    while not stop.is_set():
        try:
            data = (tier / name).read_bytes()
        except OSError:
            continue
        if not seen or seen[-1] != data:
            seen.append(data)


def test_overwriting_while_older_versions_are_in_flight_publishes_all_in_order(new_mount: object) -> None:
    mount: Mount = new_mount()  # type: ignore[operator]
    mount.start(config="settle_time = 0\n")
    wanted = [bytes([65 + i]) * (3 * MIB + i) for i in range(4)]
    with tier_away(mount):
        for data in wanted:
            (mount.point / "f").write_bytes(data)
            (mount.point / "marker").write_bytes(data[:1])
            assert (mount.point / "f").read_bytes() == data
        wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
        assert mount.state("f") in ("dirty", "flushing")
        assert mount.ask("wait", timeout_s=0.1)["code"] == 3
    seen: list[bytes] = []
    stop = threading.Event()
    watcher = threading.Thread(target=versions, args=(mount.tier, "f", stop, seen))
    watcher.start()
    mount.wait()
    stop.set()
    watcher.join()
    assert (mount.tier / "f").read_bytes() == wanted[-1]
    assert (mount.tier / "marker").read_bytes() == b"D"
    order = [wanted.index(s) for s in seen]
    assert order == sorted(order)


@pytest.mark.parametrize("how", ["pwrite", "rdwr", "mmap", "truncate", "ftruncate", "append", "grow"])
def test_changing_a_file_below_a_version_in_flight(shared: Mount, how: str) -> None:
    f, first = shared.point / how, os.urandom(5 * MIB)
    expected = bytearray(first)
    shared.wait()
    with tier_away(shared):
        f.write_bytes(first)
        (shared.point / "g").write_bytes(b"g")
        os.rename(shared.point / "g", shared.point / "h")
        wait_for(lambda: shared.status()["tier"]["state"] == "down", "the tier to be down")
        if how == "pwrite":
            fd = os.open(f, os.O_WRONLY)
            os.pwrite(fd, b"changed", MIB)
            os.close(fd)
            expected[MIB : MIB + 7] = b"changed"
        elif how == "rdwr":
            fd = os.open(f, os.O_RDWR)
            assert os.pread(fd, 10, 2 * MIB) == first[2 * MIB : 2 * MIB + 10]
            os.pwrite(fd, b"changed", 0)
            os.close(fd)
            expected[:7] = b"changed"
        elif how == "mmap":
            with open(f, "r+b") as fh, mmap.mmap(fh.fileno(), 0) as m:
                m[100:107] = b"changed"
            expected[100:107] = b"changed"
        elif how == "truncate":
            os.truncate(f, MIB + 1)
            del expected[MIB + 1 :]
        elif how == "ftruncate":
            with open(f, "r+b") as fh:
                fh.truncate(3)
            del expected[3:]
        elif how == "append":
            with open(f, "ab") as fh:
                fh.write(b"more")
            expected += b"more"
        else:
            os.truncate(f, 6 * MIB)
            expected += bytes(MIB)
        assert f.read_bytes() == expected
    seen: list[bytes] = []
    stop = threading.Event()
    watcher = threading.Thread(target=versions, args=(shared.tier, how, stop, seen))
    watcher.start()
    shared.wait()
    stop.set()
    watcher.join()
    assert set(seen) <= {bytes(first), bytes(expected)}
    assert (shared.tier / how).read_bytes() == expected
    assert f.read_bytes() == expected


def test_a_killed_daemon_keeps_the_versions_apart(mount: Mount) -> None:
    with tier_away(mount):
        (mount.point / "f").write_bytes(b"1" * MIB)
        wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
        fd = os.open(mount.point / "f", os.O_WRONLY)
        os.pwrite(fd, b"2", 10)
        os.close(fd)
        mount.kill(workers=True)
    mount.start()
    wanted = b"1" * 10 + b"2" + b"1" * (MIB - 11)
    assert (mount.point / "f").read_bytes() == wanted
    mount.wait()
    assert (mount.tier / "f").read_bytes() == wanted


def test_cached_readers_and_mappings_never_see_stale_bytes(shared: Mount) -> None:
    """A direct writer, and a reader that looks right after each write: 0 stale."""
    path = shared.point / "coherent"
    path.write_bytes(bytes(64 * 1024))
    out = os.open(path, os.O_WRONLY)
    rdwr = os.open(path, os.O_RDWR)
    stale = 0
    with open(path, "rb", buffering=0) as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        for i in range(1, 1_500):
            where = (i * 7919) % (60 * 1024)
            mark = i.to_bytes(4, "little")
            os.pwrite(out if i % 3 else rdwr, mark, where)
            stale += os.pread(f.fileno(), 4, where) != mark
            stale += m[where : where + 4] != mark
            stale += os.pread(rdwr, 4, where) != mark
    os.close(out)
    os.close(rdwr)
    assert stale == 0


def test_a_reader_beside_a_writer_sees_its_stores_in_order(shared: Mount) -> None:
    """Two pages are written one after the other: the second is never newer than the first."""
    path = shared.point / "ordered"
    path.write_bytes(bytes(8192))
    stop = threading.Event()
    bad: list[tuple[int, int]] = []

    def reader() -> None:
        fd = os.open(path, os.O_RDONLY)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m:
            while not stop.is_set():
                for get in (lambda o: m[o : o + 8], lambda o: os.pread(fd, 8, o)):
                    second = int.from_bytes(get(4096), "little")
                    first = int.from_bytes(get(0), "little")
                    if second > first:
                        bad.append((first, second))
        os.close(fd)

    thread = threading.Thread(target=reader)
    thread.start()
    fd = os.open(path, os.O_WRONLY)
    for i in range(1, 1_500):
        os.pwrite(fd, i.to_bytes(8, "little"), 0)
        os.pwrite(fd, i.to_bytes(8, "little"), 4096)
    os.close(fd)
    stop.set()
    thread.join()
    assert not bad


def test_unlinked_and_made_again_while_in_flight(mount: Mount) -> None:
    """Old content, removal and new content of one name, and a directory in a file's place."""
    (mount.point / "a").write_bytes(b"old a")
    (mount.point / "d").mkdir()
    (mount.point / "d" / "x").write_bytes(b"x")
    mount.wait()
    with tier_away(mount):
        os.unlink(mount.point / "a")
        (mount.point / "a").mkdir()
        (mount.point / "a" / "inner").write_bytes(b"inner")
        os.unlink(mount.point / "d" / "x")
        os.rmdir(mount.point / "d")
        (mount.point / "d").write_bytes(b"a file now")
        (mount.point / "e").write_bytes(b"e1")
        os.unlink(mount.point / "e")
        os.symlink("a", mount.point / "e")
    mount.wait()
    assert mount.tier_names() == {"a", "a/inner", "d", "e"}
    assert (mount.tier / "d").read_bytes() == b"a file now"
    assert os.readlink(mount.tier / "e") == "a"
    assert mount.status()["conflicts"] == 0
