"""The budget (B1-B7): files larger together than the cache, with and without room to spill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mounted.harness import Mount, alive, wait_for
from tests.mounted.oracle import outcome

MIB = 1 << 20
NewMount = Callable[..., Mount]

WRITER = """
import os, sys
path, flags, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
fd = os.open(path, flags | os.O_CREAT, 0o644)
for at in range(0, size, 1 << 20):
    block = (at ^ seed).to_bytes(8, "little") * (1 << 17)
    done = 0
    while done < len(block):
        done += os.pwrite(fd, block[done:], at + done)
print("written", flush=True)
sys.stdin.read()
os.close(fd)
"""


def content(size: int, seed: int) -> bytes:
    return b"".join((at ^ seed).to_bytes(8, "little") * (1 << 17) for at in range(0, size, MIB))


def writer(path: Path, size: int, seed: int = 0, flags: int = os.O_WRONLY) -> subprocess.Popen[str]:
    """A process that writes `size` bytes and keeps the file open until its stdin ends."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(flags), str(size), str(seed)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    """Let it close and end; its complaint, empty when it had none."""
    _, err = process.communicate("", timeout=timeout)
    return err


def written(process: subprocess.Popen[str]) -> None:
    """Until all bytes are written (the file is still open)."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "written\n", process.stderr.read() if process.stderr else ""


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR], ids=["direct", "cached"])
def test_open_writers_larger_together_than_the_cache_finish_through_the_spill(
    new_mount: NewMount, flags: int
) -> None:
    mount = new_mount()
    mount.start("--cache-size", "48MiB", "--spill-size", "300MiB")
    size = 14 * MIB
    writers = [writer(mount.point / f"shard{i}", size, i, flags) for i in range(8)]
    for w in writers:
        written(w)
    status = mount.status()["cache"]
    assert status["spilled_bytes"] > 0
    assert status["used_bytes"] <= 48 * MIB + 64 * MIB
    for i in range(8):  # everything reads back, wherever it is
        assert (mount.point / f"shard{i}").read_bytes() == content(size, i)
    with open(mount.point / "shard0", "r+b", buffering=0) as f:  # and can be rewritten there
        f.seek(3 * MIB - 2)
        f.write(b"across extents")
    assert [finish(w) for w in writers] == [""] * 8
    mount.wait()
    for i in range(8):
        wanted = bytearray(content(size, i))
        if i == 0:
            wanted[3 * MIB - 2 : 3 * MIB + 12] = b"across extents"
        assert (mount.tier / f"shard{i}").read_bytes() == wanted
    assert mount.status()["cache"]["spilled_bytes"] == 0
    mount.umount()
    assert list(mount.spill.iterdir()) == []


