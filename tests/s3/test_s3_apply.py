"""Batches on an object tier: how many requests they take, markers, conflicts, answers that got lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rig import ATTRS, DIR_ATTRS, Session, blob, trouble

from ckptfs.tiers.base import Applied, Kind, Link, Mkdir, Move, Op, Put, Remove, SetAttrs, TierError, Trouble
from ckptfs.tiers.s3 import S3Tier
from ckptfs.tiers.s3_client import Capabilities, Store
from tests.s3.s3_rig import LEAST_PART, s3_rig
from tests.s3.servers import Server
from tests.s3.stranger import Bucket

pytestmark = pytest.mark.long


@pytest.fixture(params=["probed", "plain"])
def s(request: pytest.FixtureRequest, seaweed: Server, tmp_path: Path) -> Iterator[Session]:
    """A store with everything, and one without conditions and checksums."""
    with s3_rig(seaweed, tmp_path, bucket="apply") as rig:
        made = Session(rig)
        if request.param == "plain":
            store_of(made).capabilities = Capabilities()
        yield made


@pytest.fixture
def probed(seaweed: Server, tmp_path: Path) -> Iterator[Session]:
    with s3_rig(seaweed, tmp_path, bucket="apply") as rig:
        yield Session(rig)


def store_of(s: Session) -> Store:
    assert isinstance(s.tier, S3Tier)
    return s.tier.site.store


def bucket_of(s: Session) -> Bucket:
    """The same place for a stranger."""
    store = store_of(s)
    return Bucket(store.run("looking", lambda client: client), store.bucket, store.prefix.decode())


def keys(s: Session, below: bytes = b"") -> set[str]:
    return {item.key for item in bucket_of(s).listed(below) if not item.key.startswith(".ckptfs/")}


def own(s: Session) -> list[str]:
    """What is ckptfs's own."""
    return [item.key for item in bucket_of(s).listed(b".ckptfs/")]


