"""Fixtures of a file tier in a temporary directory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract", "rig", "file_rig")

from file_rig import file_rig  # noqa: E402
from rig import Rig, Session  # noqa: E402


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    (tmp_path / "staging").mkdir()
    return tmp_path / "tier"


@pytest.fixture
def rig(root: Path) -> Rig:
    return file_rig(root, root.parent / "staging")


@pytest.fixture
def s(rig: Rig) -> Session:
    return Session(rig)
