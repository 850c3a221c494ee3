"""fsync by policy, `ckptfs wait`, and what is durable when they return."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from tests.mounted.harness import Mount, wait_for
from tests.mounted.oracle import outcome
from tests.mounted.processes import kill, saver

NewMount = Callable[..., Mount]


def test_fsync_cache_does_not_wait_and_does_not_seal(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    with open(mount.point / "f", "wb", buffering=0) as f:
        f.write(b"data")
        started = time.monotonic()
        os.fsync(f.fileno())
        os.fdatasync(f.fileno())
        assert time.monotonic() - started < 2
    aside.rename(mount.tier)
    mount.wait()


def test_fsync_tier_returns_when_it_is_on_the_tier(new_mount: NewMount) -> None:
    mount = new_mount()
    done = mount.start("--fsync", "tier", config="settle_time = 30\n")
    assert "fsync returns when durable (tier)" in done.stdout
    assert mount.status()["fsync"] == "tier"
    (mount.point / "before").write_bytes(b"before")
    with open(mount.point / "f", "wb", buffering=0) as f:
        f.write(b"one")
        os.fsync(f.fileno())
        assert (mount.tier / "f").read_bytes() == b"one"
        assert (mount.tier / "before").read_bytes() == b"before"
        assert mount.state("f") == "durable"
        f.write(b" two")
        assert mount.state("f") == "dirty"
        os.fsync(f.fileno())
        assert (mount.tier / "f").read_bytes() == b"one two"
        f.seek(0)
        f.write(b"ONE")
        os.fsync(f.fileno())
        assert (mount.tier / "f").read_bytes() == b"ONE two"
    fd = os.open(mount.point / "f", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    # DCP: write a hidden name, fsync, rename, fsync the directory.
    (mount.point / "d").mkdir()
    with open(mount.point / "d" / ".metadata.tmp", "wb") as f:
        f.write(b"meta")
        f.flush()
        os.fsync(f.fileno())
    os.rename(mount.point / "d" / ".metadata.tmp", mount.point / "d" / ".metadata")
    (mount.point / "d" / "g").write_bytes(b"g")
    fd = os.open(mount.point / "d", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert mount.tier_names() >= {"d/.metadata", "d/g"}
    assert "d/.metadata.tmp" not in mount.tier_names()


def test_two_fsyncs_of_one_file_at_once_are_both_true(new_mount: NewMount) -> None:
    """A version replaced unsent (R4b) is durable only when its successor is."""
    mount = new_mount()
    mount.start("--fsync", "tier")
    bad: list[str] = []

    def save(k: int) -> None:
        for i in range(15):
            fd = os.open(mount.point / "f", os.O_WRONLY | os.O_CREAT)
            os.pwrite(fd, b"%02d" % i, 2 * k)
            os.fsync(fd)
            found = (mount.tier / "f").read_bytes() if (mount.tier / "f").exists() else b""
            if found[2 * k : 2 * k + 2] != b"%02d" % i:
                bad.append(f"{k}: {i} not in {found!r}")
            os.close(fd)

    threads = [threading.Thread(target=save, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_fsync_rules_by_glob(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(
        "--fsync", "tier",
        config='settle_time = 60\n[fsync_rules]\n"*.distcp" = "cache"\n"keep/*" = "cache"\n"*" = "tier"\n',
    )  # fmt: skip
    (mount.point / "keep").mkdir()
    for name, durable in (("a.distcp", False), ("keep/x", False), (".metadata", True)):
        with open(mount.point / name, "wb", buffering=0) as f:
            f.write(b"data")
            assert not (mount.tier / "a.distcp").exists()
            os.fsync(f.fileno())
            assert (mount.tier / name).exists() == durable, name
    # The marker vouches for what was closed before it.
    assert (mount.tier / "a.distcp").read_bytes() == b"data"


def test_fsync_of_an_interrupted_file_is_an_error(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start("--fsync", "tier")
    kill(saver(mount.point / "f"))
    wait_for(lambda: mount.status()["interrupted"], "the interruption")
    fd = os.open(mount.point / "f", os.O_RDWR)
    assert outcome(os.fsync, fd) == "EIO"
    os.ftruncate(fd, 0)
    os.write(fd, b"new")
    assert outcome(os.fsync, fd) is None
    os.close(fd)
    assert (mount.tier / "f").read_bytes() == b"new"


def test_wait_names_what_remains(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config="settle_time = 0\n")
    (mount.point / "d").mkdir()
    (mount.point / "done").write_bytes(b"done")
    assert mount.cli("wait", mount.point / "done", mount.point / "d").returncode == 0
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    (mount.point / "d" / "f").write_bytes(b"f")
    for path in (mount.point / "d" / "f", mount.point / "d"):
        done = mount.cli("wait", path, "--timeout", "0.2", check=False)
        assert done.returncode == 3
        assert "d/f" in done.stderr
    assert mount.cli("wait", mount.point / "done", "--timeout", "5").returncode == 0
    assert mount.cli("wait", mount.point / "none", check=False).returncode == 2
    status = mount.status()
    assert status["pending"]["files"] == 1
    assert status["pending"]["bytes"] == 1
    assert status["pending"]["oldest_age_s"] > 0
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
    human = mount.cli("status", mount.point, check=False)
    assert human.returncode == 8
    assert "down" in human.stdout
    aside.rename(mount.tier)
    assert mount.cli("wait", mount.point / "d" / "f", "--timeout", "20").returncode == 0
    assert (mount.tier / "d" / "f").read_bytes() == b"f"
    last = mount.status()["last_durable"]
    assert last["path"] == "d/f"


def test_commands_take_names_of_any_bytes(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config="settle_time = 3600\n")
    name = os.fsdecode(b"caf\xe9 [bold]\n\x1b[31m")
    (mount.point / name).write_bytes(b"x")
    kill(saver(mount.point / (name + "2")))
    wait_for(lambda: mount.status()["interrupted"], "the interruption")
    for args in (["status", mount.point], ["status", mount.point, "--json"], ["status"]):
        done = subprocess.run(
            [sys.executable, "-m", "ckptfs", *map(str, args)], env=mount.env, capture_output=True, check=False
        )
        assert done.returncode == 5, done.stderr  # a file is interrupted
        assert b"Traceback" not in done.stderr
        assert b"\x1b[31m" not in done.stdout
    assert mount.cli("wait", mount.point / name).returncode == 0
    assert mount.cli("publish", mount.point / (name + "2")).returncode == 0
    mount.wait()
    assert sorted(os.listdir(os.fsencode(mount.tier)))[1:] == [os.fsencode(name), os.fsencode(name + "2")]


def test_a_process_waiting_in_fsync_for_a_tier_that_is_down_can_be_killed(
    new_mount: Callable[..., Mount],
) -> None:
    mount = new_mount()
    mount.start("--fsync", "tier")
    away = mount.tier.with_name("away")
    mount.tier.rename(away)
    try:
        code = (
            "import os, sys; f = open(sys.argv[1], 'wb'); f.write(b'x'); f.flush();"
            " print(1, flush=True); os.fsync(f)"
        )
        waiter = subprocess.Popen(
            [sys.executable, "-c", code, str(mount.point / "a")], stdout=subprocess.PIPE, text=True
        )
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "1\n"
        wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be seen down")
        waiter.kill()
        started = time.monotonic()
        waiter.wait(timeout=10)
        assert time.monotonic() - started < 3
    finally:
        away.rename(mount.tier)
