"""What flags of open(2) and lengths beyond the tier's limit do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for
from tests.mounted.oracle import outcome, run_as

NewMount = Callable[..., Mount]
MIB = 1 << 20

TRUNCATING_READERS = [os.O_RDONLY | os.O_TRUNC, os.O_RDONLY | os.O_CREAT | os.O_TRUNC]


@pytest.mark.parametrize("flags", TRUNCATING_READERS)
def test_opening_for_reading_truncates_as_on_a_local_disk(mount: Mount, disk: Path, flags: int) -> None:
    for top in (disk, mount.point):
        (top / "f").write_bytes(b"old content")
        os.utime(top / "f", (1, 1))
        fd = os.open(top / "f", flags, 0o644)
        assert os.fstat(fd).st_size == 0
        assert os.read(fd, 10) == b""
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)
        assert (top / "f").read_bytes() == b""
        assert (top / "f").stat().st_mtime > 1e9
    mount.wait()  # although the descriptor was never one that writes
    assert (mount.tier / "f").read_bytes() == b""
    assert mount.status()["interrupted"] == []


def test_opening_for_reading_truncates_what_only_the_tier_has_and_what_is_open(mount: Mount) -> None:
    (mount.tier / "there").write_bytes(b"t" * MIB)
    wait_for((mount.point / "there").exists, "the file of another")
    os.close(os.open(mount.point / "there", os.O_RDONLY | os.O_TRUNC))
    with open(mount.point / "open", "wb", buffering=0) as f:
        f.write(b"0123456789")
        os.close(os.open(mount.point / "open", os.O_RDONLY | os.O_TRUNC))
        f.seek(0)
        f.write(b"new")
    mount.wait()
    assert (mount.tier / "there").read_bytes() == b""
    assert (mount.tier / "open").read_bytes() == b"new"


def test_opening_for_reading_truncates_only_what_one_may_write(mount: Mount) -> None:
    for name, mode in (("readable", 0o644), ("writable", 0o666)):
        (mount.point / name).write_bytes(b"content")
        os.chmod(mount.point / name, mode)
        opened = run_as(65534, 65534, partial(os.open, mount.point / name, os.O_RDONLY | os.O_TRUNC))
        assert (opened == "'EACCES'") == (name == "readable"), opened
        assert (mount.point / name).read_bytes() == (b"content" if name == "readable" else b"")


# -- O_SYNC -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [os.O_SYNC, os.O_DSYNC])
@pytest.mark.parametrize(
    "access", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_DIRECT]
)
def test_a_synchronous_write_is_on_the_tier_under_fsync_tier(
    new_mount: NewMount, access: int, sync: int
) -> None:
    mount = new_mount()
    mount.start(config='settle_time = 3600\n[fsync_rules]\n"*.sync" = "tier"\n')
    (mount.point / "old.sync").write_bytes(b"")
    for name in ("new.sync", "old.sync"):
        fd = os.open(mount.point / name, access | sync | os.O_CREAT, 0o644)
        assert os.write(fd, b"one") == 3
        assert (mount.tier / name).read_bytes() == b"one"
        assert os.write(fd, b" two") == 4
        assert (mount.tier / name).read_bytes() == b"one two"
        os.close(fd)
    # The rules go by file.
    fd = os.open(mount.point / "f", access | sync | os.O_CREAT, 0o644)
    os.write(fd, b"one")
    assert not (mount.tier / "f").exists()
    os.close(fd)


def test_a_synchronous_write_waits_for_a_tier_that_is_down_and_can_be_killed(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config='settle_time = 3600\nfsync = "tier"\n')
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    code = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_DSYNC | os.O_CREAT)
print("ready", flush=True)
os.write(fd, b"x")
print("written", flush=True)
"""
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(mount.point / name)], stdout=subprocess.PIPE, text=True
        )
        for name in "fg"
    ]
    for process in waiting:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    assert all(process.poll() is None for process in waiting)
    waiting[0].send_signal(signal.SIGKILL)
    assert waiting[0].wait(5) == -signal.SIGKILL
    aside.rename(mount.tier)
    assert waiting[1].communicate(timeout=20)[0] == "written\n"


