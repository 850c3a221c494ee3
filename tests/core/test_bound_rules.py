"""R5 by example: an upload is begun when every earlier step about its path is done, and only then."""

from __future__ import annotations

import pytest

from ckptfs.core.plan import Begin

from .bound import BoundWorld
from .test_rules import finish, save, send


@pytest.fixture
def w() -> BoundWorld:
    return BoundWorld()


def begun(w: BoundWorld) -> list[bytes]:
    """Paths of the uploads that are planned now; they are not carried out yet."""
    w.now += 5
    w.plan(64)
    return [job.path for job in w.jobs if isinstance(job, Begin)]


def publish(w: BoundWorld) -> None:
    """One batch."""
    assert w.publish_take()
    w.round_apply()
    w.round_answer()


def test_two_versions_of_a_name_are_uploaded_one_after_the_other(w: BoundWorld) -> None:
    save(w, b"f", cells=2)
    w.now += 5
    send(w)
    save(w, b"f", cells=3)
    save(w, b"g", cells=2)
    assert begun(w) == [b"g"]
    publish(w)
    assert begun(w) == [b"g", b"f"]
    finish(w)


def test_a_small_version_before_a_large_one_counts_too(w: BoundWorld) -> None:
    save(w, b"f", cells=1)
    w.now += 5
    w.plan(64)
    save(w, b"f", cells=2)
    assert begun(w) == []
    publish(w)
    assert begun(w) == [b"f"]
    finish(w)


def test_what_was_renamed_away_first(w: BoundWorld) -> None:
    w.mkdir(b"d")
    save(w, b"d/f", cells=2)
    finish(w)
    w.rename(b"d", b"e")
    w.mkdir(b"d")
    save(w, b"d/f", cells=2)
    save(w, b"e/g", cells=2)
    save(w, b"other", cells=2)
    assert begun(w) == [b"other"]
    publish(w)  # the rename
    assert sorted(begun(w)) == [b"d/f", b"e/g", b"other"]
    finish(w)


def test_a_removal_under_a_directory_made_again(w: BoundWorld) -> None:
    w.mkdir(b"d")
    save(w, b"d/f", cells=2)
    finish(w)
    w.unlink(b"d/f")
    w.rmdir(b"d")
    w.mkdir(b"d")
    save(w, b"d/f", cells=2)
    assert begun(w) == []
    publish(w)  # the directory: what is in it takes over the name
    assert begun(w) == [b"d/f"]
    finish(w)


def test_a_new_directory_is_not_waited_for(w: BoundWorld) -> None:
    """The next checkpoint is uploaded while the one before it is published."""
    save(w, b"before", cells=2)
    w.mkdir(b"d")
    save(w, b"d/f", cells=2)
    assert begun(w) == [b"before", b"d/f"]
    finish(w)


def test_a_rename_in_mid_upload_begins_it_anew(w: BoundWorld) -> None:
    save(w, b"f.tmp", cells=4)
    assert begun(w) == [b"f.tmp"]
    w.do_job(w.jobs[0])
    w.plan(2)
    w.do_job(w.jobs[0])
    w.rename(b"f.tmp", b"f")
    assert begun(w) == []  # a chunk is on its way still
    while w.jobs:
        w.do_job(w.jobs[0])
    assert begun(w) == [b"f"]
    assert w.core.planner.take_reuploaded() == 2 << 20
    finish(w)
    assert w.core.planner.take_reuploaded() == 0


def test_a_rename_between_planning_and_beginning(w: BoundWorld) -> None:
    save(w, b"f", cells=2)
    w.now += 5
    send(w)
    save(w, b"g", cells=2)
    assert begun(w) == [b"g"]
    w.rename(b"g", b"f")  # where an earlier version is not published yet
    w.do_job(w.jobs[0])
    assert begun(w) == []
    finish(w)


def test_small_versions_travel_with_their_publishing(w: BoundWorld) -> None:
    for name in (b"a", b"b", b"c"):
        save(w, name, cells=1)
    assert w.plan(64) == 0
    assert not w.publish_take()  # not settled
    assert begun(w) == []
    publish(w)
    assert set(w.tier.visible()) == {b"a", b"b", b"c"}
    finish(w)


def test_killed_while_a_small_version_is_published(w: BoundWorld) -> None:
    save(w, b"a", cells=1)
    w.now += 5
    w.plan(64)
    assert w.publish_take()
    w.round_apply(fault="lost")
    w.crash()
    finish(w)


def test_what_was_removed_before_it_was_published_goes_where_it_was(w: BoundWorld) -> None:
    """Nothing is cancelled because the tier lags (R4): it appears, under its old name, and goes late."""
    w.mkdir(b"d")
    save(w, b"d/a", cells=2)
    w.now += 5
    send(w)
    w.unlink(b"d/a")
    w.rename(b"d", b"e")
    assert begun(w) == []  # its upload is still the right one
    finish(w)
    save(w, b"e/b", cells=2)
    w.now += 5
    send(w)
    w.unlink(b"e/b")
    w.rmdir(b"e")
    finish(w)
    assert w.core.planner.take_reuploaded() == 0
