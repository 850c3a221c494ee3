"""The rules by example (docs: RULES R, W; invariants of DESIGN). Each test is one sentence."""

from __future__ import annotations

import errno
import random

import pytest

from ckptfs.core import EntryKind
from ckptfs.core.content import MAX_CHUNKS, MIB
from ckptfs.core.plan import SMALL, Begin, Chunk, Small
from ckptfs.tiers.base import Kind, Put, Remove

from .world import Handle, World


@pytest.fixture
def w() -> World:
    return World()


def save(w: World, path: bytes, cells: int = 1) -> None:
    """Create or rewrite a file and close it."""
    h = w.open(path, trunc=True) if path in w.walk() else w.create(path)
    if cells:
        w.write(h, 0, cells)
    w.close(h)


def send(w: World) -> None:
    """Send all bytes, publish nothing."""
    while w.plan(64, hurry=True):
        while w.jobs:
            w.do_job(w.jobs[0])


def publish(w: World, limit: int = 64) -> None:
    """One round of the publisher."""
    assert w.publish_take(limit)
    w.round_apply()
    w.round_answer()
    w.check()


def refuse(w: World) -> None:
    """The tier refuses the head of the log for good."""
    send(w)
    assert w.publish_take(1)
    w.round_apply("refuse")
    w.round_answer()


def tier_files(w: World) -> dict[bytes, tuple[int, ...]]:
    return {p: o.cells for p, o in w.tier.visible().items() if o.kind == Kind.FILE}


def tier_names(w: World) -> set[bytes]:
    return set(w.tier.visible())


def log(w: World) -> list[tuple[str, bytes]]:
    return [(e.kind.name, e.path()) for e in w.core.state.log.values()]


def finish(w: World) -> None:
    """Everything gets to the tier, which then is the mount."""
    w.drain()
    w.check_drained()


# -- R2, R3, R4 --------------------------------------------------------------------------------


def test_r2_names_appear_in_the_order_in_which_files_were_finished(w: World) -> None:
    names = [b"shard0", b"shard1", b".metadata", b"latest"]
    for name in names:
        save(w, name, cells=2)
        w.now += 5
    w.plan(64)
    for job in reversed(list(w.jobs)):
        w.do_job(job)
    send(w)
    for n in range(len(names)):
        publish(w, limit=1)
        assert tier_names(w) == set(names[: n + 1])


def test_r2_bytes_that_came_early_do_not_make_a_name_appear(w: World) -> None:
    save(w, b"big", cells=3)
    save(w, b"small")
    w.now += 5
    w.plan(1)
    assert [type(j) for j in w.jobs] == [Begin]
    w.plan(64)
    (small,) = [j for j in w.jobs if isinstance(j, Small)]
    w.do_job(small)
    assert not w.publish_take()
    assert tier_names(w) == set()
    w.check()


def test_r3_a_removal_waits_for_what_was_logged_before_it(w: World) -> None:
    save(w, b"old")
    finish(w)
    save(w, b"new")
    w.unlink(b"old")
    assert not w.removals_take()
    send(w)
    publish(w)
    assert tier_names(w) == {b"old", b"new"}
    assert w.removals_take()
    w.round_apply()
    w.round_answer()
    assert tier_names(w) == {b"new"}


def test_r3_rotation_never_lets_the_tier_without_a_checkpoint(w: World) -> None:
    """put(100) unlink(0) put(200) unlink(100): cancelling 100 would let 0 go before 200 exists."""
    save(w, b"0", cells=2)
    finish(w)
    save(w, b"100", cells=2)
    w.now += 5
    w.unlink(b"0")
    save(w, b"200", cells=2)
    w.plan(1)  # a byte of 100 is on its way
    w.now += 5
    w.unlink(b"100")
    assert [k for k, _ in log(w)] == ["PUT", "PUT"]
    send(w)
    seen = [tier_names(w)]
    while not w.core.order.settled:
        for take in (w.publish_take, w.removals_take, w.attrs_take):
            if take(1):
                w.round_apply()
                w.round_answer()
                w.check()
                seen.append(tier_names(w))
        assert seen[-1], "there is no checkpoint on the tier"
    assert [{b"0"}, {b"0", b"100"}, {b"100"}, {b"100", b"200"}, {b"200"}] == [
        s for i, s in enumerate(seen) if i == 0 or s != seen[i - 1]
    ]


