"""The tier contract on the file tier, with digests in attributes and in manifests."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract")

from contract import Rig, TierContract  # noqa: E402

from ckptfs.tiers import open_tier  # noqa: E402


def file_rig(root: Path, staging: Path) -> Rig:
    """A file tier in `root`, and a stranger who uses the directory."""
    base = os.fsencode(root)

    def path_of(path: bytes) -> bytes:
        return base + b"/" + path

    def write(path: bytes, data: bytes) -> None:
        os.makedirs(os.path.dirname(path_of(path)), exist_ok=True)
        with open(path_of(path) + b".new", "wb") as file:
            file.write(data)
        os.rename(path_of(path) + b".new", path_of(path))

    def read(path: bytes) -> bytes | None:
        try:
            with open(path_of(path), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def remove(path: bytes) -> None:
        if os.path.isdir(path_of(path)):
            shutil.rmtree(path_of(path))
        else:
            os.unlink(path_of(path))

    def conflicts() -> list[bytes]:
        return [path.read_bytes() for path in sorted((root / ".ckptfs/conflicts").iterdir())]

    def in_place(path: bytes, offset: int, data: bytes) -> None:
        st = os.stat(path_of(path))
        with open(path_of(path), "r+b") as file:
            file.seek(offset)
            file.write(data)
        os.utime(path_of(path), ns=(st.st_atime_ns, st.st_mtime_ns))

    return Rig(
        open=lambda: open_tier(f"file://{root}", "0000-mount", {}),
        staging=staging,
        foreign_write=write,
        foreign_read=read,
        foreign_remove=remove,
        foreign_mkdir=lambda path: os.makedirs(path_of(path)),
        conflicts=conflicts,
        in_place=in_place,
    )


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
