"""Stressors of stress-ng that verify what they do."""

from __future__ import annotations

import shutil

import pytest

from tests.mounted.harness import Mount
from tests.outside.afterwards import check, run

pytestmark = pytest.mark.skipif(shutil.which("stress-ng") is None, reason="needs stress-ng")

# Not "link": it makes hard links.
STRESSORS = (
    "hdd", "rename", "symlink", "dentry", "seek", "utime", "xattr", "copy-file", "iomix", "dir", "lockf",
    "flock", "sync-file",
)  # fmt: skip


def stress(mount: Mount, seconds: int, together: int) -> None:
    for start in range(0, len(STRESSORS), together):
        chosen = [f"--{name}=1" for name in STRESSORS[start : start + together]]
        limits = ["--verify", "--timeout", f"{seconds}s", "--hdd-bytes=16m"]
        run(["stress-ng", "--temp-path", str(mount.point), *limits, *chosen], mount.base, 300)


def test_stressors_together_find_no_fault(mount: Mount) -> None:
    stress(mount, seconds=2, together=5)
    check(mount)


@pytest.mark.long
def test_stressors_one_by_one_find_no_fault(mount: Mount) -> None:
    stress(mount, seconds=5, together=1)
    check(mount)