def test_r3_rotation_faster_than_the_tier_keeps_the_removal_behind_the_dropped_file(w: World) -> None:
    save(w, b"0")
    finish(w)
    save(w, b"100")
    w.unlink(b"0")
    w.unlink(b"100")  # within the settle time: dropped, and the removal of 0 moves with it
    save(w, b"200")
    assert log(w) == [("PUT", b"200")]
    grave = next(iter(w.core.state.graves.values()))
    assert grave.path() == b"0"
    finish(w)
    assert tier_names(w) == {b"200"}


def test_r3_a_name_removed_and_written_again_is_overwritten_and_never_missing(w: World) -> None:
    save(w, b"f")
    finish(w)
    w.unlink(b"f")
    save(w, b"f")
    assert not w.removals_take()
    send(w)
    assert w.publish_take()
    assert w.round is not None
    (op,) = w.round.ops
    assert isinstance(op, Put)
    there = w.tier.at(b"f")
    assert there is not None
    assert op.expected == there.token
    w.round_apply()
    w.round_answer()
    finish(w)
    assert w.core.state.conflicts == 0


def test_r4a_latest_tmp_written_before_the_shards_is_published_after_them(w: World) -> None:
    save(w, b"latest.tmp")
    save(w, b"shard0")
    save(w, b"shard1")
    w.rename(b"latest.tmp", b"latest")
    assert log(w) == [("PUT", b"shard0"), ("PUT", b"shard1"), ("PUT", b"latest")]
    send(w)
    publish(w, limit=2)
    assert tier_names(w) == {b"shard0", b"shard1"}
    finish(w)


def test_r4a_the_rename_of_a_published_file_is_a_move_and_of_a_frozen_one_too(w: World) -> None:
    save(w, b"a")
    send(w)
    assert w.publish_take()
    w.rename(b"a", b"b")
    assert log(w) == [("PUT", b"a"), ("MOVE", b"b")]
    w.round_apply()
    w.round_answer()
    w.rename(b"b", b"c")
    assert log(w) == [("MOVE", b"b"), ("MOVE", b"c")]
    finish(w)
    assert tier_names(w) == {b"c"}
    assert not w.tier.removed


def test_r4a_a_directory_with_ten_thousand_unsent_files_is_renamed_in_their_order(w: World) -> None:
    w.mkdir(b"d")
    w.mkdir(b"d/sub")
    s, now = w.core.state, 5000.0
    dirs = [w.inode(b"d"), w.inode(b"d/sub")]
    w.mkdir(b"other")
    files = []
    for n in range(10_000):
        i = w.core.names.create(dirs[n % 2], b"f%d" % n, 0o644, 0, 0, s.next_id(), now)
        w.core.content.seal(i, now)
        files.append(i)
    other = w.core.names.create(w.inode(b"other"), b"x", 0o644, 0, 0, s.next_id(), now)
    w.core.content.seal(other, now)
    w.journal.commit(s.take_changes())
    w.core.names.rename(s.root, b"d", s.root, b"e", 0, now)
    w.journal.commit(s.take_changes())
    puts = [e for e in s.log.values() if e.kind == EntryKind.PUT]
    assert [e.inode for e in puts] == [other, *files]
    order = [(e.kind, e.name) for e in s.log.values() if e.kind != EntryKind.PUT or e.inode is other]
    assert order == [
        (EntryKind.MKDIR, b"d"),
        (EntryKind.MKDIR, b"sub"),
        (EntryKind.MKDIR, b"other"),
        (EntryKind.PUT, b"x"),
        (EntryKind.MOVE, b"e"),
    ]
    assert files[0].path() == b"e/f0"
    assert files[1].path() == b"e/sub/f1"
    again = w._load()
    assert [(e.id, e.pos, e.path()) for e in again.state.log.values()] == [
        (e.id, e.pos, e.path()) for e in s.log.values()
    ]


