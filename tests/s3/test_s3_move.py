"""Renames on an object tier: order, attributes, large objects, and kill -9 in the middle."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rig import ATTRS, DIR_ATTRS, Rig, Session, blob

from ckptfs.tiers.base import Applied, Kind, Link, Mkdir, Move, Remove, SetAttrs
from ckptfs.tiers.s3 import S3Tier
from ckptfs.tiers.s3_copy import Copier
from ckptfs.tiers.s3_move import TreeMove
from ckptfs.tiers.s3_site import Listed, Site
from tests.s3.s3_rig import LEAST_PART, s3_rig
from tests.s3.servers import Server
from tests.s3.stranger import Bucket

MIB = 1 << 20


@pytest.fixture
def rig(seaweed: Server, tmp_path: Path) -> Iterator[Rig]:
    with s3_rig(seaweed, tmp_path, bucket="moves") as made:
        yield made


@pytest.fixture
def s(rig: Rig) -> Session:
    return Session(rig)


def bucket_of(s: Session) -> Bucket:
    """The same place for a stranger."""
    assert isinstance(s.tier, S3Tier)
    store = s.tier.site.store
    client = store.run("looking", lambda client: client)
    return Bucket(client, store.bucket, store.prefix.decode())


def keys(s: Session, below: bytes = b"") -> set[str]:
    return {item.key for item in bucket_of(s).listed(below)}


def test_R8_everything_in_a_directory_moves_with_its_attributes(s: Session) -> None:
    s.apply(Mkdir(b"src", DIR_ATTRS), Mkdir(b"src/empty", replace(DIR_ATTRS, mode=0o700)))
    small, big = s.put(b"src/small", b"small"), s.put(b"src/sub/big", blob(LEAST_PART + 5))
    s.apply(Link(b"src/sub/link", b"../small", ATTRS, None))
    late = replace(ATTRS, mode=0o600, mtime_ns=1_234_000_000_000)
    s.apply(
        SetAttrs(b"src/small", Kind.FILE, late, small.token),
        SetAttrs(b"src/sub/big", Kind.FILE, late, big.token),
        SetAttrs(b"src", Kind.DIR, replace(DIR_ATTRS, mode=0o711), "dir"),
    )
    assert s.apply(Move(b"src", b"a/dst", Kind.DIR, "dir", None)) == [Applied("dir", "dir")]
    assert s.names(b"a/dst") == {b"small", b"sub", b"empty"}
    assert s.look(b"a/dst").attrs.mode == 0o711
    assert s.look(b"a/dst/empty").attrs.mode == 0o700
    for path in (b"a/dst/small", b"a/dst/sub/big"):
        found = s.look(path)
        assert (found.attrs.mode, found.attrs.mtime_ns) == (0o600, late.mtime_ns)
        assert s.tier.digests(path, found.token), path
    assert s.look(b"a/dst/sub/link").target == b"../small"
    assert s.rig.foreign_read(b"a/dst/sub/big") == blob(LEAST_PART + 5)
    assert s.names() == {b"a"}
    assert not [key for key in keys(s, b".ckptfs/") if "moves/" in key or "/src" in key]


def test_R8_the_newest_object_comes_last_and_goes_first(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dates have whole seconds: within one the time in the metadata decides, not the number of the version,
    since what was written first may be published last (R4)."""
    monkeypatch.setattr(TreeMove, "ALONE", 4)
    names = [b"src/f%02d" % n for n in range(12)]
    random.Random(5).shuffle(names)
    ops = [s.put_op(name, name) for name in reversed(names)]
    s.apply(*reversed(ops))
    copied: list[bytes] = []
    real = Copier.copy

    def copy(self: Copier, source: str, head: Any, target: str, was: str = "") -> None:
        real(self, source, head, target, was)
        copied.append(b"src/" + source.rpartition("/")[2].encode())

    monkeypatch.setattr(Copier, "copy", copy)
    s.apply(Move(b"src", b"dst", Kind.DIR, "dir", None))
    assert copied[-4:] == names[-4:]
    assert set(copied) == set(names)


def test_W3_what_others_have_at_the_new_name_is_kept(s: Session) -> None:
    s.put(b"src/f", b"ours")
    s.rig.foreign_write(b"dst/f", b"theirs")
    s.rig.foreign_write(b"dst/g", b"theirs too")
    assert s.apply(Move(b"src", b"dst", Kind.DIR, "dir", None))[0].conflict
    assert s.names(b"dst") == {b"f"}
    assert s.rig.foreign_read(b"dst/f") == b"ours"
    assert sorted(s.rig.conflicts()) == [b"theirs", b"theirs too"]


