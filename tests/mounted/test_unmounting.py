"""Every way a mount ends: drained, lazily, by signal, by kill, and what the next mount finds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, alive, wait_for
from tests.mounted.oracle import outcome
from tests.mounted.processes import kill, let_finish, saver

NewMount = Callable[..., Mount]
MIB = 1 << 20


def slow_to_settle(new_mount: NewMount) -> Mount:
    mount = new_mount()
    mount.start(config="settle_time = 3600\n")
    return mount


def gone(mount: Mount) -> None:
    pid = mount.pid
    wait_for(lambda: not alive(pid), "the daemon's end")


def test_umount_drains_in_the_background(new_mount: NewMount) -> None:
    for command in (["umount"], ["fusermount3", "-u"]):
        mount = slow_to_settle(new_mount)
        mount.point.joinpath("f").write_bytes(b"f" * MIB)
        subprocess.run([*command, str(mount.point)], check=True)
        gone(mount)
        assert (mount.tier / "f").read_bytes() == b"f" * MIB
        assert list(mount.run_dir.iterdir()) == []
        mount.cleanup()
        (mount.tier / "f").unlink()


def test_status_and_wait_during_the_drain_with_the_tier_down(new_mount: NewMount) -> None:
    mount = slow_to_settle(new_mount)
    mount.point.joinpath("f").write_bytes(b"f" * MIB)
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    subprocess.run(["umount", str(mount.point)], check=True)
    wait_for(lambda: mount.status()["draining"], "the drain")
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
    assert mount.status()["pending"]["files"] == 1
    assert mount.cli("status", check=False).returncode == 8
    done = mount.cli("wait", "--mount", mount.point, "--timeout", "0.2", check=False)
    assert done.returncode == 3
    refused = mount.start(check=False)  # the old daemon still works for this mount point
    assert refused.returncode == 10
    aside.rename(mount.tier)
    gone(mount)
    assert (mount.tier / "f").read_bytes() == b"f" * MIB


def test_ckptfs_umount_waits_and_says_so(new_mount: NewMount) -> None:
    mount = slow_to_settle(new_mount)
    mount.point.joinpath("f").write_bytes(b"f")
    done = mount.umount()
    assert done.returncode == 0
    assert "durable" in done.stdout
    assert (mount.tier / "f").read_bytes() == b"f"
    assert mount.cli("umount", mount.point, check=False).returncode == 6


def test_umount_with_a_time_limit_and_without_draining(new_mount: NewMount) -> None:
    mount = slow_to_settle(new_mount)
    mount.point.joinpath("f").write_bytes(b"f")
    mount.point.joinpath("d").mkdir()
    mount.point.joinpath("d", "g").write_bytes(b"g")
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    done = mount.umount("--timeout", "0.3", check=False)
    assert done.returncode == 3, done.stderr
    aside.rename(mount.tier)
    assert mount.tier_names() == set()
    assert "recovered 2 closed files" in mount.start().stdout
    mount.tier.rename(aside)
    done = mount.umount("--no-drain", check=False)
    assert done.returncode == 3, done.stderr
    aside.rename(mount.tier)
    assert "recovered 2 closed files" in mount.start().stdout
    assert mount.point.joinpath("d", "g").read_bytes() == b"g"
    mount.umount()
    assert mount.tier_names() == {"f", "d", "d/g"}


def test_a_busy_mount_is_not_unmounted(mount: Mount) -> None:
    with open(mount.point / "f", "wb"):
        done = mount.cli("umount", mount.point, check=False)
        assert done.returncode == 10
        assert subprocess.run(["umount", str(mount.point)], check=False, capture_output=True).returncode
    assert (mount.point / "f").exists()
    mount.umount()


def test_lazy_umount_with_open_files(mount: Mount) -> None:
    process = saver(mount.point / "f")
    mount.point.joinpath("closed").write_bytes(b"closed")
    subprocess.run(["umount", "-l", str(mount.point)], check=True)
    assert os.listdir(mount.point) == []
    let_finish(process)
    gone(mount)
    assert (mount.tier / "f").read_bytes() == b"half of the new one, and the rest"
    assert (mount.tier / "closed").read_bytes() == b"closed"


def test_lazy_umount_and_a_killed_writer(mount: Mount) -> None:
    mount.point.joinpath("f").write_bytes(b"good")
    mount.wait()
    process = saver(mount.point / "f")
    subprocess.run(["umount", "-l", str(mount.point)], check=True)
    kill(process)
    gone(mount)
    assert (mount.tier / "f").read_bytes() == b"good"
    assert "1 interrupted" in mount.start().stdout


def test_sigterm_drains_within_its_time(new_mount: NewMount) -> None:
    mount = slow_to_settle(new_mount)
    mount.point.joinpath("f").write_bytes(b"f")
    os.kill(mount.pid, signal.SIGTERM)
    gone(mount)
    assert (mount.tier / "f").read_bytes() == b"f"
    assert list(mount.run_dir.iterdir()) == []
    assert not os.path.ismount(mount.point)


def test_sigterm_gives_up_after_its_time_and_keeps_the_rest(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config='settle_time = 3600\ndrain_timeout = "0.5s"\n')
    mount.point.joinpath("f").write_bytes(b"f")
    process = saver(mount.point / "open")
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    os.kill(mount.pid, signal.SIGTERM)
    gone(mount)
    assert "1 files are not durable" in mount.log()
    kill(process)
    aside.rename(mount.tier)
    done = mount.start()
    assert "recovered 1 closed file " in done.stdout
    assert "1 interrupted" in done.stdout
    mount.wait(mount.point / "f")
    assert (mount.tier / "f").read_bytes() == b"f"


def test_a_second_signal_ends_at_once(new_mount: NewMount) -> None:
    mount = slow_to_settle(new_mount)
    mount.point.joinpath("f").write_bytes(b"f")
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    os.kill(mount.pid, signal.SIGTERM)
    wait_for(lambda: "draining for at most" in mount.log(), "the first signal")
    os.kill(mount.pid, signal.SIGTERM)
    gone(mount)
    aside.rename(mount.tier)
    mount.start()
    mount.wait()
    assert (mount.tier / "f").read_bytes() == b"f"


BUSY = """
import os, sys
what, path = sys.argv[1:]
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.write(fd, b"busy")
print("ready", flush=True)
if what == "fsync":
    os.fsync(fd)
