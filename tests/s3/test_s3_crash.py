"""A batch on an object tier that was interrupted anywhere is completed by the next try."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rig import ATTRS, DIR_ATTRS, Rig, Session, blob

from ckptfs.tiers.base import Kind, Link, Mkdir, Move, Op, Remove, SetAttrs, TierError, Trouble
from ckptfs.tiers.s3_client import Store
from tests.s3.s3_rig import s3_rig
from tests.s3.servers import Server

pytestmark = pytest.mark.long


class Crash(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def failing_at(step: int, make: Callable[[], BaseException], after: bool) -> Iterator[list[str]]:
    """Let the `step`-th request fail, before it is sent or `after` it was done; yields the requests."""
    calls: list[str] = []
    real, lock = Store.run, threading.Lock()

    def run(self: Store, what: str, job: Callable[[Any], Any]) -> Any:
        with lock:
            calls.append(what)
            fails = len(calls) == step
        if fails and not after:
            raise make()
        value = real(self, what, job)
        if fails:
            raise make()
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "run", run)
        yield calls


def _down() -> BaseException:
    return TierError(Trouble.DOWN, "no answer")


WAYS = [
    (make, after, inline) for make in (Crash, _down) for after in (False, True) for inline in (True, False)
]


def _name(way: tuple[Callable[[], BaseException], bool, bool]) -> str:
    make, after, inline = way
    words = "crash" if make is Crash else "error", "unanswered" if after else "unsent"
    return "-".join((*words, "inline" if inline else "uploads"))


@pytest.mark.parametrize("every", [3 * len(WAYS), pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS, ids=_name)
def test_R7_a_batch_interrupted_anywhere_is_completed_by_the_next_try(
    seaweed: Server,
    tmp_path: Path,
    way: tuple[Callable[[], BaseException], bool, bool],
    every: int,
) -> None:
    """Fail the 1st, 2nd, 3rd ... request until the batch goes through untouched.

    In short runs each way takes other ones, a third of all together.
    """
    make, after, inline = way
    for step in range(1 + 3 * WAYS.index(way) % every, 1000, every):
        with s3_rig(seaweed, tmp_path / f"{step}", inline=inline) as rig:
            s = Session(rig)
            ops = _prepare(s, rig)
            with failing_at(step, make, after) as calls:
                try:
                    outcome = s.tier.apply(ops)
                except Crash:
                    outcome = None
                except TierError as exc:
                    pytest.fail(f"{step} {calls[-1]}: {exc}")
            where = (step, calls[: step + 1])
            # Order: `last` never before the shard; both whole or not there.
            last, shard = rig.foreign_read(b"run/last"), rig.foreign_read(b"new/shard")
            assert last in (b"old last", b"new last"), where
            assert shard in (None, blob(1000)), where
            assert last == b"old last" or shard is not None, where
            assert rig.foreign_read(b"run/theirs") in (b"theirs", b"ours"), where
            if outcome is not None and outcome.failed is not None:
                assert outcome.failed.trouble is Trouble.DOWN, (where, outcome.failed)
            done = len(outcome.applied) if outcome is not None else 0
            again = Session(rig)
            again.apply(*ops[done:])
            _check(again, rig, where)
            if len(calls) < step:
                assert step > 20
                return
    pytest.fail("the batch never went through")


def _prepare(s: Session, rig: Rig) -> list[Op]:
    old = s.put(b"run/last", b"old last")
    s.put(b"run/tree/f", b"tree")
    gone = s.put(b"run/gone", b"gone")
    attr = s.put(b"run/attr", b"attr")
    file = s.put(b"run/file.tmp", b"file")
    alone = s.put(b"run/sub/alone", b"alone")
    tree = s.look(b"run/tree").ident
    rig.foreign_write(b"run/theirs", b"theirs")
    return [
        s.put_op(b"new/shard", blob(1000)),
        Move(b"run/tree", b"run/tree2", Kind.DIR, tree, None),
        s.put_op(b"run/theirs", b"ours"),
        Mkdir(b"run/made", DIR_ATTRS),
        Mkdir(b"run/deep", DIR_ATTRS),
        Mkdir(b"run/deep/er", DIR_ATTRS),
        s.put_op(b"run/deep/er/f", b"deep"),
        SetAttrs(b"run/attr", Kind.FILE, replace(ATTRS, mtime_ns=7_000_000_000), attr.token),
        Move(b"run/file.tmp", b"run/file", Kind.FILE, file.ident, None),
        s.put_op(b"run/last", b"new last", old.token),
        Link(b"latest", b"run", ATTRS, None),
        Remove(b"run/gone", Kind.FILE, gone.token),
        Remove(b"run/sub/alone", Kind.FILE, alone.token),
    ]


def _check(s: Session, rig: Rig, where: object) -> None:
    wanted = {
        b"new/shard": blob(1000),
        b"run/last": b"new last",
        b"run/theirs": b"ours",
        b"run/tree2/f": b"tree",
        b"run/file": b"file",
        b"run/deep/er/f": b"deep",
    }
    assert {path: rig.foreign_read(path) for path in wanted} == wanted, where
    inside = {b"theirs", b"tree2", b"made", b"attr", b"last", b"file", b"deep", b"sub"}
    assert s.names(b"run") == inside, where
    assert s.names() == {b"run", b"new", b"latest"}, where
    assert s.names(b"run/sub") == s.names(b"run/made") == set(), where
    assert set(rig.conflicts()) == {b"theirs"}, where
    assert s.look(b"run/attr").attrs.mtime_ns == 7_000_000_000, where
    for path in (*wanted, b"run/attr"):
        assert s.tier.digests(path, s.look(path).token), (where, path)
    s.tier.sweep(frozenset())