def test_W4_a_directory_stays_when_the_last_object_moves_out_of_it(s: Session) -> None:
    s.apply(Mkdir(b"from", replace(DIR_ATTRS, mode=0o711)), Mkdir(b"to", DIR_ATTRS))
    file = s.put(b"from/f", b"data")
    s.put(b"from/tree/f", b"data")
    s.apply(Move(b"from/f", b"to/f", Kind.FILE, file.ident, None))
    assert keys(s, b"to/") == {"to/f"}
    s.apply(Move(b"from/tree", b"to/tree", Kind.DIR, "dir", None))
    assert s.names(b"from") == set()
    assert s.look(b"from").attrs.mode == 0o711
    assert keys(s, b"from") == {"from/"}


def test_names_that_have_to_be_quoted(s: Session) -> None:
    names = ["a b", "a+b", "a%2Bb", "ä€😀", "q?x=1&y#z", "quote\"'<>", "a\tb", "~", "=", "sub dir+/x y"]
    for name in names:
        s.put(f"s r+c/{name}".encode(), name.encode())
    s.apply(Move(b"s r+c", "dst %41é".encode(), Kind.DIR, "dir", None))
    assert {name: s.rig.foreign_read(f"dst %41é/{name}".encode()) for name in names} == {
        name: name.encode() for name in names
    }
    assert s.names("dst %41é".encode()) == {name.partition("/")[0].encode() for name in names}
    s.rig.foreign_write(b"t o+/a%", b"theirs")
    found = s.look("dst %41é/a b".encode())
    assert s.apply(Move("dst %41é/a b".encode(), b"t o+/a%", Kind.FILE, found.ident, None))[0].conflict
    assert s.rig.foreign_read(b"t o+/a%") == b"a b"
    assert s.rig.conflicts() == [b"theirs"]
    moved = s.look(b"t o+/a%")
    s.apply(Remove(b"t o+/a%", Kind.FILE, moved.token), Remove(b"t o+", Kind.DIR, "dir"))
    assert s.names() == {"dst %41é".encode()}


@pytest.mark.parametrize("part_copy", [True, False])
def test_objects_above_the_limit_of_one_copy_are_copied_in_parts(
    s: Session, monkeypatch: pytest.MonkeyPatch, part_copy: bool
) -> None:
    monkeypatch.setattr(Copier, "ONE_REQUEST", 6 * MIB)
    monkeypatch.setattr(Copier, "PART", 5 * MIB)
    monkeypatch.setattr(Copier, "THROUGH", 5 * MIB)
    assert isinstance(s.tier, S3Tier)
    store = s.tier.site.store
    monkeypatch.setattr(store, "capabilities", replace(store.capabilities, part_copy=part_copy))
    data = blob(12 * MIB + 3)
    put = s.put(b"src/big", data)
    s.put(b"src/small", b"small")
    moved = s.apply(Move(b"src/big", b"src/large", Kind.FILE, put.ident, None))[0]
    assert s.rig.foreign_read(b"src/large") == data
    assert s.tier.digests(b"src/large", moved.token)
    s.apply(Move(b"src", b"dst", Kind.DIR, "dir", None))
    found = s.look(b"dst/large")
    assert s.rig.foreign_read(b"dst/large") == data
    assert (found.ident, found.attrs) == (put.ident, ATTRS)
    assert s.tier.digests(b"dst/large", found.token)
    assert s.names() == {b"dst"}
    assert bucket_of(s).uploads() == []
    assert not [key for key in keys(s, b".ckptfs/") if "uploads/" in key]


MOVER = """
import sys
from ckptfs.tiers import open_tier
from ckptfs.tiers.base import Kind, Move
url, endpoint, tier_id, caps = sys.argv[1:]
tier = open_tier(url, "0000-mount", {"endpoint_url": endpoint, "tier_id": tier_id, "caps": caps})
tier.stat(b"src")
print("ready", flush=True)
sys.stdin.readline()
print(tier.apply([Move(b"src", b"dst", Kind.DIR, "dir", None)]), flush=True)
"""


