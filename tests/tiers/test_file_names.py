"""Odd names, and the digests recorded with files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from rig import ATTRS, DIR_ATTRS, Session, draft

from ckptfs.tiers import file_errors, file_records
from ckptfs.tiers.base import (
    Applied,
    Digest,
    Kind,
    Mkdir,
    Move,
    Put,
    Remove,
    Trouble,
)
from ckptfs.tiers.file_names import handle_of, ident_of_token, path_of

# -- names ----------------------------------------------------------------------------------------

ODD_NAMES = [
    b"\xff\xfe not utf-8",
    b"new\nline",
    b" ",
    b"-rf",
    b"...",
    "\u00e9\u0301\U0001f4be".encode(),
    b"n" * 255,
    b"\xff" * 255,
    b"a\\b",
    b"%2e%2e",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(s: Session, name: bytes) -> None:
    s.apply(Mkdir(name, DIR_ATTRS))
    applied = s.put(name + b"/" + name, b"data")
    assert s.names() == {name}
    assert [(found.name, found.token) for found in s.tier.listdir(name)] == [(name, applied.token)]
    s.rig.foreign_write(name + b"/x", b"theirs")
    os.rename(
        s.rig.staging.parent / "tier" / os.fsdecode(name) / "x",
        s.rig.staging.parent / "tier" / os.fsdecode(name) / os.fsdecode(name),
    )
    assert s.put(name + b"/" + name, b"again", applied.token).conflict
    assert s.rig.conflicts() == [b"theirs"]
    found = s.look(name + b"/" + name)
    moved = s.apply(Move(name + b"/" + name, b"plain", Kind.FILE, found.ident, None))[0]
    assert s.apply(Remove(b"plain", Kind.FILE, moved.token)) == [Applied()]
    assert handle_of(path_of(handle_of(name))) == handle_of(name)
    assert file_errors.show(name).isprintable()


def test_a_name_too_long_is_refused(s: Session) -> None:
    outcome = s.tier.apply([s.put_op(b"n" * 256, b"data")])
    assert outcome.failed is not None
    assert (outcome.failed.trouble, outcome.failed.errno) == (Trouble.REFUSED, errno.ENAMETOOLONG)


def test_paths_longer_than_PATH_MAX(s: Session) -> None:
    path = b"/".join([b"d" * 200] * 25)
    s.put(path + b"/f", b"data")
    assert s.names(path) == {b"f"}
    token = s.look(path + b"/f").token
    assert s.tier.read(path + b"/f", token, 0, 4) == b"data"


def test_identities_in_tokens() -> None:
    assert [ident_of_token(token) for token in ("f12-3-4", "d7", "l9-ab", "x1", "", "f")] == [
        "12",
        "7",
        "9",
        "",
        "",
        "",
    ]


# -- digests --------------------------------------------------------------------------------------


def test_records_follow_in_attributes_or_manifests(s: Session, root: Path) -> None:
    few = tuple(Digest(n * 4, 4, bytes([n]) * 16) for n in range(4))
    many = tuple(Digest(n, 1, bytes([n % 256]) * 16) for n in range(5000))
    for digests, where in ((few, "xattr"), (many, "manifest")):
        size = digests[-1].offset + digests[-1].length
        upload = s.tier.begin(draft(where, b"", size))
        applied = s.apply(Put(b"f-" + where.encode(), upload, size, ATTRS, digests, None, where))[0]
        assert s.tier.digests(b"f-" + where.encode(), applied.token) == digests
    assert "user.ckptfs" in os.listxattr(root / "f-xattr")
    if shutil.which("stat") and "user.ckptfs" not in os.listxattr(root / "f-manifest"):
        ino = (root / "f-manifest").stat().st_ino
        assert (root / ".ckptfs/manifests" / str(ino)).exists()
        s.apply(Remove(b"f-manifest", Kind.FILE, s.look(b"f-manifest").token))
        assert list((root / ".ckptfs/manifests").iterdir()) == []


@pytest.mark.parametrize(
    "digests",
    [
        (),
        (Digest(0, 100, b"a" * 16),),
        (Digest(0, 60, b"a" * 16), Digest(60, 40, b"b" * 16)),
        (Digest(0, 40, b"a" * 16), Digest(40, 60, b"b" * 16)),
        (Digest(50, 10, b"c" * 16),),
    ],
)
def test_records_survive_encoding(digests: tuple[Digest, ...]) -> None:
    record = file_records.Record(100, 123, "v\u00e9", digests)
    data = file_records.encode(record)
    assert file_records.decode(data) == record
    for at in range(len(data)):
        assert file_records.decode(data[:at]) is None
        assert file_records.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_a_hostile_record_is_no_record(s: Session, root: Path) -> None:
    applied = s.put(b"f", b"data")
    for data in (b"", b"x", b"CKF1" + bytes(60), os.urandom(3000)):
        os.setxattr(root / "f", "user.ckptfs", data)
        assert s.tier.digests(b"f", applied.token) == ()
        assert s.tier.read(b"f", applied.token, 0, 4) == b"data"


def test_kept_objects_keep_their_name_in_the_listing_of_conflicts(s: Session, root: Path) -> None:
    s.rig.foreign_write(b"run/model.pt", b"theirs")
    s.put(b"run/model.pt", b"ours")
    (kept,) = (root / ".ckptfs/conflicts").iterdir()
    stamp, n, name = kept.name.split("-", 2)
    assert len(stamp) == 16
    assert (n, name) == ("1", "model.pt")
