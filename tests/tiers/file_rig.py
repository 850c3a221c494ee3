"""A file tier as a `Rig`, and helpers for the tests of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Rig

from ckptfs.tiers import open_tier

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount or to be another user")


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


@contextlib.contextmanager
def small_tmpfs(at: Path, options: str) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ckptfs-test", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def hidden_files(root: Path) -> list[Path]:
    """All hidden uploads anywhere in the tier."""
    uploads = [path for path in (root / ".ckptfs/uploads").rglob("*") if path.is_file()]
    return uploads + [path for path in root.rglob(".ckptfs-*") if path.is_file()]