class Watcher(threading.Thread):
    """A reader who looks whether the newest object is at the new name before all others are."""

    def __init__(self, place: Bucket, names: list[str]) -> None:
        super().__init__(daemon=True)
        self._place, self._names = place, names
        self._done = threading.Event()
        self.wrong: list[str] = []
        self.partly = 0
        """Times that a part of the objects was there."""

    def run(self) -> None:
        newest = f"dst/{self._names[-1]}"
        others = {f"dst/{name}" for name in self._names[:-1]}
        while not self._done.is_set():
            if self._place.read(newest.encode()) is not None:
                missing = others - self._there()
                if missing:
                    self.wrong.append(f"newest before {sorted(missing)}")
            self.partly += 0 < len(self._there() & others) < len(others)

    def _there(self) -> set[str]:
        return {item.key for item in self._place.listed("dst/")}

    def stop(self) -> None:
        self._done.set()
        self.join()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_R8_a_move_killed_at_any_moment_goes_on(seaweed: Server, rig: Rig, s: Session, seed: int) -> None:
    """kill -9 at random moments, until it is done: nothing is lost, and the order holds."""
    chance = random.Random(seed)
    names = [f"d{n % 3}/f{n:02}" for n in range(50)]
    chance.shuffle(names)
    contents = {name: blob(chance.randrange(3000), n) for n, name in enumerate(names)}
    s.apply(Mkdir(b"src", DIR_ATTRS), Mkdir(b"src/empty", DIR_ATTRS))
    ops = [s.put_op(b"src/" + name.encode(), contents[name]) for name in names]
    s.apply(*ops)
    place = bucket_of(s)
    assert isinstance(s.tier, S3Tier)
    info = s.tier.probe()
    watcher = Watcher(place, names)
    watcher.start()
    kills = 0
    deadline = time.monotonic() + 120
    try:
        while True:
            assert time.monotonic() < deadline
            moving = subprocess.Popen(
                [sys.executable, "-c", MOVER, info.url, seaweed.endpoint, info.tier_id, info.caps],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **seaweed.env},
            )  # fmt: skip
            with moving:
                assert moving.stdout is not None
                assert moving.stdin is not None
                assert moving.stdout.readline() == "ready\n"
                moving.stdin.write("\n")
                moving.stdin.flush()
                try:
                    moving.wait(chance.uniform(0.01, 0.12) if kills < 6 else 60)
                except subprocess.TimeoutExpired:
                    moving.kill()
                    moving.wait()
                    kills += 1
                    for name, data in contents.items():
                        there = {place.read(f"{at}/{name}".encode()) for at in ("src", "dst")}
                        assert there <= {None, data}, name
                        assert data in there, name
                    continue
                answer = moving.stdout.read()
            break
    finally:
        watcher.stop()
    assert "failed=None" in answer
    assert "conflict=False" in answer
    assert watcher.wrong == []
    assert kills
    assert {name: place.read(f"dst/{name}".encode()) for name in names} == contents
    assert keys(s, b"src") == set()
    assert keys(s, b"dst/") == {f"dst/{name}" for name in names} | {"dst/empty/"}
    assert not [key for key in keys(s, b".ckptfs/") if "moves/" in key or "conflicts/" in key]
    assert s.names() == {b"dst"}
    assert s.apply(Move(b"src", b"dst", Kind.DIR, "dir", None)) == [Applied("dir", "dir")]


def test_R8_a_large_object_is_as_old_as_its_digests(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS dates an object that came in parts to when its upload was begun."""
    s.put(b"src/small", b"small")
    time.sleep(1.1)
    s.put(b"src/big", blob(LEAST_PART + 5))
    order: list[str] = []
    real, by_age = Site.listed, TreeMove._by_age

    def listed(self: Site, prefix: str, at_once: int = 1000) -> Iterator[Listed]:
        for item in real(self, prefix, at_once):
            begun = item.modified - timedelta(hours=1)
            yield replace(item, modified=begun) if "-" in item.token else item

    def spied(self: TreeMove, *arguments: Any) -> list[Listed]:
        found = by_age(self, *arguments)
        order.extend(item.key.rpartition("/")[2] for item in found)
        return found

    monkeypatch.setattr(Site, "listed", listed)
    monkeypatch.setattr(TreeMove, "_by_age", spied)
    s.apply(Move(b"src", b"dst", Kind.DIR, "dir", None))
    assert order == ["small", "big"]


def test_W3_what_moved_with_its_directory_is_still_ours(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of what came in parts has another ETag on AWS, and the caller is not told of each."""
    monkeypatch.setattr(Copier, "ONE_REQUEST", 5 * MIB)
    monkeypatch.setattr(Copier, "PART", 6 * MIB)
    names = [b"removed", b"replaced", b"moved over", b"changed"]
    tokens = {name: s.put(b"src/" + name, blob(2 * LEAST_PART + 5)).token for name in names}
    other = s.put(b"other", b"other")
    s.apply(Move(b"src", b"dst", Kind.DIR, "dir", None), Move(b"dst", b"last", Kind.DIR, "dir", None))
    assert {s.look(b"last/" + name).token for name in names}.isdisjoint(tokens.values())
    late = replace(ATTRS, mode=0o600)
    answers = s.apply(
        SetAttrs(b"last/changed", Kind.FILE, late, tokens[b"changed"]),
        s.put_op(b"last/replaced", b"new", tokens[b"replaced"]),
        Move(b"other", b"last/moved over", Kind.FILE, other.ident, tokens[b"moved over"]),
        Remove(b"last/removed", Kind.FILE, tokens[b"removed"]),
    )
    assert not any(answer.conflict for answer in answers)
    assert s.names(b"last") == {b"replaced", b"moved over", b"changed"}
    assert s.look(b"last/changed").attrs == late
    assert s.rig.conflicts() == []
