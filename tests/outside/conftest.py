"""The fixtures of tests/mounted, for tools and suites that nobody here wrote."""

from __future__ import annotations

import os

import pytest

from tests.mounted.conftest import disk, mount, new_mount

__all__ = ["disk", "mount", "new_mount"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.path.exists("/dev/fuse") and os.geteuid() == 0
    for item in items:
        if "tests/outside" in str(item.path) and not usable:
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse and root"))