def test_a_synchronous_write_does_not_wait_under_fsync_cache(mount: Mount) -> None:
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    done = threading.Event()

    def write() -> None:
        for access in (os.O_WRONLY, os.O_RDWR):
            fd = os.open(mount.point / f"f{access}", access | os.O_SYNC | os.O_CREAT)
            os.write(fd, b"x")
            os.close(fd)
        done.set()

    threading.Thread(target=write).start()
    assert done.wait(5)
    aside.rename(mount.tier)


# -- the largest file ---------------------------------------------------------------------------


def largest(directory: Path) -> int:
    """Bytes of the largest file there, by asking truncate(2) alone."""
    path = directory / "probe"
    path.touch()
    low, high = 0, (1 << 63) - 1
    try:
        os.truncate(path, high)
        low = high
    except OSError:
        while high - low > 1:
            middle = (low + high) // 2
            try:
                os.truncate(path, middle)
                low = middle
            except OSError:
                high = middle
    path.unlink()
    return low


ABSURD = 1 << 62


def refused(call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match="File too large") as e:
        call(*arguments)
    assert e.value.errno == errno.EFBIG


@pytest.mark.parametrize("access", [os.O_WRONLY, os.O_RDWR])
def test_what_the_tier_cannot_hold_is_refused_at_once(mount: Mount, disk: Path, access: int) -> None:
    limit = largest(disk)
    if limit > ABSURD:
        pytest.skip("the tier's file system has no limit")
    f = mount.point / "f"
    f.write_bytes(b"content")
    refused(os.truncate, f, ABSURD)
    refused(os.truncate, f, limit + 1)
    fd = os.open(f, access)
    refused(os.ftruncate, fd, ABSURD)
    refused(os.pwrite, fd, b"x", ABSURD)
    refused(os.pwrite, fd, b"x", limit)
    os.pwrite(fd, b"C", 0)
    os.close(fd)
    assert f.read_bytes() == b"Content"
    mount.wait()
    assert (mount.tier / "f").read_bytes() == b"Content"
    status = mount.status()
    assert (status["stuck"], status["interrupted"]) == ([], [])


def test_what_the_tier_just_can_hold_is_taken(mount: Mount, disk: Path) -> None:
    limit = largest(disk)
    if limit > ABSURD:
        pytest.skip("the tier's file system has no limit")
    for top in (disk, mount.point):
        fd = os.open(top / "f", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, limit)
        assert os.fstat(fd).st_size == limit
        assert os.pwrite(fd, b"x", limit - 1) == 1
        assert os.pread(fd, 10, limit - 1) == b"x"
        assert outcome(os.pwrite, fd, b"yz", limit - 1) in (1, "EFBIG")
        direct = os.open(top / "f", os.O_WRONLY)
        assert os.pwrite(direct, b"yz", limit - 1) == 1  # what fits
        assert os.pread(fd, 10, limit - 1) == b"y"
        os.ftruncate(fd, 3)  # not to be sent
        os.close(direct)
        os.close(fd)
    mount.wait()
    assert (mount.tier / "f").read_bytes() == bytes(3)


def test_the_limit_is_known_once_a_tier_that_was_down_answers(new_mount: NewMount, disk: Path) -> None:
    if largest(disk) > ABSURD:
        pytest.skip("the tier's file system has no limit")
    mount = new_mount()
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    mount.start("--allow-tier-down")
    aside.rename(mount.tier)
    wait_for(lambda: mount.status()["tier"]["state"] == "up", "the tier")
    (mount.point / "f").touch()
    wait_for(lambda: mount.state("f") == "durable", "the first file")
    refused(os.truncate, mount.point / "f", ABSURD)
