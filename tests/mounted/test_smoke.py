"""The shortest way through the product."""

from __future__ import annotations

import os

from tests.mounted.harness import Mount


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
    assert "recovered 1 closed files" in done.stdout
    assert (mount.point / "a").read_bytes() == b"a" * 3_000_000
    mount.wait()
    assert (mount.tier / "a").read_bytes() == b"a" * 3_000_000
