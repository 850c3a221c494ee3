"""Fixtures with real mounts. They need /dev/fuse and root (private tmpfs, other users)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mounted.harness import Mount


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.path.exists("/dev/fuse") and os.geteuid() == 0
    for item in items:
        if "tests/mounted" in str(item.path) and not usable:
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse and root"))


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on local disk, gone afterwards."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir="/var/tmp"))
    base.chmod(0o755)
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[Mount]:
    """One started mount for a whole module; each test has a directory of its own in it."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir="/var/tmp"))
    base.chmod(0o755)
    mount = Mount(base)
    try:
        mount.start()
        yield mount
        mount.umount()
        assert list(mount.run_dir.iterdir()) == []
    finally:
        mount.cleanup()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def local() -> Iterator[Path]:
    """A directory on local disk to compare with."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-local-", dir="/var/tmp"))
    base.chmod(0o755)
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def new_mount(disk: Path) -> Iterator[Callable[..., Mount]]:
    """Makes mounts (not started) that are cleaned up whatever happens."""
    made: list[Mount] = []

    def make(name: str = "m", tier: Path | None = None) -> Mount:
        mount = Mount(disk, name, tier)
        made.append(mount)
        return mount

    yield make
    for mount in made:
        mount.cleanup()


@pytest.fixture
def mount(new_mount: Callable[..., Mount]) -> Mount:
    """A started mount with a small cache."""
    made = new_mount()
    made.start()
    return made
