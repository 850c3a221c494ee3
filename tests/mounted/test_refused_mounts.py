"""Mounts that can't be, and the sentence that says what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.mounted.harness import Mount

NewMount = Callable[..., Mount]


def refusal(mount: Mount) -> str:
    done = mount.start(check=False)
    assert done.returncode == 8, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(mount.run_dir.iterdir()) == [] or not list(mount.run_dir.glob("*/mount.json"))
    return done.stderr


def test_a_tier_that_does_not_exist(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.tier.rmdir()
    said = refusal(mount)
    assert f"tier directory {mount.tier} cannot be opened: No such file or directory; " in said
    assert "mount the file system it lies on, or make it with mkdir -p (--allow-tier-down mounts any" in said
    mount.tier.mkdir()
    mount.start()
    mount.umount()
    mount.tier.rename(mount.base / "aside")  # an empty directory in its place would be no tier
    assert "mount the file system it lies on, or put it back (--allow-tier-down" in refusal(mount)


def test_a_tier_that_is_no_directory(new_mount: NewMount, disk: Path) -> None:
    mount = new_mount()
    mount.tier.rmdir()
    mount.tier.write_text("a file")
    assert f"tier directory {mount.tier} cannot be opened: Not a directory; name a directory" in refusal(
        mount
    )


def test_a_tier_that_is_read_only(new_mount: NewMount) -> None:
    mount = new_mount()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(mount.tier)], check=True)
    try:
        said = refusal(mount)
        assert f"{mount.tier} cannot be made a tier: Read-only file system; mount that file system" in said
    finally:
        subprocess.run(["umount", str(mount.tier)], check=True)
    mount.start()
    mount.umount()
    subprocess.run(["mount", "--bind", str(mount.tier), str(mount.tier)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(mount.tier)], check=True)
    try:
        said = refusal(mount)
        assert f"probing {mount.tier}: Read-only file system; mount that file system read-write" in said
    finally:
        subprocess.run(["umount", str(mount.tier)], check=True)