def test_what_was_spilled_survives_a_kill_and_another_spill_directory(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start("--cache-size", "32MiB", "--spill-size", "200MiB")
    (mount.spill / "a user's file.spill").write_bytes(b"not ours")
    w = writer(mount.point / "f", 44 * MIB, 5)
    written(w)
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    assert finish(w) == ""
    mount.kill(workers=True)
    aside.rename(mount.tier)
    elsewhere = mount.base / "spill2"
    elsewhere.mkdir()
    mount.options = ["--cache-size", "32MiB", "--spill-dir", str(elsewhere)]
    mount.start()
    assert (mount.point / "f").read_bytes() == content(44 * MIB, 5)
    mount.wait()
    assert (mount.tier / "f").read_bytes() == content(44 * MIB, 5)
    mount.umount()
    assert os.listdir(mount.spill) == ["a user's file.spill"]
    assert os.listdir(elsewhere) == []


def test_without_room_to_spill_write_gives_enospc_and_the_rest_goes_on(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start("--cache-size", "32MiB", "--spill-size", "0")
    (mount.point / "before").write_bytes(b"before")
    mount.wait()
    fd = os.open(mount.point / "big", os.O_WRONLY | os.O_CREAT)
    block = b"x" * MIB
    started = time.monotonic()
    total = 0
    with pytest.raises(OSError, match="No space left") as caught:  # noqa: PT012
        while total < 200 * MIB:
            total += os.write(fd, block)
    assert caught.value.errno == errno.ENOSPC
    assert time.monotonic() - started < 20
    assert total >= 24 * MIB
    assert "no space for big: the cache" in mount.log()
    # Nothing else is broken: names, reads, small files where there is room, status.
    assert (mount.point / "before").read_bytes() == b"before"
    assert os.fstat(fd).st_size == total
    os.rename(mount.point / "before", mount.point / "renamed")
    (mount.point / "dir").mkdir()
    assert mount.status()["cache"]["used_bytes"] >= 24 * MIB
    os.close(fd)
    os.unlink(mount.point / "big")
    (mount.point / "again").write_bytes(b"y" * (20 * MIB))
    mount.wait()
    assert (mount.tier / "again").read_bytes() == b"y" * (20 * MIB)
    assert mount.tier_names() == {"renamed", "dir", "again"}


def test_writers_wait_for_the_tier_and_go_on_when_it_is_back(new_mount: NewMount) -> None:
    """Sealed versions fill the cache while the tier is down: no error, no ENOSPC."""
    mount = new_mount()
    mount.start("--cache-size", "32MiB", "--spill-size", "0", config="settle_time = 0\n")
    (mount.point / "first").write_bytes(b"f")
    mount.wait()
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    errors: list[Any] = []

    def write() -> None:
        for i in range(5):
            errors.append(outcome((mount.point / f"f{i}").write_bytes, content(12 * MIB, i)))

    thread = threading.Thread(target=write)
    thread.start()
    wait_for(lambda: mount.status()["writers_waiting"], "a waiting writer")
    assert (mount.point / "first").exists()
    assert mount.state("f0") in ("dirty", "flushing")
    aside.rename(mount.tier)
    thread.join()
    assert errors == [12 * MIB] * 5
    mount.wait()
    for i in range(5):
        assert (mount.tier / f"f{i}").read_bytes() == content(12 * MIB, i)
    assert mount.status()["held_back_s"] > 0


@pytest.fixture
def blocked(new_mount: NewMount) -> Any:
    """A mount whose cache is full because the tier is down, and a process blocked in write(2)."""
    mount = new_mount()
    mount.start("--cache-size", "32MiB", "--spill-size", "0", config="settle_time = 0\n")
    (mount.point / "old").write_bytes(b"old" * 1000)
    (mount.point / "d").mkdir()
    mount.wait()
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    (mount.point / "full").write_bytes(b"f" * (20 * MIB))
    w = writer(mount.point / "d" / "victim", 100 * MIB)
    wait_for(lambda: mount.status()["writers_waiting"], "a waiting writer")
    yield mount, w
    if not mount.tier.exists():
        aside.rename(mount.tier)
    if w.poll() is None:
        w.kill()
    w.communicate()


def within(seconds: float, call: Callable[[], Any]) -> Any:
    started = time.monotonic()
    answer = call()
    assert time.monotonic() - started < seconds
    return answer


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_blocked_writer_can_be_killed_within_a_second(blocked: Any, number: int) -> None:
    mount, w = blocked
    w.send_signal(number)
    within(1.5, lambda: wait_for(lambda: not alive(w.pid) or w.poll() is not None, "its end", 5))
    if number != signal.SIGINT:  # Python raises KeyboardInterrupt: an ordinary exit
        wait_for(lambda: mount.status()["interrupted"], "the interruption")
        assert mount.status()["interrupted"][0]["path"] == "d/victim"


def test_nothing_else_waits_behind_a_blocked_writer(blocked: Any) -> None:
    mount, w = blocked
    p = mount.point
    within(2, lambda: os.listdir(p))
    within(2, lambda: os.listdir(p / "d"))
    within(2, lambda: os.stat(p / "d" / "victim"))
    assert within(2, lambda: (p / "d" / "victim").open("rb").read(100))
    assert within(2, lambda: (p / "full").read_bytes()) == b"f" * (20 * MIB)
    within(2, lambda: os.rename(p / "old", p / "d" / "moved"))
    within(2, lambda: os.unlink(p / "d" / "moved"))
    within(2, lambda: (p / "new").mkdir())
    within(2, lambda: (p / "new" / "small").touch())
    within(2, lambda: os.statvfs(p))
    within(2, lambda: os.getxattr(p / "d" / "victim", "user.ckptfs.state"))
    status = within(2, lambda: mount.cli("status", p, "--json", check=False))
    assert status.returncode == 8  # the tier is down
    assert w.poll() is None
    # The file itself: its inode is locked while write(2) waits, for a few seconds at most (B7).
    within(8, lambda: os.rename(p / "d" / "victim", p / "d" / "renamed"))
    within(8, lambda: os.unlink(p / "d" / "renamed"))
    within(8, lambda: os.listdir(p / "d"))
    w.kill()
    within(1.5, lambda: w.wait(5))


def test_many_blocked_writers_leave_the_mount_usable(blocked: Any) -> None:
    """B4: handler slots never run out."""
    mount, _ = blocked
    many = []
    script = "import os,sys\nfds=[os.open(sys.argv[1]+str(i),os.O_WRONLY|os.O_CREAT) for i in range(150)]\n"
    script += "import threading\nts=[threading.Thread(target=os.write,args=(f,b'x'*1048576)) for f in fds]\n"
    script += "[t.start() for t in ts]\nprint('started',flush=True)\n[t.join() for t in ts]\n"
    many = subprocess.Popen(
        [sys.executable, "-c", script, str(mount.point / "many")], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: mount.status()["writers_waiting"] > 100, "100 waiting writers")
        within(2, lambda: os.listdir(mount.point))
        within(2, lambda: (mount.point / "full").read_bytes())
        within(2, lambda: (mount.point / "aside").mkdir())
    finally:
        many.kill()
        within(3, lambda: many.wait(10))


def test_eight_parallel_writers_of_many_files(shared: Mount) -> None:
    script = """
import os, sys
base, seed = sys.argv[1], int(sys.argv[2])
for i in range(12):
    with open(f"{base}/{seed}-{i}.tmp", "wb") as f:
        for k in range(1 + i % 4):
            f.write((seed * 1000 + i * 10 + k).to_bytes(8, "little") * 30_000)
    os.rename(f"{base}/{seed}-{i}.tmp", f"{base}/{seed}-{i}")
    if i >= 8:
        os.unlink(f"{base}/{seed}-{i - 8}")
"""
    d = shared.point / "eight"
    d.mkdir()
    writers = [subprocess.Popen([sys.executable, "-c", script, str(d), str(s)]) for s in range(8)]
    assert [w.wait(60) for w in writers] == [0] * 8
    shared.wait()
    names = {f"{s}-{i}" for s in range(8) for i in range(4, 12)}
    for top in (d, shared.tier / "eight"):
        assert set(os.listdir(top)) == names
        for s in range(8):
            for i in range(4, 12):
                wanted = b"".join(
                    (s * 1000 + i * 10 + k).to_bytes(8, "little") * 30_000 for k in range(1 + i % 4)
                )
                assert (top / f"{s}-{i}").read_bytes() == wanted


def test_a_cached_writer_beyond_the_cache_gets_enospc_and_never_publishes_half(new_mount: NewMount) -> None:
    """O_RDWR may be the write-back of a mapping: it waits long, then fails, and the file is interrupted."""
    mount = new_mount()
    mount.start("--cache-size", "16MiB", "--spill-size", "0")
    (mount.point / "good").write_bytes(b"good")
    mount.wait()
    fd = os.open(mount.point / "good", os.O_RDWR | os.O_TRUNC)
    with pytest.raises(OSError, match="No space left") as caught:  # noqa: PT012
        for _ in range(40):
            os.write(fd, b"z" * MIB)
    assert caught.value.errno == errno.ENOSPC
    os.close(fd)
    assert mount.status()["interrupted"][0]["path"] == "good"
    assert (mount.tier / "good").read_bytes() == b"good"
    assert "no space for good" in mount.log()


def test_when_the_machine_runs_short_clean_cache_goes_first_and_then_the_budget(disk: Path) -> None:
    """B6, with a machine that is made up."""
    from types import SimpleNamespace

    import trio

    from ckptfs.engine.admission import Admission

    evicted: list[int] = []
    staging = SimpleNamespace(used=600, evict=evicted.append)
    config = SimpleNamespace(cache_size=64 * MIB, memory_floor=0.1)
    room = SimpleNamespace(beat=lambda: None)
    hub: Any = SimpleNamespace(config=config, staging=staging, room=room, budget=64 * MIB)
    staging.used = 60 * MIB
    admission = Admission(hub)
    free = 500 * MIB

    async def look() -> None:
        with trio.move_on_after(0.05):
            await admission.run_pressure(lambda: free, 1000 * MIB)

    trio.run(look)
    assert (evicted, admission.limit) == ([], 64 * MIB)
    free = 70 * MIB  # 30 less than the floor
    trio.run(look)
    assert (evicted, admission.limit) == ([30 * MIB], 30 * MIB)
    free = 101 * MIB
    trio.run(look)
    assert admission.limit == 61 * MIB
