"""Rare moments: lost and late answers, decisions in mid-round, a journal that can't be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptfs.core import EntryKind
from ckptfs.tiers.base import Failed, Kind, Trouble

from .test_rules import finish, log, publish, refuse, save, send, tier_files, tier_names
from .world import World


@pytest.fixture
def w() -> World:
    return World()


def lose(w: World) -> None:
    """The tier does the next step of the log, and its answer is not heard."""
    send(w)
    assert w.publish_take(1)
    w.round_apply("lost")
    w.round_answer()


def removals(w: World) -> bool:
    """One round of removals; whether there was any."""
    if not w.removals_take():
        return False
    w.round_apply()
    w.round_answer()
    w.check()
    return True


# -- a directory that may be under the one path or the other -------------------------------------


def test_r3_a_removal_in_a_directory_whose_rename_has_no_answer_waits_for_it(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    save(w, b"d/g")
    finish(w)
    w.unlink(b"d/f")
    w.rename(b"d", b"e")
    lose(w)
    assert not removals(w)  # under d/f there is nothing, which is not to say that it is gone
    finish(w)
    assert tier_names(w) == {b"e", b"e/g"}


def test_r1_attributes_in_a_directory_whose_rename_has_no_answer_wait_for_it(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    w.chmod(b"d/f", 0o600)
    w.rename(b"d", b"e")
    lose(w)
    w.attrs_take()
    if w.round is not None:
        w.round_apply()
        w.round_answer()
    finish(w)
    there = w.tier.at(b"e/f")
    assert there is not None
    assert there.attrs.mode == 0o600


# -- discard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("reused", [False, True])
def test_r6_discarding_goes_back_to_a_version_on_its_way_under_the_old_name(
    w: World, published: bool, reused: bool
) -> None:
    if published:
        save(w, b"a")
        finish(w)
    save(w, b"a", cells=2)
    send(w)
    assert w.publish_take()
    w.round_apply("down")
    w.round_answer()
    good = w.ref_file(b"a").cells.copy()
    h = w.open(b"a")
    w.write(h, 0, 1)
    w.rename(b"a", b"b")
    w.close(h, killed=True)
    if reused:
        save(w, b"a")
    w.discard(b"b")
    w.check()
    w.crash()
    finish(w)
    assert tier_files(w).pop(b"b") == tuple(good)
    assert tier_names(w) == ({b"a", b"b"} if reused else {b"b"})


def test_r6_discarding_does_not_bring_back_what_is_on_its_way_to_another_name(w: World) -> None:
    save(w, b"a")
    finish(w)
    w.rename(b"a", b"b")
    save(w, b"b")
    w.rename(b"b", b"c")  # the old version goes after its way from a to b
    h = w.create(b"a")
    w.write(h, 0, 1)
    w.close(h, killed=True)
    w.discard(b"a")
    finish(w)
    assert tier_names(w) == {b"c"}


@pytest.mark.parametrize("made", [False, True])
def test_r6_discarding_in_a_directory_made_again_goes_back_to_what_the_tier_has(w: World, made: bool) -> None:
    """rm -r d; mkdir d; save(d/f) is killed: whether or not the tier has got as far as the new d."""
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    good = tier_files(w)
    w.unlink(b"d/f")
    w.rmdir(b"d")
    w.mkdir(b"d")
    h = w.create(b"d/f")
    w.write(h, 0, 1)
    w.close(h, killed=True)
    if made:
        w.drain()
    assert tier_files(w) == good
    w.discard(b"d/f")
    finish(w)
    assert tier_files(w) == good


# -- removals of directories -----------------------------------------------------------------------


def test_r3_a_directory_is_not_forgotten_before_the_late_removals_below_it(w: World) -> None:
    w.mkdir(b"d")
    w.mkdir(b"d/a")
    save(w, b"d/a/f")
    finish(w)
    h = w.open(b"d/a/f")
    w.write(h, 0, 1)
    w.rename(b"d/a/f", b"g")  # d/a/f goes when g is sealed
    w.rmdir(b"d/a")
    other = w.create(b"d/a")
    w.write(other, 0, 1)
    w.close(other, killed=True)
    w.core.content.discard(w.inode(b"d/a"))  # the tier does not answer: the directory is not in view again
    del w.ref_dir(b"d").children[b"a"]
    w.commit()
    w.rmdir(b"d")
    w.drain()
    w.close(h)
    finish(w)
    assert set(tier_files(w)) == {b"g"}


def test_r3_a_directory_removed_and_made_again_keeps_what_is_overwritten(w: World) -> None:
    """rm -r d; mkdir d; save(d/f): the file is replaced and never missing."""
    w.mkdir(b"d")
    w.mkdir(b"d/e")
    save(w, b"d/e/f")
    save(w, b"d/e/g")
    finish(w)
    w.unlink(b"d/e/f")
    w.unlink(b"d/e/g")
    w.rmdir(b"d/e")
    w.rmdir(b"d")
    w.mkdir(b"d")
    w.mkdir(b"d/e")
    save(w, b"d/e/f")
    while removals(w):
        pass
    assert tier_names(w) == {b"d", b"d/e", b"d/e/f"}
    send(w)
    while log(w):
        publish(w)
        assert b"d/e/f" in tier_names(w)
    finish(w)
    assert w.core.state.conflicts == 0


def test_r3_a_removal_is_answered_after_its_directory_was_seen_to_be_gone(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    w.unlink(b"d/f")
    assert w.removals_take()
    w.foreign_remove(b"d")
    w.look_everywhere()
    assert w.walk() == {}
    w.round_apply()
    w.round_answer()
    w.check()
    assert len(w.journal.load().nodes) <= 1  # the root's
    finish(w)


def test_a_directory_yet_to_be_made_survives_another_one_made_in_its_place_before(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/old")
    publish(w, limit=1)
    w.now += 5
    w.foreign_remove(b"d")
    w.rename(b"d", b"e")
    w.unlink(b"e/old")  # it is still published, and makes its directory again
    w.mkdir(b"a")
    w.rmdir(b"a")
    publish(w, limit=1)  # the rename finds nothing
    w.rename(b"e", b"a")
    save(w, b"a/new")
    send(w)
    while log(w):
        publish(w, limit=1)
    finish(w)
    assert tier_names(w) == {b"a", b"a/new"}


def test_a_removed_directory_does_not_take_the_place_of_one_that_was_made_before_its_turn(w: World) -> None:
    w.mkdir(b"d")
    finish(w)
    w.rename(b"d", b"e")
    w.mkdir(b"e/sub")
    w.mkdir(b"d")
    w.rmdir(b"d")
    w.rename(b"e", b"d")
    w.foreign_remove(b"d")
    w.drain()
    assert w.core.tier.tier_path(w.inode(b"d")) == b"d"
    assert not w.core.state.graves
    w.foreign_put(b"d/theirs")
    w.look_everywhere()
    assert b"d/theirs" in w.walk()
    finish(w)


@pytest.mark.parametrize("published", [False, True])
def test_a_directory_and_one_of_others_in_each_other_by_turns(w: World, published: bool) -> None:
    """s was made in x, x was then moved into s; others removed x on the tier before any of that."""
    w.mkdir(b"d")
    if published:
        w.mkdir(b"s")
        save(w, b"s/f")
    finish(w)
    w.rename(b"d", b"x")
    if published:
        w.rename(b"s", b"x/s")
    else:
        w.mkdir(b"x/s")
    w.rename(b"x/s", b"e")
    w.rename(b"x", b"e/a")
    save(w, b"e/a/new")
    w.foreign_remove(b"d")
    finish(w)
    assert tier_names(w) == {b"e", b"e/a", b"e/a/new"} | ({b"e/f"} if published else set())


def test_a_directory_that_others_removed_takes_all_its_turns_when_it_is_made_again(w: World) -> None:
    w.mkdir(b"d")
    finish(w)
    w.rename(b"d", b"a")
    save(w, b"a/b")
    w.now += 5
    w.unlink(b"a/b")  # still published, which makes `a` again
    w.mkdir(b"d")
    w.mkdir(b"a/a")
    w.rename(b"d", b"a/a/e")
    w.rename(b"a/a", b"d")
    w.rename(b"a", b"d/d")
    save(w, b"d/d/b")
    w.foreign_remove(b"d")
    finish(w)
    assert tier_names(w) == {b"d", b"d/e", b"d/d", b"d/d/b"}


# -- after `ckptfs skip` of a rename -----------------------------------------------------------------


@pytest.mark.parametrize("new", ["file", "directory", "renamed"])
def test_r9_the_old_place_of_a_rename_that_was_skipped_can_be_used_without_losing_bytes(
    w: World, new: str
) -> None:
    kept = b"old"
    if new == "directory":
        save(w, b"old", cells=2)
    else:
        w.mkdir(b"old")
        save(w, b"old/f", cells=2)
        kept = b"old/f"
    finish(w)
    (cells,) = tier_files(w).values()
    w.rename(b"old", b"new")
    refuse(w)
    w.skip(next(iter(w.core.state.log.values())))
    assert tier_files(w) == {kept: cells}
    if new == "file":
        save(w, b"old")
    elif new == "directory":
        w.mkdir(b"old")
    else:
        w.mkdir(b"other")
        w.rename(b"other", b"old")
    w.drain()
    aside = [o.children.get(b"f", o) for o in w.tier.conflicts]
    assert cells in [*tier_files(w).values(), *(o.cells for o in aside)]
    assert not w.tier.removed


def test_r9_what_others_remove_at_the_old_place_of_a_skipped_rename_leaves_the_mount(w: World) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    finish(w)
    w.rename(b"d/f", b"g")
    refuse(w)
    w.skip(next(iter(w.core.state.log.values())))
    w.foreign_remove(b"d/f")
    w.foreign_remove(b"d")
    w.look_everywhere()
    assert w.walk() == {}
    w.check()


# -- decisions while the tier is at it ---------------------------------------------------------------


@pytest.mark.parametrize("then", ["", "unlink", "rewrite", "open", "rename", "crash"])
@pytest.mark.parametrize("fault", ["", "refuse", "redo", "lost", "down"])
def test_r9_skipping_an_entry_that_the_tier_is_at(w: World, then: str, fault: str) -> None:
    save(w, b"a")
    save(w, b"b")
    refuse(w)
    assert w.publish_take(1)
    w.skip(next(iter(w.core.state.log.values())))
    steps: dict[str, Callable[[], object]] = {
        "": lambda: None,
        "unlink": lambda: w.unlink(b"a"),
        "rewrite": lambda: save(w, b"a", cells=2),
        "open": lambda: w.write(w.open(b"a"), 0, 1),
        "rename": lambda: w.rename(b"a", b"c"),
        "crash": w.crash,
    }
    steps[then]()
    if w.round is not None:
        w.round_apply(fault)
        w.round_answer()
    w.check()
    w.drain()
    assert b"b" in tier_names(w)
    while w.handles:
        w.close(w.handles[0])
    held = [p for p in w.files() if w.ref_file(p).held]
    assert bool(held) == (fault in ("refuse", "redo") and then in ("", "rename"))
    for path in held:
        w.publish_held(path)
    finish(w)
    assert not w.tier.hidden


def test_r9_skipping_the_newest_version_of_a_file_keeps_its_bytes_although_an_older_one_is_on_its_way(
    w: World,
) -> None:
    save(w, b"f")
    w.now += 5
    send(w)
    save(w, b"f", cells=2)
    newest = next(reversed(w.core.state.log.values()))
    w.core.order.refused(newest, Failed(Trouble.REFUSED, "too large"), w.now)
    w.commit()
    w.skip(newest)
    w.check()
    w.drain()
    assert w.ref_file(b"f").held
    assert len(tier_files(w)[b"f"]) == 1
    w.crash()
    w.publish_held(b"f")
    finish(w)
    assert len(tier_files(w)[b"f"]) == 2


@pytest.mark.parametrize("fault", ["", "refuse", "lost"])
def test_r9_skipping_a_directory_that_the_tier_is_making(w: World, fault: str) -> None:
    w.mkdir(b"d")
    save(w, b"d/f")
    refuse(w)
    send(w)
    assert w.publish_take()
    assert w.round is not None
    assert [e.kind for e in w.round.items] == [EntryKind.MKDIR, EntryKind.PUT]
    w.skip(next(iter(w.core.state.log.values())))
    w.round_apply(fault)
    w.round_answer()
    w.check()
    w.drain()
    w.check()
    w.unlink(b"d/f")
    w.rmdir(b"d")
    finish(w)


@pytest.mark.parametrize("fault", ["", "refuse"])
def test_r9_skipping_a_rename_that_the_tier_is_at(w: World, fault: str) -> None:
    save(w, b"a")
    finish(w)
    w.rename(b"a", b"b")
    refuse(w)
    assert w.publish_take()
    w.skip(next(iter(w.core.state.log.values())))
    w.round_apply(fault)
    w.round_answer()
    assert w.core.tier.tier_path(w.inode(b"b")) == (b"a" if fault else b"b")
    finish(w)


# -- listings ----------------------------------------------------------------------------------------


def test_w2_an_older_listing_does_not_bring_back_a_directory_that_was_seen_to_be_gone(w: World) -> None:
    w.mkdir(b"d")
    finish(w)
    w.ask(b"")
    w.foreign_remove(b"d")
    w.ask(b"d")
    w.merge(w.questions[1])
    assert b"d" not in w.walk()
    w.merge(w.questions[0])
    assert b"d" not in w.walk()


@pytest.mark.parametrize("made", ["for a file", "by itself"])
def test_w2_a_listing_of_a_directory_that_was_made_anew_since_is_not_believed(w: World, made: str) -> None:
    w.mkdir(b"d")
    save(w, b"d/removed")
    finish(w)
    w.rename(b"d", b"e")
    w.unlink(b"e/removed")
    if made == "for a file":
        save(w, b"e/f")
    assert w.ask(b"e")  # still d on the tier
    w.foreign_remove(b"d")
    w.drain()
    if made == "by itself" and b"e" in w.walk():
        w.rmdir(b"e")
    w.merge(w.questions[0])
    w.check()
    finish(w)
    assert tier_names(w) == ({b"e", b"e/f"} if made == "for a file" else set())


def test_w2_a_directory_of_others_and_a_skipped_one_of_that_name_are_one(w: World) -> None:
    w.mkdir(b"d")
    refuse(w)
    w.skip(next(iter(w.core.state.log.values())))
    save(w, b"first")
    w.foreign_put(b"d/theirs")
    w.look_everywhere()
    assert b"d/theirs" in w.walk()
    w.check()
    w.crash()
    assert b"d/theirs" in w.walk()
    save(w, b"d/ours")
    finish(w)


def test_w2_attributes_that_others_changed_are_journaled_where_a_row_says_otherwise(w: World) -> None:
    w.mkdir(b"d")
    finish(w)
    there = w.tier.at(b"d")
    assert there is not None
    there.attrs = replace(there.attrs, mode=0o700)
    w.look_everywhere()
    assert w.inode(b"d").mode == 0o700
    w.commit()
    w.check()


# -- the journal can't be written --------------------------------------------------------------------


def tree(w: World) -> None:
    """A tree with all there is in it, something of it on its way."""
    w.mkdir(b"d")
    for n in range(5):
        save(w, b"d/%d" % n, cells=2)
    w.drain()
    for n in range(5, 10):
        save(w, b"d/%d" % n, cells=2)
    w.commit()


def again(w: World) -> None:
    """What was not committed is, and the journal says what the state is."""
    w.relieve()
    w.check()
    state = [(e.id, e.pos, e.path(), sorted(e.sent)) for e in w.core.state.log.values()]
    w.crash()
    assert [(e.id, e.pos, e.path(), sorted(e.sent)) for e in w.core.state.log.values()] == state
    w.check()
    finish(w)


def test_journal_trouble_many_entries_that_moved_at_once_twice(w: World) -> None:
    tree(w)
    w.full = True
    w.rename(b"d", b"e")
    assert w.core.state.changed
    save(w, b"e/late")
    w.rename(b"e", b"f")
    save(w, b"x")
    again(w)
    assert tier_names(w) == {b"f", b"x", b"f/late", *(b"f/%d" % n for n in range(10))}


def test_journal_trouble_between_two_moves_of_which_only_the_second_is_written(w: World) -> None:
    tree(w)
    w.full = True
    w.rename(b"d/5", b"d/y")  # one row
    w.relieve()
    w.full = True
    w.rename(b"d/6", b"d/z")
    changes = w.core.state.take_changes()
    w.rename(b"d", b"e")  # a range of positions, in which d/6 is not any more
    w.core.state.put_back(changes)
    again(w)


def test_journal_trouble_rows_that_are_gone_by_now_and_rows_that_are_back(w: World) -> None:
    tree(w)
    w.full = True
    w.chmod(b"d/0", 0o600)  # a clean file gets a row...
    attrs = w.attrs_take
    save(w, b"gone")
    changes = w.core.state.take_changes()
    w.unlink(b"gone")
    w.unlink(b"d/5")
    w.core.state.put_back(changes)
    assert attrs()
    w.round_apply()
    w.round_answer()
    w.drain()
    w.full = True
    w.chmod(b"d/1", 0o600)
    w.relieve()
    w.full = True
    assert attrs()  # ...and loses it when the tier has all of it...
    w.round_apply()
    w.round_answer()
    changes = w.core.state.take_changes()
    ino = w.inode(b"d/1").ino
    assert ino in changes.gone_inodes
    w.chmod(b"d/1", 0o640)  # ...and gets it again
    w.commit()
    w.core.state.put_back(changes)
    assert w.inode(b"d/1").kept
    again(w)


def test_journal_trouble_a_row_written_for_a_file_that_became_clean(w: World) -> None:
    tree(w)
    w.drain()
    w.full = True
    w.chmod(b"d/1", 0o600)
    changes = w.core.state.take_changes()
    assert w.inode(b"d/1").ino in [r[0] for r in changes.inodes]
    w.drain()
    w.core.state.put_back(changes)
    assert not w.inode(b"d/1").kept
    again(w)


def test_journal_trouble_chunks_of_an_upload_that_was_lost_meanwhile_are_not_counted(w: World) -> None:
    save(w, b"f", cells=3)
    w.now += 5
    w.plan()
    w.do_job(w.jobs[0])
    w.plan()
    w.full = True
    w.do_job(w.jobs[0])
    changes = w.core.state.take_changes()
    assert len(changes.sent) == 1
    w.do_job(w.jobs[0], "redo")
    w.core.state.put_back(changes)
    (e,) = w.core.state.log.values()
    assert not e.sent
    assert e.upload is None
    w.jobs.clear()
    again(w)
    assert w.tier.at(b"f") is not None


def test_journal_trouble_sent_rows_and_ids_are_kept(w: World) -> None:
    save(w, b"f", cells=3)
    w.now += 5
    w.full = True
    send(w)
    before = w.core.state.last_id
    w.core.state.put_back(w.core.state.take_changes())
    w.core.state.put_back(w.core.state.take_changes())
    w.relieve()
    rows = w.journal.load()
    assert sorted(offset for _, offset, _, _ in rows.sent) == [0, 1 << 20, 2 << 20]
    assert rows.last_id >= before
    w.jobs.clear()
    again(w)
    assert [o.kind for o in w.tier.visible().values()] == [Kind.FILE]