elif what == "fsync of a directory":
    os.close(fd)
    os.fsync(os.open(os.path.dirname(path), os.O_RDONLY))
else:
    for _ in range(64):
        os.write(fd, bytes(1 << 20))
"""


def busy(what: str, path: Path) -> subprocess.Popen[str]:
    """A process that waits for the tier in one call."""
    command = [sys.executable, "-c", BUSY, what, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


OBSTACLES = ["fsync", "fsync of a directory", "write", "ckptfs wait", "workers that hang"]


@pytest.mark.parametrize("staging", ["memory", pytest.param("disk", marks=pytest.mark.long)])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_second_signal_ends_at_once_whatever_waits(
    new_mount: NewMount, obstacle: str, staging: str
) -> None:
    mount = new_mount()
    options = ["--cache-size", "16MiB", "--spill-size", "0"]
    if staging == "disk":
        (mount.base / "cache").mkdir()
        options += ["--cache-dir", str(mount.base / "cache")]
    mount.start(*options, config='settle_time = 3600\nfsync = "tier"\n')
    mount.point.joinpath("f").write_bytes(b"f" * (12 * MIB))
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    waiting, hung = [], []
    if obstacle == "ckptfs wait":
        command = [sys.executable, "-m", "ckptfs", "wait", "--mount", str(mount.point)]
        waiting.append(subprocess.Popen(command, env=mount.env, stderr=subprocess.PIPE, text=True))
    elif obstacle == "workers that hang":
        hung = mount.workers()
        for pid in hung:
            os.kill(pid, signal.SIGSTOP)
        waiting.append(busy("fsync", mount.point / "busy"))
    else:
        waiting.append(busy(obstacle, mount.point / "busy"))
    time.sleep(1)
    os.kill(mount.pid, signal.SIGTERM)
    wait_for(lambda: "draining for at most" in mount.log(), "the first signal")
    time.sleep(0.2)
    begun = time.monotonic()
    os.kill(mount.pid, signal.SIGTERM)
    gone(mount)
    took = time.monotonic() - begun
    assert took < 1.5, mount.log()  # a part of a second, were the machine idle
    assert not any(alive(pid) for pid in hung)
    _, said = waiting[0].communicate(timeout=10)
    if obstacle == "ckptfs wait":
        assert waiting[0].returncode == 3
        assert "its daemon ends, and what is left stays staged for the next mount" in said
    aside.rename(mount.tier)
    mount.start(*options)
    mount.ask("wait", paths=["f"], timeout_s=20)
    assert (mount.tier / "f").read_bytes() == b"f" * (12 * MIB)
    if obstacle == "write":  # half of it was taken
        assert [i["path"] for i in mount.status()["interrupted"]] == ["busy"]
        assert not (mount.tier / "busy").exists()


def test_the_time_to_drain_is_kept_although_a_call_waits_for_the_tier(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config='settle_time = 3600\nfsync = "tier"\ndrain_timeout = "0.5s"\n')
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    process = busy("fsync", mount.point / "busy")
    wait_for(lambda: mount.status()["pending"]["files"] == 1, "the fsync")
    begun = time.monotonic()
    os.kill(mount.pid, signal.SIGTERM)
    gone(mount)
    assert time.monotonic() - begun < 5
    process.communicate(timeout=10)
    assert process.returncode == 1
    aside.rename(mount.tier)
    assert "recovered 1 closed file " in mount.start().stdout
    mount.wait()
    assert (mount.tier / "busy").read_bytes() == b"busy"


def test_the_stale_mount_of_a_dead_daemon_is_cleaned_by_the_next(mount: Mount) -> None:
    mount.point.joinpath("f").write_bytes(b"f")
    held = os.open(mount.point / "f", os.O_RDONLY)
    mount.kill(workers=True)
    # A request that was on its way when the daemon died is told ECONNABORTED, once.
    assert outcome(os.listdir, mount.point) in ("ENOTCONN", "ECONNABORTED")
    done = mount.start()
    assert "unmounted what an ended daemon had left" in done.stdout + done.stderr
    assert mount.point.joinpath("f").read_bytes() == b"f"
    assert outcome(os.close, held) in ("ENOTCONN", "ECONNABORTED")
    assert sum(str(mount.point) in line for line in Path("/proc/self/mounts").read_text().splitlines()) == 1
    mount.wait()


def test_a_trainer_that_makes_directories_all_along_does_not_hinder_the_next_mount(mount: Mount) -> None:
    code = """
