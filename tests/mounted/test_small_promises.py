"""Promises of docs/SEMANTICS.md that need no more than a few lines to show."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import Mount
from tests.mounted.processes import kill, saver

NewMount = Callable[..., Mount]


def test_decisions_about_a_file_that_is_open_for_writing_are_refused(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    path = mount.point / "f"
    kill(saver(path))
    assert mount.state("f") == "interrupted"
    with open(path, "r+b"):
        for command in ("publish", "discard"):
            done = mount.cli(command, path, check=False)
            assert "is open for writing; close it first" in done.stderr
            assert done.returncode == 10
    assert mount.state("f") == "interrupted"
    mount.cli("discard", path)


def test_wait_without_a_path_waits_for_removals_too(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    for n in range(50):
        mount.point.joinpath(f"f{n}").write_bytes(b"x")
    mount.wait()
    for n in range(50):
        mount.point.joinpath(f"f{n}").unlink()
    mount.wait()
    assert mount.tier_names() == set()


def test_a_tier_in_memory_is_said_to_be_one(new_mount: NewMount) -> None:
    mount = new_mount()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "ckptfs-test", str(mount.tier)], check=True)
    done = mount.start()
    assert "tier: " in done.stdout
    assert "tmpfs" in done.stdout
    mount.umount()


def test_o_direct_needs_no_alignment(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    fd = os.open(mount.point / "f", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    assert os.pwrite(fd, b"12345", 3) == 5
    os.close(fd)
    mount.wait()
    assert (mount.tier / "f").read_bytes() == b"\0\0\0" + b"12345"


def test_sync_and_syncfs_return_while_the_tier_is_away(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    away = mount.tier.with_name("away")
    mount.tier.rename(away)
    try:
        mount.point.joinpath("f").write_bytes(b"x")
        fd = os.open(mount.point, os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0
        os.close(fd)
        assert mount.state("f") != "durable"
    finally:
        away.rename(mount.tier)
    mount.wait()


def test_files_that_others_linked_are_separate_files(new_mount: NewMount) -> None:
    mount = new_mount()
    (mount.tier / "a").write_bytes(b"both")
    os.link(mount.tier / "a", mount.tier / "b")
    mount.start()
    assert (mount.point / "a").stat().st_ino != (mount.point / "b").stat().st_ino
    with open(mount.point / "a", "r+b") as f:
        f.write(b"mine")
    mount.wait()
    assert (mount.point / "b").read_bytes() == b"both"
    assert [(mount.tier / n).read_bytes() for n in ("a", "b")] == [b"mine", b"both"]


@pytest.mark.parametrize("option", ["nosuid", "nodev"])
def test_the_mount_is_harmless(new_mount: NewMount, option: str) -> None:
    mount = new_mount()
    mount.start()
    (line,) = [x for x in Path("/proc/self/mounts").read_text().splitlines() if f" {mount.point} " in x]
    assert option in line.split()[3].split(",")
