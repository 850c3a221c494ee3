"""`--cache-dir`: staging and journal on local disk, for what must outlive the machine."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for
from tests.mounted.processes import kill, saver

MIB = 1 << 20


@pytest.fixture
def disk_mount(new_mount: Callable[..., Mount]) -> Mount:
    mount = new_mount()
    (mount.base / "nvme").mkdir()
    mount.start("--cache-dir", str(mount.base / "nvme"), config="settle_time = 3600\n")
    return mount


def test_everything_works_and_nothing_is_left(disk_mount: Mount) -> None:
    mount = disk_mount
    data = os.urandom(5 * MIB)
    mount.point.joinpath("f").write_bytes(data)
    with open(mount.point / "f", "r+b") as f:
        f.seek(MIB)
        f.write(b"patch")
    data = data[:MIB] + b"patch" + data[MIB + 5 :]
    os.rename(mount.point / "f", mount.point / "g")
    assert mount.point.joinpath("g").read_bytes() == data
    fd = os.open(mount.point / "g", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    mount.wait()
    assert (mount.tier / "g").read_bytes() == data
    assert "ckptfs-staging" not in "".join(
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(mount.base) in line
    )
    mount.umount()
    assert list((mount.base / "nvme").iterdir()) == []


def test_kill_and_mount_again(disk_mount: Mount) -> None:
    mount = disk_mount
    mount.point.joinpath("f").write_bytes(b"f" * MIB)
    process = saver(mount.point / "open")
    mount.kill(workers=True)
    kill(process)
    done = mount.start()
    assert "recovered 1 closed file " in done.stdout
    assert "1 interrupted" in done.stdout
    mount.wait(mount.point / "f")
    assert (mount.tier / "f").read_bytes() == b"f" * MIB
    assert (mount.point / "open").read_bytes() == b"half of the new one"


def other_boot(mount: Mount) -> Path:
    """Make the journal believe in a reboot; returns the staging directory."""
    journal = next((mount.base / "nvme").glob("*/journal/journal.sqlite"))
    with sqlite3.connect(journal) as db:
        db.execute("UPDATE meta SET value='another' WHERE key='boot_id'")
    db.close()
    return next((mount.base / "nvme").glob("*/staging/data"))


def test_after_a_reboot_only_what_matches_its_digests_is_published(disk_mount: Mount) -> None:
    mount = disk_mount
    (mount.point / "good").write_bytes(b"g" * (2 * MIB))
    mount.wait()
    (mount.point / "good").write_bytes(b"G" * (3 * MIB))
    (mount.point / "bad").write_bytes(b"b" * (2 * MIB))
    wait_for(lambda: mount.status()["pending"]["files"] == 2, "two sealed files")
    mount.kill(workers=True)
    staging = other_boot(mount)
    for path in staging.iterdir():
        if path.stat().st_size == 2 * MIB:
            with open(path, "r+b") as f:
                f.seek(MIB)
                f.write(b"lost in the power cut")
    done = mount.start()
    assert "1 did not survive the reboot intact" in done.stdout
    mount.wait(mount.point / "good")
    assert (mount.tier / "good").read_bytes() == b"G" * (3 * MIB)
    assert not (mount.tier / "bad").exists()
    assert mount.state("bad") == "interrupted"
