"""The fixtures of tests/mounted, and campaigns that leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.crash.campaign import Campaign
from tests.mounted.conftest import disk, mount, new_mount
from tests.mounted.harness import Mount

__all__ = ["disk", "mount", "new_mount"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.path.exists("/dev/fuse") and os.geteuid() == 0
    for item in items:
        if "tests/crash" in str(item.path) and not usable:
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse and root"))


@pytest.fixture
def campaign(new_mount: Callable[..., Mount]) -> Iterator[Callable[..., Campaign]]:
    """Makes campaigns (not started) on a mount of their own, started with the given TOML."""
    made: list[Campaign] = []

    def make(seed: int, config: str = "settle_time = 0.3\n", **options: int) -> Campaign:
        mount = new_mount()
        mount.start(config=config)
        made.append(Campaign(mount, seed, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