@contextlib.contextmanager
def requests(hook: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """What is asked of the store."""
    calls: list[str] = []
    real, lock = Store.run, threading.Lock()

    def run(self: Store, what: str, job: Callable[[Any], Any]) -> Any:
        with lock:
            calls.append(what)
        if hook is not None:
            hook(what)
        return real(self, what, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "run", run)
        yield calls


def fresh(s: Session) -> Session:
    """Another process of the same mount."""
    return Session(s.rig)


# -- cost ----------------------------------------------------------------------------------------


def test_a_small_version_is_one_request(probed: Session) -> None:
    s = probed
    s.apply(Mkdir(b"d", DIR_ATTRS))
    s.put(b"d/first", b"")
    first = s.put(b"d/again", b"one")
    ops: list[Op] = [s.put_op(b"d/f%d" % n, b"%d" % n) for n in range(20)]
    ops += [s.put_op(b"d/again", b"two", first.token), Link(b"d/latest", b"f1", ATTRS, None)]
    with requests() as calls:
        s.apply(*ops)
    assert len(calls) == len(ops), calls


def test_removals_go_together(probed: Session) -> None:
    s = probed
    s.apply(Mkdir(b"d", DIR_ATTRS))
    done = [s.put(b"d/f%d" % n, b"%d" % n) for n in range(20)]
    with requests() as calls:
        s.apply(*[Remove(b"d/f%d" % n, Kind.FILE, done[n].token) for n in range(10)])
    assert len([call for call in calls if call.startswith("looking")]) == 10
    assert len(calls) <= 10 + 3, calls
    assert len(s.names(b"d")) == 10


# -- markers -------------------------------------------------------------------------------------


def test_W4_a_marker_is_there_while_a_directory_is_empty(s: Session) -> None:
    attrs = replace(DIR_ATTRS, mode=0o711)
    s.apply(Mkdir(b"a", DIR_ATTRS), Mkdir(b"a/b", attrs))
    assert keys(s) == {"a/b/"}
    file = s.put(b"a/b/f", b"data")
    assert keys(s) == {"a/b/f"}
    assert s.look(b"a/b").attrs.mode == 0o711
    s.apply(Remove(b"a/b/f", Kind.FILE, file.token))
    assert keys(s) == {"a/b/"}
    assert s.look(b"a/b").attrs.mode == 0o711
    assert s.names(b"a/b") == set()
    s.apply(Remove(b"a/b", Kind.DIR, "dir"))
    assert keys(s) == {"a/"}
    s.apply(Remove(b"a", Kind.DIR, "dir"))
    assert keys(s) == set()
    assert s.names() == set()


def test_a_marker_of_another_process_goes_when_something_is_put_inside(s: Session) -> None:
    other = fresh(s)
    s.apply(Mkdir(b"d", DIR_ATTRS))
    other.put(b"d/e/f", b"data")
    assert keys(s) == {"d/e/f"}


def test_a_tree_that_is_removed_at_once_leaves_nothing(s: Session) -> None:
    s.apply(Mkdir(b"d", DIR_ATTRS), Mkdir(b"d/e", DIR_ATTRS))
    one, two = s.put(b"d/f", b"1"), s.put(b"d/e/f", b"2")
    s.apply(
        Remove(b"d/f", Kind.FILE, one.token),
        Remove(b"d/e/f", Kind.FILE, two.token),
        Remove(b"d/e", Kind.DIR, "dir"),
        Remove(b"d", Kind.DIR, "dir"),
    )
    assert keys(s) == set()
    assert s.names() == set()
    assert not [key for key in own(s) if "attrs/" in key and "d" in key.rpartition("/")[2]]


def test_R2_a_directory_is_visible_before_what_comes_after_it(s: Session) -> None:
    """It may do without a marker only when the very next op puts something inside."""
    ops = [Mkdir(b"d", DIR_ATTRS), s.put_op(b"elsewhere", b"data"), s.put_op(b"d/f", b"data")]
    seen: list[set[str]] = []

    def hook(what: str) -> None:
        if what.startswith("publishing") and what.endswith("/elsewhere"):
            seen.append(keys(s, b"d"))

    with requests(hook):
        s.apply(*ops)
    assert {"d/"} in seen
    assert keys(s) == {"d/f", "elsewhere"}


def test_a_directory_is_there_also_when_what_was_to_fill_it_fails(s: Session) -> None:
    lost, _, version = s.send(b"lost", b"a/b/f")
    s.tier.abandon([lost])
    outcome = s.tier.apply(
        [Mkdir(b"a", DIR_ATTRS), Mkdir(b"a/b", DIR_ATTRS), Put(b"a/b/f", lost, 4, ATTRS, (), None, version)]
    )
    assert trouble(outcome) is Trouble.REDO
    assert outcome.applied == (Applied("dir", "dir"), Applied("dir", "dir"))
    assert s.look(b"a/b").kind is Kind.DIR


def test_an_op_that_needs_the_name_of_a_removed_directory(s: Session) -> None:
    """In one batch: the marker that goes at its end is not what was put in its place."""
    s.apply(Mkdir(b"x", DIR_ATTRS))
    put = s.put_op(b"x/f", b"inside")
    s.apply(put)
    token = s.look(b"x/f").token
    s.apply(
        Remove(b"x/f", Kind.FILE, token),
        Remove(b"x", Kind.DIR, "dir"),
        s.put_op(b"x", b"a file now"),
    )
    assert s.rig.foreign_read(b"x") == b"a file now"
    token = s.look(b"x").token
    s.apply(Remove(b"x", Kind.FILE, token), Mkdir(b"x", DIR_ATTRS), s.put_op(b"x/f", b"again"))
    assert s.names(b"x") == {b"f"}
    assert s.rig.conflicts() == []


# -- others --------------------------------------------------------------------------------------


def test_W3_an_object_in_the_place_of_a_directory_above(s: Session) -> None:
    """Both can be in a bucket: then nothing of theirs is lost, whatever is shown."""
    s.rig.foreign_write(b"a", b"theirs")
    s.put(b"a/b/f", b"ours")
    assert s.rig.foreign_read(b"a/b/f") == b"ours"
    assert s.rig.foreign_read(b"a") == b"theirs" or s.rig.conflicts() == [b"theirs"]
    assert s.look(b"a").kind is Kind.DIR


def test_W3_somebody_replaces_it_just_before_we_do(probed: Session) -> None:
    """If-Match and If-None-Match leave no gap."""
    s = probed
    first = s.put(b"f", b"one")
    op, pending = s.put_op(b"f", b"two", first.token), [b"theirs 1", b"theirs 2"]

    def hook(what: str) -> None:
        if what.startswith("publishing") and pending:
            s.rig.foreign_write(b"f", pending.pop(0))

    with requests(hook):
        assert s.apply(op)[0].conflict
    assert s.rig.foreign_read(b"f") == b"two"
    assert sorted(s.rig.conflicts()) == [b"theirs 1", b"theirs 2"]


def test_W3_metadata_of_what_is_kept_is_kept(s: Session) -> None:
    place = bucket_of(s)
    place.write(b"f", b"theirs", Metadata={"mtime": "1234.5"}, ContentType="text/plain")
    assert s.put(b"f", b"ours").conflict
    (kept,) = place.own("conflicts")
    head = place.client.head_object(Bucket=place.bucket, Key=place.key(kept))
    assert head["Metadata"]["mtime"] == "1234.5"
    assert head["ContentType"] == "text/plain"


@pytest.mark.parametrize("size", [10, LEAST_PART + 5])
def test_an_answer_that_got_lost_is_no_conflict(s: Session, size: int) -> None:
    """The object that is there is ours, from the try before."""
    op, link = s.put_op(b"d/f", blob(size)), Link(b"d/l", b"f", ATTRS, None)
    first = s.apply(op, link)
    again = fresh(s)
    assert again.apply(op, link) == first
    assert s.rig.conflicts() == []


def test_a_lost_answer_of_complete_is_found_out_by_looking(s: Session) -> None:
    op = s.put_op(b"f", blob(LEAST_PART + 5))
    real = Store.run

    def run(self: Store, what: str, job: Callable[[Any], Any]) -> Any:
        value = real(self, what, job)
        if what.startswith("publishing"):
            raise TierError(Trouble.DOWN, "no answer")
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "run", run)
        applied = s.apply(op)[0]
    assert (applied.ident, applied.conflict) == (op.upload.ident, False)
    assert s.rig.foreign_read(b"f") == blob(LEAST_PART + 5)
    assert bucket_of(s).uploads() == []