def test_r4a_what_is_published_in_a_directory_moves_with_it_and_the_rest_comes_after(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/a")
    finish(w)
    save(w, b"d/b")
    save(w, b"c")
    w.rename(b"d", b"e")
    assert log(w) == [("PUT", b"c"), ("MOVE", b"e"), ("PUT", b"e/b")]
    send(w)
    publish(w)
    assert tier_names(w) == {b"d", b"d/a", b"c"}
    publish(w, limit=1)
    assert tier_names(w) == {b"e", b"e/a", b"c"}
    finish(w)


def test_r4a_a_pending_removal_moves_with_the_file_that_passes_it(w: World) -> None:
    """save(new.tmp), unlink(old), rename(new.tmp, new): old may not go before new is there."""
    save(w, b"old")
    finish(w)
    save(w, b"new.tmp")
    w.unlink(b"old")
    w.rename(b"new.tmp", b"new")
    assert not w.removals_take()
    send(w)
    publish(w)
    assert tier_names(w) == {b"old", b"new"}
    finish(w)


def test_r4b_a_temporary_file_never_reaches_the_tier(w: World) -> None:
    save(w, b"t")
    w.now += 1.9
    w.unlink(b"t")
    assert log(w) == []
    assert not w.staging
    finish(w)


@pytest.mark.parametrize("why", ["sent", "old"])
def test_r4b_nothing_else_is_cancelled(w: World, why: str) -> None:
    save(w, b"t")
    if why == "sent":
        send(w)
    else:
        w.now += 2.0
    w.unlink(b"t")
    assert [k for k, _ in log(w)] == ["PUT"]
    finish(w)
    assert tier_names(w) == set()


def test_r4b_a_file_rewritten_again_and_again_is_still_published_now_and_then(w: World) -> None:
    for _ in range(100):
        save(w, b"log")
        w.now += 0.5
        w.plan()
        send_now = list(w.jobs)
        for job in send_now:
            w.do_job(job)
        if send_now:
            break
    else:
        pytest.fail("rewriting starves it")
    assert len(log(w)) <= 2
    finish(w)


def test_r4b_rewriting_within_the_settle_time_keeps_one_entry_and_no_old_bytes(w: World) -> None:
    for _ in range(10):
        save(w, b"f", cells=2)
        w.now += 0.1
    assert log(w) == [("PUT", b"f")]
    assert len(w.staging) == 1
    finish(w)


# -- R6, invariant 5 ---------------------------------------------------------------------------


def test_r6_safetensors_renames_before_it_closes(w: World) -> None:
    save(w, b"model.safetensors")
    finish(w)
    h = w.create(b"model.tmp")
    w.write(h, 0, 2)
    w.rename(b"model.tmp", b"model.safetensors")
    w.drain()
    old = tier_files(w)[b"model.safetensors"]
    assert old != tuple(h.file.cells)
    w.close(h)
    finish(w)
    assert tier_files(w) == {b"model.safetensors": tuple(h.file.cells)}


def test_r6_a_published_file_renamed_while_it_is_written_stays_on_the_tier_till_the_seal(w: World) -> None:
    save(w, b"a")
    finish(w)
    h = w.open(b"a")
    w.write(h, 0, 1)
    w.rename(b"a", b"b")
    w.drain()
    assert tier_names(w) == {b"a"}
    w.close(h)
    send(w)
    publish(w)
    assert tier_names(w) == {b"a", b"b"}
    finish(w)
    assert tier_names(w) == {b"b"}


@pytest.mark.parametrize("how", ["trunc", "in place", "rename over"])
def test_r6_an_interrupted_file_never_replaces_the_last_good_one(w: World, how: str) -> None:
    save(w, b"last.ckpt", cells=2)
    finish(w)
    good = tier_files(w)
    h: Handle
    if how == "rename over":
        h = w.create(b"tmp")
        w.write(h, 0, 1)
        w.rename(b"tmp", b"last.ckpt")
    else:
        h = w.open(b"last.ckpt", trunc=how == "trunc")
        w.write(h, 0, 1)
    w.close(h, killed=True)
    w.drain()
    w.crash()
    w.drain()
    assert tier_files(w) == good
    assert w.ref_file(b"last.ckpt").held
    assert [i.held for i in w.core.state.held_inodes.values()] == ["killed"]
    w.discard(b"last.ckpt")
    assert {b"last.ckpt": tuple(w.ref_file(b"last.ckpt").cells)} == good
    finish(w)


def test_r6_publish_lets_an_interrupted_file_through(w: World) -> None:
    h = w.create(b"f")
    w.write(h, 0, 3)
    w.close(h, killed=True)
    w.drain()
    assert tier_names(w) == set()
    w.publish_held(b"f")
    finish(w)
    assert len(tier_files(w)[b"f"]) == 3


def test_r6_overwriting_resolves_an_interruption_and_appending_does_not(w: World) -> None:
    h = w.create(b"f")
    w.write(h, 0, 1)
    w.close(h, killed=True)
    h = w.open(b"f")
    w.write(h, 1, 1)
    w.close(h)
    assert log(w) == []
    save(w, b"f")
    assert log(w) == [("PUT", b"f")]
    finish(w)


def test_r6_what_was_open_at_a_crash_is_interrupted_but_streams_and_closed_files_are_sealed(w: World) -> None:
    for name in (b"open.pt", b"train.log", b"closed.pt"):
        w.write(w.create(name), 0, 1)
    w.flush(w.handles[2])
    w.crash()
    assert [p for p, f in sorted(w.walk().items()) if getattr(f, "held", False)] == [b"open.pt"]
    assert [p for _, p in log(w)] == [b"train.log", b"closed.pt"]
    w.publish_held(b"open.pt")
    finish(w)


def test_invariant_5_truncation_gets_fresh_staging_and_a_write_below_the_seal_a_clone(w: World) -> None:
    save(w, b"f", cells=3)
    w.now += 5
    w.plan()  # in flight
    inode = w.inode(b"f")
    first = inode.data
    h = w.open(b"f")
    w.write(h, 3, 1)  # an append needs neither
    assert inode.data == first
    w.write(h, 1, 1)
    assert inode.data != first
    w.close(h)
    second = inode.data
    h = w.open(b"f", trunc=True)
    assert inode.data not in (first, second)
    w.write(h, 0, 2)
    w.close(h)
    assert [e.data for e in inode.puts] == [first, inode.data]  # the one in between was never sent
    w.check()
    finish(w)
    assert len(w.staging) == 1


def test_invariant_5_an_append_after_the_seal_is_not_part_of_the_version(w: World) -> None:
    save(w, b"f", cells=2)
    w.now += 5
    h = w.open(b"f")
    w.write(h, 2, 2)
    send(w)
    publish(w)
    assert len(tier_files(w)[b"f"]) == 2
    w.close(h)
    finish(w)
    assert len(tier_files(w)[b"f"]) == 4


# -- R9 ----------------------------------------------------------------------------------------


def test_r9_what_follows_a_stuck_entry_waits_until_it_is_skipped(w: World) -> None:
    save(w, b"forbidden")
    save(w, b"next")
    refuse(w)
    (stuck,) = [e for e in w.core.state.log.values() if e.stuck]
    assert stuck.path() == b"forbidden"
    assert tier_names(w) == set()
    w.check()
    w.crash()
    (stuck,) = [e for e in w.core.state.log.values() if e.stuck]
    w.skip(stuck)
    w.drain()
    assert tier_names(w) == {b"next"}
    assert w.core.state.held_inodes[w.inode(b"forbidden").ino].held == "skipped"
    w.crash()
    w.check()
    w.publish_held(b"forbidden")  # the bytes were kept
    finish(w)


def test_r9_a_stuck_file_that_is_renamed_goes_under_its_new_name(w: World) -> None:
    save(w, b"bad:name")
    save(w, b"next")
    refuse(w)
    w.rename(b"bad:name", b"good")
    assert not any(e.stuck for e in w.core.state.log.values())
    assert [p for _, p in log(w)] == [b"next", b"good"]
    finish(w)


def test_r9_a_stuck_entry_is_retried_and_passes_when_the_tier_allows(w: World) -> None:
    save(w, b"f")
    refuse(w)
    refuse(w)
    assert next(iter(w.core.state.log.values())).retries == 2
    finish(w)


def test_r9_a_frozen_file_renamed_then_refused_still_ends_under_its_last_name(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/a")
    w.now += 5
    send(w)
    publish(w, limit=1)
    assert w.publish_take()
    w.rename(b"d/a", b"b")
    w.round_apply("refuse")
    w.round_answer()
    w.rename(b"d", b"e")
    w.check()
    finish(w)
    assert tier_names(w) == {b"e", b"b"}


def test_r9_skipping_a_stuck_directory_skips_what_is_in_it(w: World) -> None:
    w.mkdir(b"d")
    w.mkdir(b"d/e")
    save(w, b"d/e/f")
    save(w, b"g")
    refuse(w)
    w.skip(next(e for e in w.core.state.log.values() if e.stuck))
    w.drain()
    w.check()
    assert tier_names(w) == {b"g"}
    w.crash()
    w.publish_held(b"d/e/f")  # the directories are made after all
    assert [k for k, _ in log(w)] == ["MKDIR", "MKDIR", "PUT"]
    finish(w)
    assert b"d/e/f" in tier_names(w)


def test_r9_a_removed_directory_that_was_never_made_leaves_nothing(w: World) -> None:
    w.mkdir(b"d")
    refuse(w)
    w.rmdir(b"d")
    w.skip(next(e for e in w.core.state.log.values() if e.stuck))
    w.check()
    finish(w)


# -- retries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["down", "lost", "redo"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("crash", [False, True])
def test_a_batch_is_applied_once_whatever_happens_to_it(w: World, fault: str, at: int, crash: bool) -> None:
    for name in (b"a", b"b", b"c"):
        save(w, name, cells=2)
    send(w)
    assert w.publish_take()
    w.round_apply(fault, at)
    if crash:
        w.crash()
    else:
        w.round_answer()
    w.check()
    finish(w)
    assert not w.tier.conflicts


def test_chunks_of_a_lost_upload_that_arrive_late_are_not_counted(w: World) -> None:
    save(w, b"f", cells=3)
    w.now += 5
    w.plan()
    w.do_job(w.jobs[0])
    w.plan()
    late, lost, _ = list(w.jobs)
    assert isinstance(late, Chunk)
    old = late.entry.upload
    assert old is not None
    w.do_job(lost, "redo")
    w.jobs.remove(late)
    w.core.planner.sent(late.entry, old, late.offset, late.length, b"of the old upload")
    assert not late.entry.sent
    assert late.entry.upload is None
    w.commit()
    finish(w)


def test_a_dropped_or_skipped_upload_is_abandoned(w: World) -> None:
    save(w, b"f", cells=3)
    refuse(w)
    assert w.tier.hidden
    w.skip(next(iter(w.core.state.log.values())))
    assert not w.tier.hidden
    w.discard(b"f")
    finish(w)


def test_huge_files_need_at_most_the_parts_a_store_takes() -> None:
    content = World().core.content
    for length in (0, 1, SMALL, 1 << 30, (5 << 40) - 1, 5 << 40):
        chunk = content.chunk_for(length)
        assert chunk % MIB == 0
        assert -(-length // chunk) <= MAX_CHUNKS


# -- objects of other kinds in the way ---------------------------------------------------------


def test_a_file_takes_the_name_of_a_removed_directory_when_its_turn_comes(w: World) -> None:
    w.mkdir(b"x")
    w.mkdir(b"x/y")
    save(w, b"x/y/f")
    finish(w)
    w.unlink(b"x/y/f")
    w.rmdir(b"x/y")
    w.rmdir(b"x")
    save(w, b"first")
    save(w, b"x")
    send(w)
    publish(w)
    assert b"first" in tier_names(w)
    assert b"x/y/f" in tier_names(w)
    assert w.publish_take()
    assert w.round is not None
    assert [type(op) for op in w.round.ops] == [Remove] * 3
    assert w.round.kind == "forced"
    w.round_apply()
    w.round_answer()
    finish(w)
    assert not w.tier.conflicts


def test_a_directory_made_again_takes_over_what_is_left_in_the_old_one(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    w.unlink(b"d/f")
    w.rmdir(b"d")
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    assert w.core.state.conflicts == 0
    assert not w.tier.conflicts


# -- W -----------------------------------------------------------------------------------------


def test_w2_files_of_others_appear_and_names_with_local_changes_stay_local(w: World) -> None:
    w.foreign_put(b"theirs")
    w.look_everywhere()
    assert b"theirs" in w.walk()
    save(w, b"ours")
    w.foreign_put(b"ours")
    w.foreign_put(b"theirs")
    w.look_everywhere()
    assert w.ref_file(b"ours").sealed in w.contents
    assert w.ref_file(b"ours").sealed not in w.foreign
    w.check()
    finish(w)
    assert len(w.tier.conflicts) == 1  # W3: theirs is kept


def test_w2_a_listing_from_before_our_change_changes_nothing(w: World) -> None:
    save(w, b"f")
    finish(w)
    w.ask(b"")  # sees f
    w.unlink(b"f")
    w.drain()
    w.merge(w.questions[0])
    assert b"f" not in w.walk()
    w.ask(b"")  # does not see g
    save(w, b"g")
    w.drain()
    w.merge(w.questions[0])
    assert b"g" in w.walk()
    w.check()


def test_w2_an_older_answer_does_not_undo_a_newer_one(w: World) -> None:
    w.ask(b"")
    w.foreign_put(b"theirs")
    w.look_everywhere()
    w.merge(w.questions[0])
    assert b"theirs" in w.walk()


def test_w2_a_listing_of_a_path_that_is_another_directory_by_now_is_not_believed(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    w.ask(b"d")
    w.rename(b"d", b"e")
    w.mkdir(b"d")
    save(w, b"d/g")
    w.drain()
    w.merge(w.questions[0], late=True)
    assert set(w.walk()) == {b"d", b"d/g", b"e", b"e/f"}
    w.check()


def test_w3_what_others_changed_unseen_is_kept_when_we_replace_move_or_remove_it(w: World) -> None:
    for name in (b"replaced", b"removed", b"moved"):
        save(w, name)
    finish(w)
    for name in (b"replaced", b"removed", b"moved"):
        w.foreign_put(name)
    save(w, b"replaced")
    w.unlink(b"removed")
    w.rename(b"moved", b"elsewhere")
    w.drain()
    w.look_everywhere()
    w.check()
    assert w.core.state.conflicts == 3
    assert {b"removed", b"moved"} < set(w.walk())  # theirs, back in view
    assert b"elsewhere" not in w.walk()
    finish(w)


def test_w4_a_directory_with_files_of_others_comes_back_into_view(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/ours")
    finish(w)
    w.unlink(b"d/ours")
    w.rmdir(b"d")
    w.foreign_put(b"d/theirs")
    w.drain()
    assert tier_names(w) == {b"d", b"d/theirs"}
    w.look_everywhere()
    assert set(w.walk()) == {b"d", b"d/theirs"}
    finish(w)


def test_w4_a_listing_of_a_removed_directory_does_not_keep_it(w: World) -> None:
    w.mkdir(b"d")
    finish(w)
    w.foreign_put(b"d/theirs")
    w.ask(b"d")
    w.rmdir(b"d")
    w.merge(w.questions[0])
    w.check()
    w.drain()
    w.look_everywhere()
    assert b"d/theirs" in w.walk()


def test_a_directory_that_others_removed_is_made_again_by_what_we_put_in_it(w: World) -> None:
    w.mkdir(b"d")
    w.mkdir(b"d/e")
    finish(w)
    save(w, b"d/e/f")
    w.foreign_remove(b"d/e")
    w.foreign_remove(b"d")
    w.rename(b"d", b"g")
    finish(w)
    assert b"g/e/f" in tier_names(w)


# -- errors and attributes ---------------------------------------------------------------------


def test_names_raise_what_ext4_raises(w: World) -> None:
    w.mkdir(b"d")
    w.mkdir(b"d/e")
    save(w, b"d/f")
    names, root, d = w.core.names, w.core.state.root, w.inode(b"d")
    f, e = d.children[b"f"], d.children[b"e"]
    cases = [
        (errno.EEXIST, lambda: names.mkdir(root, b"d", 0, 0, 0, 0.0)),
        (errno.ENAMETOOLONG, lambda: names.mkdir(root, b"n" * 256, 0, 0, 0, 0.0)),
        (errno.EPERM, lambda: names.mkdir(root, b".ckptfs-x", 0, 0, 0, 0.0)),
        (errno.ENOTDIR, lambda: names.mkdir(f, b"x", 0, 0, 0, 0.0)),
        (errno.ENOTEMPTY, lambda: names.rmdir(root, b"d", 0.0)),
        (errno.ENOTDIR, lambda: names.rmdir(d, b"f", 0.0)),
        (errno.EISDIR, lambda: names.unlink(root, b"d", 0.0)),
        (errno.ENOENT, lambda: names.unlink(root, b"x", 0.0)),
        (errno.ENOENT, lambda: names.rename(root, b"x", root, b"y", 0, 0.0)),
        (errno.EISDIR, lambda: names.rename(d, b"f", d, b"e", 0, 0.0)),
        (errno.ENOTDIR, lambda: names.rename(d, b"e", d, b"f", 0, 0.0)),
        (errno.EINVAL, lambda: names.rename(root, b"d", e, b"x", 0, 0.0)),
        (errno.EEXIST, lambda: names.rename(d, b"f", d, b"e", 1, 0.0)),
        (errno.EINVAL, lambda: names.rename(d, b"f", d, b"g", 2, 0.0)),
        (errno.EPERM, lambda: names.rename(d, b"f", root, b".ckptfs", 0, 0.0)),
    ]
    for code, call in cases:
        with pytest.raises(OSError) as caught:  # noqa: PT011
            call()
        assert caught.value.errno == code
    w.check()


def test_r1_attributes_travel_with_the_file_and_later_changes_come_late(w: World) -> None:
    save(w, b"f")
    w.chmod(b"f", 0o600)
    send(w)
    publish(w)
    there = w.tier.at(b"f")
    assert there is not None
    assert there.attrs.mode == 0o600
    w.drain()
    w.chmod(b"f", 0o640)
    w.unlink(b"f")
    finish(w)
    assert w.core.state.conflicts == 0


def test_r1_attributes_in_flight_when_the_file_is_unlinked_do_not_look_like_a_conflict(w: World) -> None:
    save(w, b"f")
    finish(w)
    w.chmod(b"f", 0o600)
    assert w.attrs_take()
    w.unlink(b"f")
    w.round_apply()
    w.round_answer()
    finish(w)
    assert w.core.state.conflicts == 0
    assert tier_names(w) == set()


# -- settling ----------------------------------------------------------------------------------


def test_settled_does_not_wait_for_what_needs_a_decision(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/a")
    finish(w)
    h = w.open(b"d/a")
    w.write(h, 0, 1)
    w.rename(b"d/a", b"b")
    w.close(h, killed=True)
    w.rmdir(b"d")
    w.drain()
    assert w.core.order.settled
    assert tier_names(w) == {b"d", b"d/a"}
    w.discard(b"b")  # the old file comes back with its directory
    assert set(w.walk()) == {b"d", b"d/a"}
    finish(w)


@pytest.mark.parametrize("seed", range(5))
def test_random_rotation_always_leaves_a_checkpoint_on_the_tier(w: World, seed: int) -> None:
    """A trainer that keeps two, and a tier of any speed."""
    r = random.Random(seed)
    kept: list[bytes] = []
    for step in range(30):
        path = b"step_%d" % step
        w.mkdir(path)
        for shard in (b"s0", b"s1", b"meta"):
            save(w, path + b"/" + shard, r.randrange(3))
        h = w.create(b"latest.tmp")
        w.write(h, 0, 1)
        w.close(h)
        w.rename(b"latest.tmp", b"latest")
        kept.append(path)
        if len(kept) > 2:
            old = kept.pop(0)
            for shard in (b"s0", b"s1", b"meta"):
                w.unlink(old + b"/" + shard)
            w.rmdir(old)
        w.now += r.choice([0.1, 5.0])
        for _ in range(r.randrange(4)):
            w.plan(r.randrange(1, 6), hurry=r.random() < 0.3)
            while w.jobs:
                w.do_job(r.choice(w.jobs))
            for take in (w.publish_take, w.removals_take, w.attrs_take):
                if take(r.choice([1, 3, 64])):
                    w.round_apply()
                    w.round_answer()
            w.check()
        if b"latest" in tier_names(w):
            whole = [p for p in tier_names(w) if p.startswith(b"step_") and p.endswith(b"/meta")]
            assert whole
    finish(w)


def test_w2_a_listing_without_a_directory_we_have_made_again_since_does_not_take_it(w: World) -> None:
    w.mkdir(b"d")
    finish(w)
    w.foreign_remove(b"d")
    w.ask(b"")  # no d
    save(w, b"d/f")
    w.plan(hurry=True)
    for job in list(w.jobs):
        w.do_job(job)
    assert w.publish_take()  # and no attributes yet, whose sending would be noted under the name `d`
    w.round_apply()
    w.round_answer()
    w.merge(w.questions[0])
    d = w.core.state.root.children.get(b"d")
    assert d is not None
    assert set(d.children) == {b"f"}
    finish(w)


def test_renames_in_turns_do_not_use_up_the_numbers(w: World) -> None:
    """R4a moves what is unpublished to the end of the log, each time in close order."""
    for d in (b"d", b"e"):
        w.mkdir(d)
    for n in range(120):
        for d in (b"d", b"e"):
            save(w, d + b"%d/f%d" % (n - 1, n) if n else d + b"/f0")
            w.rename(d + b"%d" % (n - 1) if n else d, d + b"%d" % n)
    assert w.core.state.last_id < 100_000
    w.crash()
    finish(w)


def test_a_large_directory_is_renamed_again_and_again_in_the_journal_too(w: World) -> None:
    w.mkdir(b"d")
    for n in range(300):
        save(w, b"d/f%d" % n)
    before = [e.path() for e in w.core.state.log.values()]
    w.rename(b"d", b"e")
    save(w, b"e/last")
    w.rename(b"e", b"d")
    w.crash()
    after = [e.path() for e in w.core.state.log.values() if e.kind.name == "PUT"]
    assert after == [p for p in before if p != b"d"] + [b"d/last"]
    finish(w)