import os, sys
top = sys.argv[1]
while True:
    try:
        os.makedirs(top + '/step', exist_ok=True)
        with open(top + '/step/model.pt', 'wb') as f:
            f.write(b'x' * 1000)
    except OSError:
        pass
"""
    trainer = subprocess.Popen([sys.executable, "-c", code, str(mount.point)])
    try:
        for _ in range(3):
            wait_for(lambda: "step" in os.listdir(mount.point), "the trainer's directory")
            mount.kill(workers=True)
            mount.start()
    finally:
        trainer.kill()
        trainer.wait()
    os.unlink(mount.point / "step" / "model.pt")
    mount.wait()


def test_a_second_mount_of_a_live_mount_point_is_refused(mount: Mount) -> None:
    done = mount.start(check=False)
    assert done.returncode == 10
    assert mount.point.joinpath(".").exists()
    mount.point.joinpath("f").write_bytes(b"f")
    mount.wait()


def test_umount_f_aborts_and_keeps_what_was_closed(mount: Mount) -> None:
    mount.point.joinpath("f").write_bytes(b"f")
    fd = os.open(mount.point / "open", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"half")
    subprocess.run(["umount", "-f", str(mount.point)], check=False, capture_output=True)
    subprocess.run(["umount", "-l", str(mount.point)], check=False, capture_output=True)
    gone(mount)
    assert outcome(os.write, fd, b"more") in ("ENOTCONN", "ECONNABORTED")
    assert outcome(os.close, fd) in ("ENOTCONN", "ECONNABORTED", None)
    done = mount.start()
    assert "1 interrupted" in done.stdout
    assert (mount.tier / "f").read_bytes() == b"f"
    assert not (mount.tier / "open").exists()


def test_a_mount_with_the_tier_down_stages_and_publishes_later(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    mount.umount()
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    assert mount.start(check=False).returncode == 8
    mount.start("--allow-tier-down")
    assert mount.status()["tier"]["state"] == "down"
    aside.rename(mount.tier)
    (mount.point / "f").write_bytes(b"f")
    mount.wait()
    assert (mount.tier / "f").read_bytes() == b"f"


def test_a_umount_request_that_makes_no_sense_unmounts_nothing(mount: Mount) -> None:
    (path,) = mount.run_dir.glob("*/control.sock")
    for request in (b'{"command": "umount", "timeout_s": "abc"}\n', b"[" * 200_000 + b"\n"):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(20)
            s.connect(str(path))
            s.sendall(request)
            answer = json.loads(s.makefile().readline())
        assert answer["done"]
        assert answer["code"] == 2
    assert os.path.ismount(mount.point)
    assert mount.status()["errors"] == 0


def test_a_copy_in_another_mount_namespace_does_not_hold_up_umount_beyond_its_time(
    new_mount: Callable[..., Mount],
) -> None:
    mount = new_mount()
    mount.start()
    mount.point.joinpath("f").write_bytes(b"x")
    holder = subprocess.Popen(["unshare", "-m", "sleep", "60"])
    try:
        here = os.readlink("/proc/self/ns/mnt")
        wait_for(lambda: os.readlink(f"/proc/{holder.pid}/ns/mnt") != here, "another mount namespace")
        done = mount.cli("umount", mount.point, "--timeout", "2", check=False)
        assert done.returncode == 3
        assert "something still holds it: a copy in another mount namespace" in done.stderr
    finally:
        holder.kill()
        holder.wait()
    wait_for(lambda: not alive(mount.pid), "the daemon's end")
    assert (mount.tier / "f").read_bytes() == b"x"
