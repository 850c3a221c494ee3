"""A staging file system that is small, or that others fill, and one that is somewhere else than before."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for

MIB = 1 << 20


@pytest.fixture
def small(disk: Path) -> Iterator[Path]:
    """64 MiB, as /dev/shm has in containers, where users without root stage."""
    at = disk / "small"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "ckptfs-test", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def save(path: Path, mib: int) -> bytes:
    block = os.urandom(MIB)
    with open(path, "wb") as f:
        for _ in range(mib):
            f.write(block)
    return block


def test_files_larger_than_the_file_system_go_through_the_spill(
    small: Path, new_mount: Callable[..., Mount]
) -> None:
    mount = new_mount()
    done = mount.start("--cache-dir", str(small), "--cache-size", "10GiB")
    assert "the cache is limited to 3" in done.stdout
    assert 30 * MIB < mount.status()["cache"]["limit_bytes"] <= 40 * MIB
    block = save(mount.point / "large", 200)
    mount.wait(timeout=60)
    assert (mount.tier / "large").read_bytes() == block * 200
    assert mount.status()["journal_error"] is None
    assert mount.status()["errors"] == 0


def test_others_fill_it(small: Path, new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    mount.start("--cache-dir", str(small), "--cache-size", "10GiB", config="settle_time = 3600\n")
    (small / "ballast").write_bytes(bytes(30 * MIB))
    wait_for(lambda: mount.status()["cache"]["limit_bytes"] <= 11 * MIB, "a smaller budget")
    block = save(mount.point / "large", 100)
    mount.wait(timeout=60)
    assert (mount.tier / "large").read_bytes() == block * 100
    (small / "ballast").unlink()
    wait_for(lambda: mount.status()["cache"]["limit_bytes"] > 30 * MIB, "the budget's return")


def test_a_disk_that_fills_up_makes_the_writer_spill(small: Path, new_mount: Callable[..., Mount]) -> None:
    """Faster than the budget follows: all at once, between two looks at the room."""
    mount = new_mount()
    mount.start("--cache-dir", str(small), "--cache-size", "60MiB", "--spill-size", "200MiB")
    with open(mount.point / "f", "wb", buffering=0) as f:
        done = f.write(b"1" * (20 * MIB))
        ballast = small / "ballast"
        st = os.statvfs(small)
        ballast.write_bytes(bytes(st.f_bavail * st.f_frsize - 4 * MIB))  # the journal needs some
        while done < 60 * MIB:
            done += f.write(b"1" * MIB)
    ballast.unlink()
    mount.wait(timeout=30)
    assert (mount.tier / "f").read_bytes() == b"1" * done


def test_digests_of_closed_files_are_not_lost_to_a_full_disk(
    small: Path, new_mount: Callable[..., Mount]
) -> None:
    mount = new_mount()
    mount.start("--cache-dir", str(small), "--cache-size", "60MiB", config="settle_time = 3600\n")
    files = [open(mount.point / f"f{i}", "wb", buffering=0) for i in range(8)]  # noqa: SIM115
    for f in files:
        f.write(b"d" * 3000)
    with contextlib.suppress(OSError), open(small / "ballast", "wb", buffering=0) as b:
        while True:
            b.write(bytes(4096))
    closer = threading.Thread(target=lambda: [f.close() for f in files])
    closer.start()
    wait_for(lambda: mount.status()["journal_error"] or not closer.is_alive(), "a full disk to be noticed")
    (small / "ballast").unlink()
    closer.join(30)
    assert not closer.is_alive()
    mount.kill(workers=True)
    with contextlib.closing(sqlite3.connect(next(small.rglob("journal.sqlite")))) as db:
        db.execute("UPDATE meta SET value='another boot' WHERE key='boot_id'")
        db.commit()
    mount.start()
    assert mount.status()["interrupted"] == []
    mount.wait(timeout=30)
    assert len(mount.tier_names()) == 8


def test_no_room_at_all_is_refused_in_time(small: Path, new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    (small / "ballast").write_bytes(bytes(50 * MIB))
    done = mount.start("--cache-dir", str(small), check=False)
    assert done.returncode == 7
    assert "free, too little to stage in: make room there" in done.stderr


def fill_up(where: Path) -> Path:
    """Leave no room at all."""
    ballast = where / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as f:
        while True:
            f.write(bytes(65_536))
    return ballast


def test_full_after_a_crash_there_is_room_for_the_journal(
    small: Path, new_mount: Callable[..., Mount]
) -> None:
    mount = new_mount()
    mount.start("--cache-dir", str(small), config="settle_time = 3600\n")
    block = save(mount.point / "f", 4)
    mount.kill(workers=True)
    fill_up(small)
    mount.start()
    mount.wait(timeout=30)
    assert (mount.tier / "f").read_bytes() == block * 4


def test_full_after_a_crash_and_nothing_held_back_is_said(
    small: Path, new_mount: Callable[..., Mount]
) -> None:
    mount = new_mount()
    mount.start("--cache-dir", str(small), config="settle_time = 3600\n")
    block = save(mount.point / "f", 4)
    mount.kill(workers=True)
    next(small.rglob("reserve")).unlink()
    ballast = fill_up(small)
    done = mount.start(check=False)
    assert done.returncode == 1
    assert "is full: make room there and mount again; nothing is lost" in done.stderr
    ballast.unlink()
    mount.start()
    mount.wait(timeout=30)
    assert (mount.tier / "f").read_bytes() == block * 4


def test_another_cache_dir_does_not_hide_what_is_staged(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    for name in ("one", "two"):
        (mount.base / name).mkdir()
    one, two = (["--cache-dir", str(mount.base / name)] for name in ("one", "two"))
    mount.start(*one, config="settle_time = 3600\n")
    mount.point.joinpath("f").write_bytes(b"staged")
    mount.kill(workers=True)
    for options in (two, []):
        done = mount.start("--no-allow-other", *options, check=False)
        assert done.returncode == 2
        where = mount.base / "one"
        assert f"files of {mount.point} are still staged in {where} (1 of them): mount it" in done.stderr
        assert f"--cache-dir {where} first" in done.stderr
    (mount.base / "one").rename(mount.base / "gone")
    done = mount.start(*two, check=False)
    assert done.returncode == 2
    assert "which is not there: mount that disk, or remove" in done.stderr
    (mount.base / "gone").rename(mount.base / "one")
    mount.start(*one)
    mount.umount()
    assert (mount.tier / "f").read_bytes() == b"staged"
    mount.start(*two)  # nothing is left there
    mount.point.joinpath("g").write_bytes(b"staged in memory no more")
    mount.umount()


def test_what_is_staged_in_memory_is_not_hidden_either(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    (mount.base / "one").mkdir()
    mount.start(config="settle_time = 3600\n")
    mount.point.joinpath("f").write_bytes(b"staged")
    mount.kill(workers=True)
    done = mount.start("--cache-dir", str(mount.base / "one"), check=False)
    assert done.returncode == 2
    assert "are still staged in memory (1 of them)" in done.stderr
    mount.start("--no-allow-other")
    mount.umount()
    assert (mount.tier / "f").read_bytes() == b"staged"
