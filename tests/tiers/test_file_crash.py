"""A batch that was interrupted is completed by the next try."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from file_rig import hidden_files
from rig import ATTRS, DIR_ATTRS, Rig, Session, blob, caught, trouble

from ckptfs.tiers import file_errors
from ckptfs.tiers.base import (
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Remove,
    SetAttrs,
    Trouble,
)

STEPS = (
    "chmod",
    "fchmod",
    "chown",
    "fchown",
    "utime",
    "setxattr",
    "fsync",
    "mkdir",
    "rmdir",
    "rename",
    "link",
    "symlink",
    "unlink",
)


class Crash(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def failing_at(step: int, make: Callable[[], BaseException]) -> Iterator[list[str]]:
    """Let the `step`-th call that changes a file system fail instead; yields the calls made."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def wrap(name: str) -> None:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                if len(calls) == step:
                    raise make()
                return real(*args, **kwargs)

            patch.setattr(os, name, call)

        for name in STEPS:
            wrap(name)
        yield calls


@pytest.mark.parametrize("how", ["crash", "error"])
def test_R7_a_batch_interrupted_anywhere_is_completed_by_the_next_try(
    rig: Rig, root: Path, how: str, tmp_path: Path
) -> None:
    """As SQLite is tested: fail the 1st, 2nd, 3rd ... call until the batch goes through untouched."""
    make: Callable[[], BaseException] = (
        Crash if how == "crash" else lambda: OSError(errno.EIO, os.strerror(errno.EIO))
    )
    for step in range(1, 1000):
        for path in (root, rig.staging):
            shutil.rmtree(path)
            path.mkdir()
        s = Session(rig)
        old = s.put(b"run/last", b"old last")
        s.put(b"run/tree/f", b"tree")
        gone = s.put(b"run/gone", b"gone")
        attr = s.put(b"run/attr", b"attr")
        tree = s.look(b"run/tree").ident
        s.rig.foreign_write(b"run/theirs", b"theirs")
        ops: list[Op] = [
            s.put_op(b"new/shard", blob(1000)),
            Move(b"run/tree", b"run/tree2", Kind.DIR, tree, None),
            s.put_op(b"run/theirs", b"ours"),
            Mkdir(b"run/made", DIR_ATTRS),
            SetAttrs(b"run/attr", Kind.FILE, replace(ATTRS, mtime_ns=7_000_000_000), attr.token),
            s.put_op(b"run/last", b"new last", old.token),
            Link(b"latest", b"run", ATTRS, None),
            Remove(b"run/gone", Kind.FILE, gone.token),
        ]
        with failing_at(step, make) as calls:
            try:
                outcome = s.tier.apply(ops)
            except Crash:
                outcome = None
        # Order: `last` never before the shard; both whole or not there.
        last, shard = rig.foreign_read(b"run/last"), rig.foreign_read(b"new/shard")
        assert last in (b"old last", b"new last"), (step, calls)
        assert shard in (None, blob(1000)), (step, calls)
        assert last == b"old last" or shard is not None, (step, calls)
        assert rig.foreign_read(b"run/theirs") in (b"theirs", b"ours"), (step, calls)
        if outcome is not None and outcome.failed is not None:
            assert outcome.failed.trouble is Trouble.DOWN, (step, outcome.failed)
        done = len(outcome.applied) if outcome is not None else 0
        again = Session(rig)
        again.apply(*ops[done:])
        assert rig.foreign_read(b"new/shard") == blob(1000)
        assert rig.foreign_read(b"run/last") == b"new last"
        assert rig.foreign_read(b"run/theirs") == b"ours"
        assert rig.foreign_read(b"run/tree2/f") == b"tree"
        assert again.names(b"run") == {b"theirs", b"tree2", b"made", b"attr", b"last"}, (step, calls)
        assert again.names() == {b"run", b"new", b"latest"}
        assert set(rig.conflicts()) == {b"theirs"}, (step, calls)
        found = again.look(b"run/attr")
        assert found.attrs.mtime_ns == 7_000_000_000
        for path in (b"run/attr", b"run/last", b"new/shard", b"run/tree2/f"):
            assert again.tier.digests(path, again.look(path).token), (step, calls, path)
        again.tier.sweep(frozenset())
        assert hidden_files(root) == [], (step, calls)
        if len(calls) < step:
            assert step > 30
            return
    pytest.fail("the batch never went through")


def test_a_failed_fsync_of_a_directory_reports_nothing_applied(s: Session) -> None:
    op = s.put_op(b"f", b"data")
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        outcome = s.tier.apply([op])
    assert outcome.applied == ()
    assert trouble(outcome) is Trouble.DOWN
    assert s.apply(op)[0].ident == op.upload.ident


def test_a_stale_handle_is_tried_again_by_path(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    s.put(b"d/f", b"data")
    real, failures = os.listdir, [errno.ESTALE]

    def listdir(fd: int) -> list[str]:
        if failures:
            raise OSError(failures.pop(), "stale")
        return real(fd)

    monkeypatch.setattr(os, "listdir", listdir)
    assert s.names(b"d") == {b"f"}
    failures.extend([errno.ESTALE, errno.ESTALE])
    assert caught(lambda: s.tier.listdir(b"d")).trouble is Trouble.DOWN


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, Trouble.DOWN),
        (errno.EROFS, Trouble.DOWN),
        (errno.EIO, Trouble.DOWN),
        (errno.ESTALE, Trouble.DOWN),
        (errno.ETIMEDOUT, Trouble.DOWN),
        (errno.ENOTCONN, Trouble.DOWN),
        (errno.EHOSTDOWN, Trouble.DOWN),
        (errno.ENOMEM, Trouble.DOWN),
        (errno.EACCES, Trouble.REFUSED),
        (errno.EPERM, Trouble.REFUSED),
        (errno.EDQUOT, Trouble.REFUSED),
        (errno.ENAMETOOLONG, Trouble.REFUSED),
        (errno.EINVAL, Trouble.REFUSED),
        (errno.ELOOP, Trouble.REFUSED),
        (errno.EFBIG, Trouble.REFUSED),
    ],
)
def test_errnos(code: int, expected: Trouble) -> None:
    error = file_errors.tier_error(OSError(code, os.strerror(code)), "doing it")
    assert (error.trouble, error.errno) == (expected, code)
    assert str(error) == f"doing it: {os.strerror(code)}"