def test_an_upload_is_not_published_under_another_name(s: Session) -> None:
    upload, digests, version = s.send(blob(100), b"f")
    assert trouble(s.tier.apply([Put(b"g", upload, 100, ATTRS, digests, None, version)])) is Trouble.REDO
    assert s.tier.stat(b"g") is None


def test_a_part_that_was_sent_twice(s: Session) -> None:
    op = s.put_op(b"f", blob(LEAST_PART + 5))
    source = s.stage(blob(LEAST_PART + 5))
    s.tier.send(op.upload, 0, replace(source, length=LEAST_PART))
    s.apply(op)
    assert s.rig.foreign_read(b"f") == blob(LEAST_PART + 5)


def test_attributes_newer_than_the_upload(s: Session) -> None:
    upload, digests, version = s.send(blob(LEAST_PART + 5))
    attrs = replace(ATTRS, mode=0o600, mtime_ns=ATTRS.mtime_ns + 1)
    put = Put(b"f", upload, LEAST_PART + 5, attrs, digests, None, version)
    applied = s.apply(put)[0]
    assert s.look(b"f").attrs == attrs
    assert s.tier.digests(b"f", applied.token) == digests
    assert fresh(s).apply(put)[0] == applied


def test_the_same_bytes_again_have_their_own_attributes(s: Session) -> None:
    """Their ETag is the same, so a record of late attributes would be about both."""
    first = s.put(b"f", b"")
    late = replace(ATTRS, mode=0o400)
    s.apply(SetAttrs(b"f", Kind.FILE, late, first.token))
    assert s.look(b"f").attrs.mode == 0o400
    second = s.put(b"f", b"", first.token)
    assert second.token == first.token
    assert s.look(b"f").attrs == ATTRS
    s.apply(SetAttrs(b"f", Kind.FILE, late, first.token), Remove(b"f", Kind.FILE, first.token))
    s.put(b"f", b"")
    assert s.look(b"f").attrs == ATTRS


def test_records_of_what_is_gone_go_too(s: Session) -> None:
    big, small = s.put(b"d/big", blob(LEAST_PART + 5)), s.put(b"d/small", b"small")
    change = [SetAttrs(b"d/small", Kind.FILE, replace(ATTRS, mode=0o600), small.token)]
    s.apply(*change)
    s.apply(Remove(b"d/big", Kind.FILE, big.token), Remove(b"d/small", Kind.FILE, small.token))
    assert not [key for key in own(s) if "manifests" in key or "uploads" in key or key.endswith("small")]


def test_many_changes_of_attributes_at_once(s: Session) -> None:
    tokens = [s.put(b"f%d" % n, b"%d" % n).token for n in range(5)]
    s.rig.foreign_write(b"f2", b"theirs")
    late = replace(ATTRS, mode=0o600)
    answers = s.apply(
        *[SetAttrs(b"f%d" % n, Kind.FILE, late, tokens[n]) for n in range(5)],
        SetAttrs(b"f0", Kind.FILE, replace(ATTRS, mode=0o640), tokens[0]),
    )
    assert [answer.conflict for answer in answers] == [False, False, True, False, False, False]
    assert [s.look(b"f%d" % n).attrs.mode for n in (0, 1, 3)] == [0o640, 0o600, 0o600]


def test_a_tier_that_is_another_one_is_down(s: Session) -> None:
    place = bucket_of(s)
    tier = S3Tier(
        place.bucket,
        place.prefix.encode(),
        "0000-mount",
        url="s3://x",
        options={
            "endpoint_url": store_of(s).run("", lambda client: client.meta.endpoint_url),
            "tier_id": "no",
        },
    )
    for call in (lambda: tier.stat(b"f"), lambda: tier.apply([]), lambda: tier.listdir(b"")):
        with pytest.raises(TierError) as caught:
            call()
        assert caught.value.trouble is Trouble.DOWN


def test_a_file_may_take_the_place_of_what_remains_of_a_directory(s: Session) -> None:
    """SeaweedFS keeps a directory after its last object is gone, unseen by listings."""
    s.rig.foreign_write(b"x/y/z", b"theirs")
    s.rig.foreign_remove(b"x")
    s.put(b"x", b"small")
    assert s.rig.foreign_read(b"x") == b"small"
    s.rig.foreign_write(b"big/y/z", b"theirs")
    s.rig.foreign_remove(b"big")
    s.put(b"big", blob(LEAST_PART + 5))
    s.rig.foreign_write(b"moved/y/z", b"theirs")
    s.rig.foreign_remove(b"moved")
    s.apply(Move(b"x", b"moved", Kind.FILE, s.look(b"x").ident, None))
    assert s.names() == {b"big", b"moved"}
    assert s.rig.conflicts() == []
