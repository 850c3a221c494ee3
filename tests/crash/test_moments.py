"""Deaths and endings at chosen moments, one at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, wait_gone
from tests.crash.conftest import QUICK
from tests.crash.content import judge_file, make
from tests.mounted.harness import Mount, alive, wait_for

MIB = 1 << 20


def stop(pids: list[int]) -> None:
    """SIGSTOP, and wait until they are stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        wait_for(
            lambda pid=pid: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", "stop"
        )


def go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def left_open(path: Path, data: bytes) -> Iterator[None]:
    """A file that is open for writing meanwhile; its mount may die."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(fd, data)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def hidden(m: Mount) -> dict[str, int]:
    """Hidden files on the tier with their inode numbers."""
    return {p.name: p.stat().st_ino for p in (m.tier / ".ckptfs" / "uploads").rglob("*") if p.is_file()}


@pytest.fixture
def quick(new_mount: Callable[..., Mount]) -> Mount:
    """A started mount that sends at once."""
    m = new_mount()
    m.start(config="settle_time = 0.1\n")
    return m


def test_a_large_file_is_sent_once_although_everything_dies_in_the_middle(quick: Mount) -> None:
    m = quick
    data = make("big", 1, 200 * MIB)
    (m.point / "big").write_bytes(data)
    (m.point / "marker").write_bytes(b"marker")

    def sent() -> int:
        return int(next((f["sent_bytes"] for f in m.status()["files"] if f["path"] == "big"), 0))

    before = wait_for(sent, "the first chunks")
    m.kill(workers=True)
    inode = max(
        (p.stat() for p in (m.tier / ".ckptfs" / "uploads").rglob("*")), key=lambda s: s.st_size
    ).st_ino
    assert not (m.tier / "marker").exists()
    m.start()
    assert sent() >= before or judge_file(m.tier / "big") == 1
    m.wait()
    assert (m.tier / "big").stat().st_ino == inode
    assert (m.tier / "big").read_bytes() == data
    assert m.status()["reuploaded_bytes"] == 0
    assert hidden(m) == {}


def test_published_but_not_journaled(quick: Mount) -> None:
    """The daemon stands still while a worker publishes, and never hears of it."""
    m = quick
    (m.point / "run").mkdir()
    m.wait()
    for i in range(5):
        (m.point / "run" / f"shard{i}").write_bytes(make("s", i, 20_000))
        os.rename(m.point / "run" / f"shard{i}", m.point / "run" / f"renamed{i}")
        wait_for(lambda: hidden(m) or list((m.tier / "run").iterdir()), "an upload")
        stop([m.pid])
        wait_gone(lambda: set(hidden(m)), 0.2)
        m.kill(workers=bool(i % 2))
        m.start()
        assert judge_file(m.point / "run" / f"renamed{i}") == i
        m.wait()
        assert judge_file(m.tier / "run" / f"renamed{i}") == i
        assert m.status()["conflicts"] == 0
        (m.point / "run" / f"renamed{i}").unlink()
        m.wait()
    assert hidden(m) == {}
    assert not list((m.tier / ".ckptfs" / "conflicts").rglob("*"))


def test_a_renamed_directory_is_complete_in_the_mount_whoever_dies(quick: Mount) -> None:
    """A MOVE that the tier has made and the journal does not know of hides nothing that is in it."""
    m = quick
    for i in range(4):
        a, b = m.point / f"tmp{i}", m.point / f"final{i}"
        a.mkdir()
        for k in range(5):
            (a / f"f{k}").write_bytes(make("f", k, 5000))
        m.wait()
        a.rename(b)
        stop([m.pid])
        wait_for(
            lambda i=i: (m.tier / f"final{i}").exists() or (m.tier / f"tmp{i}").exists(), "the directory"
        )
        if i % 2:
            wait_gone(lambda i=i: {str(p) for p in m.tier.glob(f"tmp{i}")}, 0.1)
        m.kill()
        m.start()
        assert sorted(os.listdir(b)) == [f"f{k}" for k in range(5)]
        assert judge_file(b / "f3") == 3
        m.wait()
        assert sorted(os.listdir(m.tier / f"final{i}")) == [f"f{k}" for k in range(5)]


def test_workers_that_hang_hold_up_nobody(quick: Mount) -> None:
    m = quick
    (m.point / "run").mkdir()
    (m.point / "run" / "durable").write_bytes(b"old")
    m.wait()
    assert os.listdir(m.point / "run") == ["durable"]
    workers = m.workers()
    stop(workers)
    (m.point / "run" / "first").write_bytes(make("first", 1, 20 * MIB))
    slowest = 0.0
    i = -1
    until = time.monotonic() + 4.0  # longer than attributes are believed, so that the kernel asks again
    while time.monotonic() < until:
        i += 1
        started = time.monotonic()
        (m.point / "run" / "step").mkdir(exist_ok=True)
        (m.point / "run" / "step" / f"f{i}").write_bytes(make("f", i, 50_000))
        assert judge_file(m.point / "run" / "step" / f"f{i}") == i
        assert (m.point / "run" / "durable").read_bytes() == b"old"
        assert len(os.listdir(m.point / "run")) == 3
        assert not (m.point / "run" / f"nothing{i}").exists()
        assert m.status()["pending"]["files"] >= i + 2
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 5.0, slowest
    assert not (m.tier / "run" / "first").exists()
    go_on(workers)
    m.wait()
    wait_for(lambda: m.status()["tier"]["state"] == "up", "status to say that the tier is up")
    assert judge_file(m.tier / "run" / "step" / f"f{i}") == i
    m.umount()


def test_workers_killed_in_the_middle_of_a_copy(quick: Mount) -> None:
    """Writing into a file whose version is on its way needs a copy first, which a worker makes."""
    m = quick
    workers = m.workers()
    stop(workers)
    (m.point / "a").write_bytes(make("a", 1, 8 * MIB))
    new = make("a", 2, 8 * MIB)

    def rewrite() -> None:
        with open(m.point / "a", "r+b", buffering=0) as f:
            for at in range(0, len(new), MIB):
                assert f.write(new[at : at + MIB]) == MIB

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(rewrite)
        time.sleep(0.3)  # it may be anywhere; usually it waits for the copy
        assert not writing.done()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        writing.result(timeout=30)
    assert m.status()["interrupted"] == []
    m.wait()
    assert judge_file(m.tier / "a") == 2


def test_staging_on_disk_keeps_the_order_of_closes(new_mount: Callable[..., Mount], disk: Path) -> None:
    """What makes a version safe takes time there; what comes after it waits for its turn all the same."""
    m = new_mount()
    (disk / "cache").mkdir()
    m.start("--cache-dir", str(disk / "cache"), config="settle_time = 0.1\n")
    for i in range(3):
        for k in range(3):
            (m.point / f"shard{i}.{k}").write_bytes(make("s", k, 24 * MIB))
        os.symlink("shard", m.point / f"marker{i}")
        wait_for(lambda i=i: os.path.lexists(m.tier / f"marker{i}"), "the marker")
        assert [judge_file(m.tier / f"shard{i}.{k}") for k in range(3)] == [0, 1, 2]
    m.umount()


def test_hung_workers_and_a_killed_daemon(quick: Mount) -> None:
    """Whoever hangs in the tier dies with the daemon, and does not keep the next one from its lock."""
    m = quick
    (m.point / "a").write_bytes(make("a", 1, 20 * MIB))
    workers = m.workers()
    stop(workers)
    m.kill()
    started = time.monotonic()
    m.start()
    assert time.monotonic() - started < 10
    assert not any(alive(w) for w in workers)
    m.wait()
    assert judge_file(m.tier / "a") == 1


def held(lock: Path, seconds: int) -> subprocess.Popen[bytes]:
    """Somebody who holds a lock."""
    holder = subprocess.Popen(["flock", str(lock), "sleep", str(seconds)], start_new_session=True)
    taken = ["flock", "-n", str(lock), "true"]
    wait_for(lambda: subprocess.run(taken, check=False).returncode, "the lock to be held")
    return holder


def let_go(holder: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()


def test_somebody_who_keeps_the_lock_a_while_is_waited_for(quick: Mount) -> None:
    m = quick
    (m.point / "a").write_bytes(b"a")
    m.kill(workers=True)
    holder = held(next(m.run_dir.glob("*/lock")), 2)
    try:
        m.start()
        assert (m.point / "a").read_bytes() == b"a"
    finally:
        let_go(holder)
    m.wait()


@pytest.mark.long
def test_somebody_who_keeps_the_lock_is_told_about(quick: Mount) -> None:
    m = quick
    (m.point / "a").write_bytes(b"a")
    m.kill(workers=True)
    holder = held(next(m.run_dir.glob("*/lock")), 60)
    try:
        done = m.start(check=False)
        assert done.returncode == 10, done
        assert "still works for" in done.stderr
    finally:
        let_go(holder)
    m.start()
    assert (m.point / "a").read_bytes() == b"a"
    m.wait()


def start_and_kill_while_it_recovers(m: Mount, delay: float) -> bool:
    """True when the mount command had not come to its end."""
    before = set(daemons(m))
    command = [sys.executable, "-m", "ckptfs", "mount", m.point, "--tier", f"file://{m.tier}", *m.options]
    process = subprocess.Popen(
        [str(x) for x in command], env=m.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: set(daemons(m)) - before or process.poll() is not None, "the daemon")
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.001)
    early = process.poll() is None
    for pid in set(daemons(m)) - before:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: not alive(pid), "its end")
    process.wait(timeout=30)
    return early


def daemons(m: Mount) -> list[int]:
    found = []
    for task in Path("/proc").iterdir():
        if task.name.isdigit():
            try:
                command = (task / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"ckptfs.daemon" in command and str(m.point).encode() in command and alive(int(task.name)):
                found.append(int(task.name))
    return found


def test_killed_while_recovering_again_and_again(quick: Mount) -> None:
    m = quick
    (m.point / "run").mkdir()
    for i in range(50):
        (m.point / "run" / f"f{i}").write_bytes(make("f", i, 100_000))
    os.rename(m.point / "run", m.point / "final")
    with left_open(m.point / "open", b"unfinished"):
        m.kill(workers=True)
    early = sum(start_and_kill_while_it_recovers(m, i * 0.2) for i in range(5))
    assert early >= 2
    m.start()
    assert [x["path"] for x in m.status()["interrupted"]] == ["open"]
    assert (m.point / "open").read_bytes() == b"unfinished"
    assert all(judge_file(m.point / "final" / f"f{i}") == i for i in range(50))
    (m.point / "open").unlink()
    m.wait()
    assert all(judge_file(m.tier / "final" / f"f{i}") == i for i in range(50))
    assert m.tier_names() == {"final", *(f"final/f{i}" for i in range(50))}
    assert hidden(m) == {}
    m.umount()


def test_sigterm_under_load_keeps_the_rest_for_the_next_mount(
    campaign: Callable[..., Campaign], new_mount: Callable[..., Mount]
) -> None:
    m = new_mount()
    m.start(config=QUICK + "drain_timeout = 0.5\n")
    c = campaign(11, m, runs=1)
    (m.point / "first").write_bytes(make("first", 1, 30 * MIB))
    with left_open(m.point / "open", b"x"):
        workers = m.workers()
        stop(workers)
        for i in range(10):
            (m.point / f"f{i}").write_bytes(make("f", i, MIB))
        os.kill(m.pid, signal.SIGTERM)
        wait_for(lambda: not alive(m.pid), "the daemon's end", 30)
    assert not (m.tier / "f9").exists()
    status = m.cli("status", m.point, check=False)
    assert status.returncode == 6
    assert "staged" in status.stdout
    m.start()
    assert {x["path"] for x in m.status()["interrupted"]} == {"open"}
    (m.point / "open").unlink()
    c.start()
    wait_for(lambda: c.steps() > 20, "some work")
    c.finish_with({"first", *(f"f{i}" for i in range(10))})
    assert judge_file(m.tier / "f9") == 9


def test_plain_umount_drains_in_the_background_and_a_kill_there_loses_nothing(quick: Mount) -> None:
    m = quick
    workers = m.workers()
    stop(workers)
    for i in range(10):
        (m.point / f"f{i}").write_bytes(make("f", i, MIB))
    subprocess.run(["umount", m.point], check=True)
    wait_for(lambda: m.status()["draining"], "the drain to begin")
    refused = m.start(check=False)
    assert refused.returncode == 10
    assert "draining" in refused.stderr
    m.kill(workers=True)
    m.start()
    assert sorted(os.listdir(m.point)) == [f"f{i}" for i in range(10)]
    subprocess.run(["umount", m.point], check=True)  # now it may end
    wait_for(lambda: not alive(m.pid), "the drain")
    assert all(judge_file(m.tier / f"f{i}") == i for i in range(10))
    assert list(m.run_dir.iterdir()) == []
    assert hidden(m) == {}


def test_sigterm_while_draining_after_umount_ends_in_time_and_touches_no_other_mount(
    new_mount: Callable[..., Mount],
) -> None:
    m = new_mount()
    m.start(config="settle_time = 0.1\ndrain_timeout = 1.0\n")
    stop(m.workers())
    (m.point / "a").write_bytes(b"a")
    subprocess.run(["umount", m.point], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "somebody", m.point], check=True)
    (m.point / "theirs").touch()
    os.kill(m.pid, signal.SIGTERM)
    wait_for(lambda: not alive(m.pid), "the daemon's end")
    assert "internal error" not in m.log()
    assert "stay staged" in m.log()
    assert os.listdir(m.point) == ["theirs"]
    subprocess.run(["umount", m.point], check=True)
    m.start()
    assert (m.point / "a").read_bytes() == b"a"
    m.umount()


def test_two_mounts_in_a_row_find_nothing_new(quick: Mount) -> None:
    m = quick
    (m.point / "d").mkdir()
    (m.point / "d" / "a").write_bytes(b"a")
    os.symlink("a", m.point / "d" / "l")
    m.kill()
    first = m.start()
    assert "recovered 1 closed file " in first.stdout
    m.wait()
    for _ in range(2):
        m.kill(workers=True)
        again = m.start()
        assert "recovered" not in again.stdout
        assert sorted(os.listdir(m.point / "d")) == ["a", "l"]
    busy = m.start(check=False)
    assert busy.returncode == 10
    m.umount()
    assert list(m.run_dir.iterdir()) == []
