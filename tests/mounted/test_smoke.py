"""The shortest way through the product."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.mounted.harness import Mount, wait_for


def test_write_rename_wait_umount_leaves_files_on_the_tier_and_nothing_else(mount: Mount) -> None:
    (mount.point / "run").mkdir()
    (mount.point / "run" / "model.tmp").write_bytes(b"weights" * 1000)
    os.rename(mount.point / "run" / "model.tmp", mount.point / "run" / "model.pt")
    os.symlink("model.pt", mount.point / "run" / "latest")
    assert (mount.point / "run" / "latest").read_bytes() == b"weights" * 1000
    mount.wait()
    assert mount.tier_names() == {"run", "run/model.pt", "run/latest"}
    assert os.getxattr(mount.point / "run" / "model.pt", "user.ckptfs.state") == b"durable"
    mount.umount()
    assert (mount.tier / "run" / "model.pt").read_bytes() == b"weights" * 1000
    assert list(mount.run_dir.iterdir()) == []


def test_a_killed_daemon_loses_nothing(mount: Mount) -> None:
    (mount.point / "a").write_bytes(b"a" * 3_000_000)
    mount.kill()
    done = mount.start()
    assert "recovered 1 closed file " in done.stdout
    assert (mount.point / "a").read_bytes() == b"a" * 3_000_000
    mount.wait()
    assert (mount.tier / "a").read_bytes() == b"a" * 3_000_000


def test_two_mounts_of_one_tier_see_each_other_and_do_not_wait_for_each_other(
    new_mount: Callable[..., Mount],
) -> None:
    a = new_mount("a")
    b = new_mount("b", a.tier)
    a.start()
    b.start()
    (a.point / "run").mkdir()
    a.wait()
    for worker in a.workers():
        os.kill(worker, signal.SIGSTOP)
    (a.point / "run" / "from a").write_bytes(b"a")
    (b.point / "run" / "from b").write_bytes(b"b")
    b.wait()
    assert (b.tier / "run" / "from b").read_bytes() == b"b"
    assert not (a.tier / "run" / "from a").exists()
    for worker in a.workers():
        os.kill(worker, signal.SIGCONT)
    a.wait()
    wait_for(lambda: (a.point / "run" / "from b").exists(), "b's file in a", 3)
    wait_for(lambda: (b.point / "run" / "from a").exists(), "a's file in b", 3)
    assert a.status()["conflicts"] == b.status()["conflicts"] == 0
    a.umount()
    b.umount()


def test_a_refused_mount_leaves_no_staging(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    mount.tier.rmdir()
    assert mount.start(check=False).returncode == 8
    assert str(mount.run_dir) not in Path("/proc/self/mounts").read_text()
    assert list(mount.run_dir.iterdir()) == []
