"""The contract of `ckptfs.tiers.base.Tier`, as tests that run on any tier.

A tier plugs in by subclassing `TierContract` with a fixture `rig` that gives a `Rig`: how to open
the tier, and how a stranger without ckptfs reads and writes the same place. Capabilities that a
kind of storage cannot have are switched off by flags, never by skipping unknown failures.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from rig import ATTRS, CHUNK, DIR_ATTRS, Rig, Session, blob, draft, trouble

from ckptfs.tiers.base import (
    RESERVED,
    Applied,
    Digest,
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Put,
    Remove,
    SetAttrs,
    Source,
    TierError,
    Trouble,
)


class TierContract:
    """Subclass and provide the fixture `rig`."""

    @pytest.fixture
    def s(self, rig: Rig) -> Session:
        return Session(rig)

    # -- probe -----------------------------------------------------------------------------------

    def test_probe_gives_the_same_identity_every_time_and_leaves_nothing(self, s: Session) -> None:
        first, second = s.tier.probe(), s.rig.open().probe()
        assert first.tier_id
        assert first.tier_id == second.tier_id
        assert s.names() == set()
        assert s.tier.sweep(frozenset()) == 0

    def test_space_is_plausible(self, s: Session) -> None:
        space = s.tier.space()
        assert space.total >= space.free >= 0

    # -- uploads ---------------------------------------------------------------------------------

    @pytest.mark.parametrize(("chunks", "more"), [(0, 0), (0, 1), (0, 4097), (1, 0), (3, 12345)])
    def test_what_is_published_is_what_was_staged(self, s: Session, chunks: int, more: int) -> None:
        data = blob(size := chunks * s.chunk + more)
        applied = s.put(b"run/step/model.pt", data)
        assert not applied.conflict
        assert s.rig.foreign_read(b"run/step/model.pt") == data
        found = s.look(b"run/step/model.pt")
        assert (found.kind, found.size) == (Kind.FILE, size)
        assert (found.token, found.ident) == (applied.token, applied.ident)
        assert s.tier.read(b"run/step/model.pt", applied.token, 0, size) == data

    def test_send_returns_the_digest_of_the_window(self, s: Session) -> None:
        data = blob(2 * s.chunk)
        upload = s.tier.begin(draft("w1", b"", len(data), s.chunk))
        at = 1000 if s.rig.any_offset else s.chunk
        source = replace(s.stage(data), offset=at, length=s.chunk)
        assert s.tier.send(upload, at, source) == xxhash.xxh3_128_digest(data[at : at + s.chunk])

    def test_bytes_come_from_ram_and_from_the_spill_file(self, s: Session) -> None:
        data, extent = blob(5 * CHUNK + 17), CHUNK
        ram, spill = bytearray(data), bytearray(len(data))
        spilled = frozenset({1, 3, 5})
        for index in spilled:
            window = slice(index * extent, min((index + 1) * extent, len(data)))
            spill[window] = data[window]
            ram[window] = bytes(len(data[window]))
        source = replace(
            s.stage(bytes(ram)), spill_path=s.stage(bytes(spill)).ram_path, extent=extent, spilled=spilled
        )
        upload = s.tier.begin(draft("sp1", b"", len(data)))
        assert s.tier.send(upload, 0, source) == xxhash.xxh3_128_digest(data)
        s.apply(Put(b"f", upload, len(data), ATTRS, (), None, "sp1"))
        assert s.rig.foreign_read(b"f") == data

    def test_holes_of_the_staging_file_read_as_zeros(self, s: Session) -> None:
        path = s.rig.staging / "sparse"
        with open(path, "wb") as file:
            file.truncate(8 * CHUNK)
            file.seek(3 * CHUNK + 5)
            file.write(b"island")
        data = path.read_bytes()
        upload = s.tier.begin(draft("h1", b"", len(data), name=b"sparse"))
        assert s.tier.send(upload, 0, Source(str(path), 0, len(data))) == xxhash.xxh3_128_digest(data)
        s.apply(Put(b"sparse", upload, len(data), ATTRS, (), None, "h1"))
        assert s.rig.foreign_read(b"sparse") == data

    def test_an_upload_is_seen_by_nobody_before_it_is_published(self, s: Session) -> None:
        s.put(b"d/old", b"old")
        s.send(blob(CHUNK), b"d/f")
        assert s.names() == {b"d"}
        assert s.names(b"d") == {b"old"}

    def test_begin_again_starts_over(self, s: Session) -> None:
        first = s.tier.begin(draft("again", b"", 10))
        s.tier.send(first, 0, s.stage(b"0123456789"))
        second = s.tier.begin(draft("again", b"", 3))
        s.tier.send(second, 0, s.stage(b"abc"))
        s.apply(Put(b"f", second, 3, ATTRS, (), None, "again"))
        assert s.rig.foreign_read(b"f") == b"abc"

    def test_small_files_go_together(self, s: Session) -> None:
        contents = [blob(n * 37, n) for n in range(s.rig.small)]
        batch = [
            (draft(f"small{n}", b"d", len(data), name=b"f%d" % n), s.stage(data))
            for n, data in enumerate(contents)
        ]
        sent = s.tier.send_small(batch)
        assert [digest for _, digest in sent] == [xxhash.xxh3_128_digest(data) for data in contents]
        ops = [
            Put(b"d/f%d" % n, upload, len(data), ATTRS, (Digest(0, len(data), digest),), None, f"small{n}")
            for n, (data, (upload, digest)) in enumerate(zip(contents, sent, strict=True))
        ]
        assert s.names() == set()
        s.apply(*ops)
        assert len(s.names(b"d")) == s.rig.small
        assert all(s.rig.foreign_read(b"d/f%d" % n) == data for n, data in enumerate(contents))

    def test_a_lost_upload_is_to_be_redone(self, s: Session) -> None:
        upload, digests, version = s.send(blob(CHUNK))
        s.tier.abandon([upload])
        with pytest.raises(TierError) as caught:
            s.tier.send(upload, 0, s.stage(b"x"))
        assert caught.value.trouble is Trouble.REDO
        outcome = s.tier.apply([Put(b"f", upload, CHUNK, ATTRS, digests, None, version)])
        assert trouble(outcome) is Trouble.REDO
        assert s.names() == set()

    def test_an_upload_of_the_wrong_size_is_to_be_redone(self, s: Session) -> None:
        upload, _, version = s.send(b"12345")
        assert trouble(s.tier.apply([Put(b"f", upload, 6, ATTRS, (), None, version)])) is Trouble.REDO
        assert s.tier.stat(b"f") is None

    @pytest.mark.parametrize("present", [True, False])
    def test_a_short_or_missing_staging_file_is_named(self, s: Session, present: bool) -> None:
        source = s.stage(b"12345")
        if not present:
            os.unlink(source.ram_path)
        upload = s.tier.begin(draft("short", b"", 10))
        with pytest.raises(TierError) as caught:
            s.tier.send(upload, 0, replace(source, length=10))
        assert caught.value.trouble is Trouble.REDO
        assert source.ram_path in str(caught.value)

    def test_abandon_leaves_what_is_published(self, s: Session) -> None:
        op = s.put_op(b"f", b"data")
        s.apply(op)
        s.tier.abandon([op.upload])
        assert s.rig.foreign_read(b"f") == b"data"

    def test_sweep_removes_all_but_the_kept(self, s: Session) -> None:
        kept, digests, version = s.send(b"kept")
        gone, _, _ = s.send(b"gone")
        s.send(b"gone too")
        s.put(b"published", b"p")
        assert s.tier.sweep(frozenset({kept.handle})) == 2
        assert s.tier.sweep(frozenset({kept.handle})) == 0
        s.apply(Put(b"f", kept, 4, ATTRS, digests, None, version))
        with pytest.raises(TierError):
            s.tier.send(gone, 0, s.stage(b"gone"))
        assert s.names() == {b"f", b"published"}

    # -- publishing ------------------------------------------------------------------------------

    def test_attributes_travel_with_the_put(self, s: Session) -> None:
        s.put(b"f", b"data")
        attrs = s.look(b"f").attrs
        assert (attrs.uid, attrs.gid) == (ATTRS.uid, ATTRS.gid)
        if s.rig.exact_mode:
            assert attrs.mode == ATTRS.mode
        if s.rig.ns_times:
            assert attrs.mtime_ns == ATTRS.mtime_ns

    def test_replacing_what_we_know_is_no_conflict(self, s: Session) -> None:
        first = s.put(b"f", b"one")
        second = s.put(b"f", b"two", first.token)
        assert not second.conflict
        assert first.token != second.token
        assert s.rig.foreign_read(b"f") == b"two"
        assert s.rig.conflicts() == []

    def test_W3_a_foreign_object_is_kept_and_ours_applied(self, s: Session) -> None:
        first = s.put(b"f", b"one")
        s.rig.foreign_write(b"f", b"theirs")
        assert s.put(b"f", b"two", first.token).conflict
        assert s.rig.foreign_read(b"f") == b"two"
        assert s.rig.conflicts() == [b"theirs"]

    def test_W3_an_object_nobody_told_us_of_is_kept(self, s: Session) -> None:
        s.rig.foreign_write(b"f", b"theirs")
        assert s.put(b"f", b"ours").conflict
        assert s.rig.conflicts() == [b"theirs"]
        assert s.names() == {b"f"}

    def test_W3_a_directory_where_a_file_goes_is_kept(self, s: Session) -> None:
        s.rig.foreign_write(b"f/inside", b"theirs")
        assert s.put(b"f", b"ours").conflict
        assert s.rig.foreign_read(b"f") == b"ours"

    def test_put_over_an_object_that_vanished(self, s: Session) -> None:
        first = s.put(b"f", b"one")
        s.rig.foreign_remove(b"f")
        assert not s.put(b"f", b"two", first.token).conflict
        assert s.rig.foreign_read(b"f") == b"two"

    def test_put_recreates_a_directory_that_was_removed(self, s: Session) -> None:
        s.apply(Mkdir(b"run", DIR_ATTRS))
        op = s.put_op(b"run/step/f", b"data")
        s.rig.foreign_remove(b"run")
        s.apply(op)
        assert s.rig.foreign_read(b"run/step/f") == b"data"

    def test_put_is_idempotent(self, s: Session) -> None:
        op = s.put_op(b"d/f", blob(CHUNK))
        first, second = s.apply(op)[0], s.apply(op)[0]
        assert first == second
        assert s.rig.conflicts() == []

    def test_put_again_after_its_upload_and_target_are_gone(self, s: Session) -> None:
        upload, digests, version = s.send(b"data")
        op = Put(b"f", upload, 4, ATTRS, digests, None, version)
        s.apply(op)
        s.rig.foreign_remove(b"f")
        assert trouble(s.tier.apply([op])) is Trouble.REDO

    def test_a_batch_stops_at_the_first_failure(self, s: Session) -> None:
        lost, _, _ = s.send(b"lost", b"lost")
        s.tier.abandon([lost])
        good, later = s.put_op(b"good", b"g"), s.put_op(b"later", b"l")
        outcome = s.tier.apply([good, Put(b"lost", lost, 4, ATTRS, (), None), later])
        assert len(outcome.applied) == 1
        assert trouble(outcome) is Trouble.REDO
        assert s.names() == {b"good"}
        s.apply(later)

    def test_links(self, s: Session) -> None:
        link = Link(b"d/latest", b"step_100/\xff", replace(ATTRS, mode=0o777), None)
        applied = s.apply(link)[0]
        found = s.look(b"d/latest")
        assert (found.kind, found.target, found.token) == (Kind.LINK, b"step_100/\xff", applied.token)
        assert s.apply(link)[0].token == applied.token
        moved = s.apply(replace(link, target=b"step_200", expected=applied.token))[0]
        assert not moved.conflict
        assert moved.token != applied.token
        assert s.look(b"d/latest").target == b"step_200"
        assert s.rig.conflicts() == []

    def test_a_file_replaces_a_link_and_a_link_a_file(self, s: Session) -> None:
        link = s.apply(Link(b"x", b"t", ATTRS, None))[0]
        file = s.put(b"x", b"data", link.token)
        assert not file.conflict
        again = s.apply(Link(b"x", b"t2", ATTRS, file.token))[0]
        assert not again.conflict
        assert s.look(b"x").kind is Kind.LINK

    # -- directories -----------------------------------------------------------------------------

    def test_mkdir_makes_and_adopts(self, s: Session) -> None:
        made = s.apply(Mkdir(b"a/b", DIR_ATTRS))[0]
        again = s.apply(Mkdir(b"a/b", replace(DIR_ATTRS, mode=0o700)))[0]
        assert (made.token, made.ident) == (again.token, again.ident)
        assert not again.conflict
        found = s.look(b"a/b")
        assert found.kind is Kind.DIR
        if s.rig.exact_mode:
            assert found.attrs.mode == 0o700
        s.rig.foreign_mkdir(b"theirs")
        assert not s.apply(Mkdir(b"theirs", DIR_ATTRS))[0].conflict

    def test_mkdir_over_a_foreign_file_keeps_it(self, s: Session) -> None:
        s.rig.foreign_write(b"d", b"theirs")
        assert s.apply(Mkdir(b"d", DIR_ATTRS))[0].conflict
        assert s.look(b"d").kind is Kind.DIR
        assert s.rig.conflicts() == [b"theirs"]

    def test_a_directory_token_does_not_change_with_its_content(self, s: Session) -> None:
        token = s.apply(Mkdir(b"d", DIR_ATTRS))[0].token
        s.put(b"d/f", b"data")
        assert s.look(b"d").token == token

    def test_W4_removing_a_directory_leaves_others_files(self, s: Session) -> None:
        made = s.apply(Mkdir(b"d", DIR_ATTRS))[0]
        s.rig.foreign_write(b"d/theirs", b"t")
        s.apply(Remove(b"d", Kind.DIR, made.token))
        assert s.rig.foreign_read(b"d/theirs") == b"t"
        s.rig.foreign_remove(b"d/theirs")
        s.apply(Remove(b"d", Kind.DIR, made.token))
        assert s.tier.stat(b"d") is None

    def test_listing_what_is_no_directory(self, s: Session) -> None:
        s.put(b"f", b"data")
        for path, code in ((b"none", errno.ENOENT), (b"f", errno.ENOTDIR), (b"f/x", errno.ENOTDIR)):
            with pytest.raises(TierError) as caught:
                s.tier.listdir(path)
            assert (caught.value.trouble, caught.value.errno) == (Trouble.CHANGED, code)
        assert s.tier.stat(b"none/x") is None
        assert s.tier.stat(b"f/x") is None

    def test_the_root_is_a_directory(self, s: Session) -> None:
        found = s.look(b"")
        assert (found.kind, found.name) == (Kind.DIR, b"")

    def test_listdir_and_stat_agree(self, s: Session) -> None:
        s.put(b"d/f", b"data")
        s.apply(Mkdir(b"d/e", DIR_ATTRS), Link(b"d/l", b"f", ATTRS, None))
        listed = {found.name: found for found in s.tier.listdir(b"d")}
        assert set(listed) == {b"f", b"e", b"l"}
        for name, found in listed.items():
            seen = s.look(b"d/" + name)
            # An access time may move by looking.
            assert replace(seen, attrs=replace(seen.attrs, atime_ns=0)) == replace(
                found, attrs=replace(found.attrs, atime_ns=0)
            )

    # -- removing --------------------------------------------------------------------------------

    def test_remove(self, s: Session) -> None:
        applied = s.put(b"d/f", b"data")
        remove = Remove(b"d/f", Kind.FILE, applied.token)
        assert s.apply(remove) == [Applied()]
        assert s.tier.stat(b"d/f") is None
        assert s.apply(remove) == [Applied()]
        assert s.apply(Remove(b"no/such/dir", Kind.FILE, "x")) == [Applied()]

    def test_W3_remove_leaves_what_another_writer_put_there(self, s: Session) -> None:
        applied = s.put(b"f", b"ours")
        s.rig.foreign_write(b"f", b"theirs, longer")
        assert s.apply(Remove(b"f", Kind.FILE, applied.token)) == [Applied(conflict=True)]
        assert s.rig.foreign_read(b"f") == b"theirs, longer"

    # -- moving ----------------------------------------------------------------------------------

    def test_move_a_file(self, s: Session) -> None:
        if not s.rig.moves:
            pytest.skip("this tier does not rename")
        data = blob(s.chunk + 5)
        applied = s.put(b"a/f", data)
        move = Move(b"a/f", b"b/g", Kind.FILE, applied.ident, None)
        moved = s.apply(move)[0]
        assert s.rig.foreign_read(b"b/g") == data
        assert s.tier.stat(b"a/f") is None
        assert [item.length for item in s.tier.digests(b"b/g", moved.token)] == [s.chunk, 5]
        assert s.apply(move)[0] == moved

    def test_move_over_a_known_object(self, s: Session) -> None:
        if not s.rig.moves:
            pytest.skip("this tier does not rename")
        old, new = s.put(b"last.ckpt", b"old"), s.put(b"last.tmp", b"new")
        moved = s.apply(Move(b"last.tmp", b"last.ckpt", Kind.FILE, new.ident, old.token))[0]
        assert not moved.conflict
        assert s.rig.foreign_read(b"last.ckpt") == b"new"
        assert s.names() == {b"last.ckpt"}

    def test_W3_move_over_a_foreign_object_keeps_it(self, s: Session) -> None:
        if not s.rig.moves:
            pytest.skip("this tier does not rename")
        new = s.put(b"last.tmp", b"new")
        s.rig.foreign_write(b"last.ckpt", b"theirs")
        assert s.apply(Move(b"last.tmp", b"last.ckpt", Kind.FILE, new.ident, None))[0].conflict
        assert s.rig.foreign_read(b"last.ckpt") == b"new"
        assert s.rig.conflicts() == [b"theirs"]

    def test_move_a_tree(self, s: Session) -> None:
        if not s.rig.moves:
            pytest.skip("this tier does not rename")
        s.put(b"tmp/a/f", b"1")
        s.put(b"tmp/g", b"2")
        ident = s.look(b"tmp").ident
        empty = s.apply(Mkdir(b"step", DIR_ATTRS))[0]
        move = Move(b"tmp", b"step", Kind.DIR, ident, empty.token)
        moved = s.apply(move)[0]
        assert not moved.conflict
        assert s.rig.foreign_read(b"step/a/f") == b"1"
        assert s.names(b"step") == {b"a", b"g"}
        assert s.names() == {b"step"}
        assert s.apply(move)[0] == moved

    def test_move_of_what_somebody_removed(self, s: Session) -> None:
        if not s.rig.moves:
            pytest.skip("this tier does not rename")
        applied = s.put(b"f", b"data")
        s.rig.foreign_remove(b"f")
        assert s.apply(Move(b"f", b"g", Kind.FILE, applied.ident, None)) == [Applied(conflict=True)]
        assert s.names() == set()

    def test_a_whole_batch_may_come_again(self, s: Session) -> None:
        """A crash after the tier did it and before the journal knew."""
        if not s.rig.moves:
            pytest.skip("this tier does not rename")
        made, put1 = Mkdir(b"d", DIR_ATTRS), s.put_op(b"d/f", b"one")
        ops: list[Op] = [made, put1]
        first = s.apply(*ops)
        ident = first[1].ident
        more: list[Op] = [
            Move(b"d/f", b"d/g", Kind.FILE, ident, None),
            s.put_op(b"d/f", b"two"),
            Move(b"d", b"e", Kind.DIR, first[0].ident, None),
            Mkdir(b"d", DIR_ATTRS),
            s.put_op(b"d/f", b"three"),
            Link(b"latest", b"d/f", ATTRS, None),
        ]
        s.apply(*more)
        expected = {b"e/g": b"one", b"e/f": b"two", b"d/f": b"three"}
        for batch in (more, more, [*ops, *more]):
            s.apply(*batch)
            assert {path: s.rig.foreign_read(path) for path in expected} == expected
            assert s.names() == {b"d", b"e", b"latest"}
            assert s.names(b"d") == {b"f"}
            assert s.names(b"e") == {b"f", b"g"}
            assert s.rig.conflicts() == []

    # -- attributes ------------------------------------------------------------------------------

    def test_late_attributes_keep_the_content_verified(self, s: Session) -> None:
        data = blob(CHUNK)
        applied = s.put(b"f", data)
        later = replace(ATTRS, mode=0o444, mtime_ns=ATTRS.mtime_ns + 5_000_000_000)
        change = SetAttrs(b"f", Kind.FILE, later, applied.token)
        changed = s.apply(change)[0]
        assert not changed.conflict
        attrs = s.look(b"f").attrs
        assert attrs.mtime_ns == later.mtime_ns
        if s.rig.exact_mode:
            assert attrs.mode == 0o444
        assert s.tier.digests(b"f", changed.token)
        assert s.look(b"f").token == changed.token
        # again, as after a crash before the journal knew the new token
        assert s.apply(change)[0] == changed
        assert s.tier.digests(b"f", changed.token)

    def test_late_attributes_of_links_directories_and_nothing(self, s: Session) -> None:
        link = s.apply(Link(b"l", b"nowhere", ATTRS, None))[0]
        made = s.apply(Mkdir(b"d", DIR_ATTRS))[0]
        later = replace(DIR_ATTRS, mtime_ns=1_111_000_000_000)
        applied = s.apply(
            SetAttrs(b"l", Kind.LINK, later, link.token),
            SetAttrs(b"d", Kind.DIR, later, made.token),
            SetAttrs(b"none", Kind.FILE, later, "x"),
        )
        assert applied == [Applied(link.token, link.ident), Applied(made.token, made.ident), Applied()]
        assert s.look(b"l").attrs.mtime_ns == later.mtime_ns
        assert s.look(b"d").attrs.mtime_ns == later.mtime_ns

    def test_W3_attributes_of_a_foreign_object_stay(self, s: Session) -> None:
        applied = s.put(b"f", b"ours")
        s.rig.foreign_write(b"f", b"theirs, longer")
        before = s.look(b"f")
        assert s.apply(SetAttrs(b"f", Kind.FILE, replace(ATTRS, mode=0o600), applied.token))[0].conflict
        assert s.look(b"f").token == before.token
        assert s.look(b"f").attrs.mode == before.attrs.mode

    # -- reading ---------------------------------------------------------------------------------

    def test_digests_are_those_sent(self, s: Session) -> None:
        op = s.put_op(b"f", blob(2 * s.chunk + 9))
        applied = s.apply(op)[0]
        assert s.tier.digests(b"f", applied.token) == op.digests
        assert s.tier.digests(b"f", "other") == ()
        assert s.tier.digests(b"none", applied.token) == ()

    def test_a_foreign_object_is_unverified(self, s: Session) -> None:
        s.put(b"f", b"ours")
        s.rig.foreign_write(b"f", b"data")
        token = s.look(b"f").token
        assert s.tier.digests(b"f", token) == ()
        assert s.tier.read(b"f", token, 0, 10) == b"data"

    @pytest.mark.parametrize(
        ("where", "count"),
        [
            ((0, 0), (4, 0)),
            ((1, -7), (1, 14)),
            ((0, 0), (100, 0)),
            ((2, 0), (1, 0)),
            ((9, 0), (0, 5)),
            ((0, 0), (0, 0)),
        ],
        ids=lambda pair: f"{pair[0]}{pair[1]:+}",
    )
    def test_fetch_and_read_ranges(self, s: Session, where: tuple[int, int], count: tuple[int, int]) -> None:
        """Both in chunks and bytes more."""
        offset, length = (chunks * s.chunk + more for chunks, more in (where, count))
        data = blob(3 * s.chunk + 100)
        token = s.put(b"f", data).token
        part = data[offset : offset + length]
        assert s.tier.read(b"f", token, offset, length) == part
        into = s.local()
        os.truncate(into, len(data))
        assert s.tier.fetch(b"f", token, offset, length, into) == len(part)
        expected = bytearray(len(data))
        expected[offset : offset + len(part)] = part
        assert Path(into).read_bytes() == bytes(expected)

    def test_fetch_of_holes_overwrites_old_bytes(self, s: Session) -> None:
        data = b"\1" * CHUNK + bytes(2 * CHUNK) + b"\2" * CHUNK
        upload, digests, version = s.send(data)
        applied = s.apply(Put(b"f", upload, len(data), ATTRS, digests, None, version))[0]
        into = s.local(b"\xff" * len(data))
        assert s.tier.fetch(b"f", applied.token, 0, len(data), into) == len(data)
        assert Path(into).read_bytes() == data

    def test_reading_what_changed(self, s: Session) -> None:
        token = s.put(b"f", b"data").token
        s.rig.foreign_write(b"f", b"other data")
        for path in (b"f", b"none"):
            with pytest.raises(TierError) as caught:
                s.tier.read(path, token, 0, 4)
            assert caught.value.trouble is Trouble.CHANGED
            with pytest.raises(TierError) as caught:
                s.tier.fetch(path, token, 0, 4, s.local())
            assert caught.value.trouble is Trouble.CHANGED

    def test_a_flipped_bit_is_corruption(self, s: Session) -> None:
        if s.rig.in_place is None:
            pytest.skip("this tier cannot be changed in place")
        data = blob(3 * s.chunk)
        token = s.put(b"f", data).token
        s.rig.in_place(b"f", s.chunk + 10, bytes([data[s.chunk + 10] ^ 1]))
        for read in (
            lambda: s.tier.read(b"f", token, 0, len(data)),
            lambda: s.tier.fetch(b"f", token, 0, len(data), s.local(bytes(len(data)))),
        ):
            with pytest.raises(TierError) as caught:
                read()
            assert (caught.value.trouble, caught.value.errno) == (Trouble.CORRUPT, errno.EIO)
        # Chunks that are whole are still given.
        assert s.tier.read(b"f", token, 0, s.chunk) == data[: s.chunk]

    # -- names -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("path", [b"/f", b"a//b", b"a/", b"../f", b"a/./b", RESERVED, RESERVED + b"/x"])
    def test_paths_that_are_none_are_refused(self, s: Session, path: bytes) -> None:
        upload, _, _ = s.send(b"x")
        outcome = s.tier.apply([Put(path, upload, 1, ATTRS, (), None)])
        assert trouble(outcome) is Trouble.REFUSED
        assert s.names() == set()

    def test_reserved_names_do_not_exist(self, s: Session) -> None:
        assert s.tier.stat(RESERVED) is None
        assert s.tier.stat(RESERVED + b"/tier-id") is None
        assert RESERVED not in s.names()
