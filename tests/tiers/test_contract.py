"""The tier contract on the file tier, with digests in attributes and in manifests."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract")

from contract import TierContract  # noqa: E402
from file_rig import file_rig  # noqa: E402
from rig import Rig  # noqa: E402


class TestFileTier(TierContract):
    @pytest.fixture(params=["xattr", "manifest"])
    def rig(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
        if request.param == "manifest":

            def refuse(*_: object, **__: object) -> None:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

            monkeypatch.setattr(os, "setxattr", refuse)
        (tmp_path / "tier").mkdir()
        (tmp_path / "staging").mkdir()
        return file_rig(tmp_path / "tier", tmp_path / "staging")
