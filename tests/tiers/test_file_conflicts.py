"""Other writers on a file tier (W1-W4)."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from rig import DIR_ATTRS, Session, caught

from ckptfs.tiers.base import (
    Mkdir,
    Trouble,
)


def test_a_foreign_directory_is_kept_with_its_content(s: Session, root: Path) -> None:
    s.rig.foreign_write(b"f/a/b", b"theirs")
    assert s.put(b"f", b"ours").conflict
    (kept,) = (root / ".ckptfs/conflicts").iterdir()
    assert kept.name.endswith("-f")
    assert (kept / "a/b").read_bytes() == b"theirs"


def test_a_directory_we_know_gives_way_only_when_empty(s: Session, root: Path) -> None:
    made = s.apply(Mkdir(b"x", DIR_ATTRS))[0]
    assert not s.put(b"x", b"file", made.token).conflict
    made = s.apply(Mkdir(b"y", DIR_ATTRS))[0]
    s.rig.foreign_write(b"y/theirs", b"t")
    assert s.put(b"y", b"file", made.token).conflict
    assert s.rig.foreign_read(b"y") == b"file"
    (kept,) = (root / ".ckptfs/conflicts").iterdir()
    assert (kept / "theirs").read_bytes() == b"t"


def test_a_file_in_place_of_a_parent_directory_is_kept(s: Session) -> None:
    s.rig.foreign_write(b"run", b"theirs")
    assert s.put(b"run/step/f", b"ours").conflict
    assert s.rig.foreign_read(b"run/step/f") == b"ours"
    assert s.rig.conflicts() == [b"theirs"]


def test_a_link_in_place_of_a_parent_directory_is_not_followed(s: Session, root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"precious")
    (root / "run").symlink_to(outside)
    assert s.tier.stat(b"run/f") is None
    assert caught(lambda: s.tier.listdir(b"run")).errno == errno.ENOTDIR
    assert s.put(b"run/f", b"ours").conflict
    assert (outside / "f").read_bytes() == b"precious"
    assert s.rig.foreign_read(b"run/f") == b"ours"


def test_a_link_under_the_name_is_replaced_not_followed(s: Session, root: Path) -> None:
    outside = root.parent / "outside"
    outside.write_bytes(b"precious")
    (root / "f").symlink_to(outside)
    assert s.put(b"f", b"ours").conflict
    assert outside.read_bytes() == b"precious"
    assert not (root / "f").is_symlink()


def test_many_conflicts_of_one_name_are_all_kept(s: Session) -> None:
    theirs = [b"theirs %d" % n for n in range(5)]
    for data in theirs:
        s.rig.foreign_write(b"f", data)
        assert s.put(b"f", b"ours").conflict
    assert sorted(s.rig.conflicts()) == theirs


def test_a_foreign_socket_is_kept_aside(s: Session, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("f")
    assert s.names() == set()
    assert s.tier.stat(b"f") is None
    assert s.put(b"f", b"ours").conflict
    assert s.rig.foreign_read(b"f") == b"ours"


def test_pipes_and_devices_are_left_out_and_do_not_hang(s: Session, root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert s.names() == set()
    token = f"f{(root / 'pipe').stat().st_ino}-0-0"
    assert caught(lambda: s.tier.read(b"pipe", token, 0, 1)).trouble is Trouble.CHANGED
