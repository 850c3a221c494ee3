"""Hypothesis drives the core through any order of operations, completions, refusals and crashes.

After every step `World.check` compares mount, tier and journal with an independent model (R3, R6, R7,
invariants 1, 2, 5, 9). At the end the tier answers, everything open is closed and everything held is
decided, and the tier's tree must be the mount's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptfs.core import Node
from ckptfs.tiers.base import Kind

from .world import Crash, RefDir, World

T = TypeVar("T")
NAMES = [b"a", b"b", b"c", b"latest", b"x.log"]
pick = st.integers(0, 1 << 16)
name = st.sampled_from(NAMES)
dir_name = st.sampled_from([b"d", b"e", b"a"])
dies = st.sampled_from([False] * 9 + [True])


def choose(options: list[T], n: int) -> T:
    return options[n % len(options)]


def join(dir: bytes, name: bytes) -> bytes:
    return dir + b"/" + name if dir else name


class OrderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.w = World()
        self.wrong = False

    def run(self, call: Callable[[], object]) -> None:
        """A syscall that the process may not survive: then it did not happen."""
        try:
            call()
        except Crash:
            self.w.crash()

    @initialize(published=st.booleans())
    def start(self, published: bool) -> None:
        """A small tree to work in, mostly already on the tier."""
        w = self.w
        w.mkdir(b"d")
        for path in (b"a", b"d/b"):
            h = w.create(path)
            w.write(h, 0, 1)
            w.close(h)
        if published:
            w.drain()

    # -- files -------------------------------------------------------------------------------

    @rule(
        d=pick,
        n=name,
        cells=st.integers(0, 3),
        end=st.sampled_from(["close", "close", "open", "kill"]),
        die=dies,
    )
    def save(self, d: int, n: bytes, cells: int, end: str, die: bool) -> None:
        """Create or rewrite a file, as torch.save does."""
        w = self.w
        path = join(choose(w.dirs(), d), n)
        node = w.walk().get(path)
        if isinstance(node, RefDir) or len(w.handles) > 4:
            return
        if node is None:
            try:
                h = w.create(path, crash=die)
            except Crash:
                w.crash()
                return
        elif node.target is not None:
            return
        else:
            h = w.open(path, trunc=True)
        if cells:
            w.write(h, 0, cells)
        if end != "open":
            w.close(h, killed=end == "kill")

    @rule(f=pick, trunc=st.booleans())
    def open(self, f: int, trunc: bool) -> None:
        w = self.w
        files = [p for p in w.files() if w.ref_file(p).target is None]
        if files and len(w.handles) <= 4:
            w.open(choose(files, f), trunc=trunc)

    @precondition(lambda self: self.w.handles)
    @rule(h=pick, at=st.integers(0, 3), count=st.integers(1, 2), append=st.booleans())
    def write(self, h: int, at: int, count: int, append: bool) -> None:
        handle = choose(self.w.handles, h)
        end = len(handle.file.cells)
        if self.w.writable(handle):
            self.w.write(handle, end if append else min(at, end), count)

    @precondition(lambda self: self.w.handles)
    @rule(h=pick, cells=st.integers(0, 2))
    def truncate(self, h: int, cells: int) -> None:
        handle = choose(self.w.handles, h)
        if cells < len(handle.file.cells) and handle.linked and self.w.writable(handle):
            self.w.truncate(handle, cells)

    @precondition(lambda self: self.w.handles)
    @rule(h=pick, how=st.sampled_from(["flush", "seal", "close", "close", "kill"]))
    def end(self, h: int, how: str) -> None:
        handle = choose(self.w.handles, h)
        if how == "flush":
            self.w.flush(handle)
        elif how == "seal":
            self.w.seal_open(handle)
        else:
            self.w.close(handle, killed=how == "kill")

    # -- names -------------------------------------------------------------------------------

    @rule(d=pick, n=dir_name, die=dies)
    def mkdir(self, d: int, n: bytes, die: bool) -> None:
        path = join(choose(self.w.dirs(), d), n)
        if path not in self.w.walk() and path.count(b"/") < 3:
            self.run(lambda: self.w.mkdir(path, crash=die))

    @rule(d=pick, n=name, die=dies)
    def symlink(self, d: int, n: bytes, die: bool) -> None:
        path = join(choose(self.w.dirs(), d), n)
        if path not in self.w.walk():
            self.run(lambda: self.w.symlink(path, crash=die))

    @rule(f=pick, die=dies)
    def unlink(self, f: int, die: bool) -> None:
        if files := self.w.files():
            self.run(lambda: self.w.unlink(choose(files, f), crash=die))

    @rule(d=pick, die=dies)
    def rmdir(self, d: int, die: bool) -> None:
        w = self.w
        empty = [p for p in w.dirs() if p and not w.ref_dir(p).children]
        if empty:
            self.run(lambda: w.rmdir(choose(empty, d), crash=die))

    @rule(f=pick, d=pick, n=name, die=dies)
    def rename_file(self, f: int, d: int, n: bytes, die: bool) -> None:
        if files := self.w.files():
            self._rename(choose(files, f), join(choose(self.w.dirs(), d), n), die)

    @rule(f=pick, d=pick, n=dir_name, die=dies)
    def rename_dir(self, f: int, d: int, n: bytes, die: bool) -> None:
        dirs = self.w.dirs()
        if len(dirs) > 1:
            self._rename(choose(dirs[1:], f), join(choose(dirs, d), n), die)

    def _rename(self, src: bytes, dst: bytes, die: bool) -> None:
        w = self.w
        if src == dst:
            return
        node, old = w.node(src), w.walk().get(dst)
        wrong = 0
        if old is not None and isinstance(node, RefDir) != isinstance(old, RefDir):
            wrong = errno.EISDIR if isinstance(old, RefDir) else errno.ENOTDIR
        elif isinstance(old, RefDir) and old.children:
            wrong = errno.ENOTEMPTY
        elif dst.startswith(src + b"/"):
            wrong = errno.EINVAL
        if wrong:
            with pytest.raises(OSError) as caught:  # noqa: PT011
                w.rename(src, dst)
            assert caught.value.errno in (wrong, errno.EINVAL)
        else:
            self.run(lambda: w.rename(src, dst, crash=die))

    @rule(f=pick, mode=st.sampled_from([0o600, 0o700, 0o644]), die=dies)
    def chmod(self, f: int, mode: int, die: bool) -> None:
        if paths := list(self.w.walk()):
            self.run(lambda: self.w.chmod(choose(paths, f), mode, crash=die))

    # -- decisions ---------------------------------------------------------------------------

    def _held(self) -> list[bytes]:
        return [p for p in self.w.files() if self.w.ref_file(p).held]

    @precondition(_held)
    @rule(f=pick, publish=st.booleans())
    def decide(self, f: int, publish: bool) -> None:
        path = choose(self._held(), f)
        if publish:
            self.w.publish_held(path)
        else:
            self.w.discard(path)

    @precondition(lambda self: any(e.stuck for e in self.w.core.state.log.values()))
    @rule()
    def skip(self) -> None:
        self.w.skip(next(e for e in self.w.core.state.log.values() if e.stuck))

    def _graves(self) -> list[Node]:
        s = self.w.core.state
        asked = next(iter(s.log.values())).pos if s.log else s.last_id + 1
        graves = [n for n in s.graves.values() if n.present and n.held_by is None and n.dead_pos < asked]
        return graves if self.w.round is None else []

    @precondition(_graves)
    @rule(n=pick)
    def give_up(self, n: int) -> None:
        self.w.give_up_removal(choose(self._graves(), n))

    # -- the flow ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.w.now += seconds

    @rule(limit=st.integers(1, 8), hurry=st.booleans())
    def plan(self, limit: int, hurry: bool) -> None:
        self.w.plan(limit, hurry=hurry)

    @precondition(lambda self: self.w.jobs)
    @rule(j=pick, fate=st.sampled_from(["ok", "ok", "ok", "fail", "redo"]))
    def job(self, j: int, fate: str) -> None:
        self.w.do_job(choose(self.w.jobs, j), fate)

    @rule(hurry=st.booleans())
    def send_all(self, hurry: bool) -> None:
        w = self.w
        for _ in range(5):
            w.plan(64, hurry=hurry)
            while w.jobs:
                w.do_job(w.jobs[0])

    @precondition(lambda self: self.w.round is None)
    @rule(
        kind=st.sampled_from(["publish", "publish", "removals", "attrs"]),
        limit=st.sampled_from([1, 2, 64]),
        fault=st.sampled_from(["", "", "", "down", "lost", "refuse", "redo"]),
        at=st.integers(0, 4),
        stop=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def round(self, kind: str, limit: int, fault: str, at: int, stop: int) -> None:
        """A round of the publisher, or only its first one or two thirds."""
        w = self.w
        take = {"publish": w.publish_take, "removals": w.removals_take, "attrs": w.attrs_take}[kind]
        if take(limit) and stop != 1:
            w.round_apply(fault, at)
            if stop != 2:
                w.round_answer()

    @precondition(lambda self: self.w.round is not None)
    @rule(fault=st.sampled_from(["", "", "down", "lost", "refuse", "redo"]), at=st.integers(0, 4))
    def round_on(self, fault: str, at: int) -> None:
        w = self.w
        assert w.round is not None
        if w.round.answers is None:
            w.round_apply(fault, at)
        else:
            w.round_answer()

    # -- the tier and other writers ----------------------------------------------------------

    @rule(d=pick, n=st.none() | name)
    def ask(self, d: int, n: bytes | None) -> None:
        if len(self.w.questions) < 4:
            self.w.ask(choose(self.w.dirs(), d), n)

    @precondition(lambda self: self.w.questions)
    @rule(q=pick, late=st.booleans())
    def merge(self, q: int, late: bool) -> None:
        self.w.merge(choose(self.w.questions, q), late=late)

    @rule()
    def look(self) -> None:
        self.w.look_everywhere()

    @rule(d=pick, n=name)
    def foreign_put(self, d: int, n: bytes) -> None:
        visible = self.w.tier.visible()
        dirs = [b"", *(p for p, o in visible.items() if o.kind == Kind.DIR)]
        path = join(choose(dirs, d), n)
        there = visible.get(path)
        if there is None or there.kind != Kind.DIR:
            self.w.foreign_put(path)

    @rule(d=pick, n=dir_name)
    def foreign_mkdir(self, d: int, n: bytes) -> None:
        visible = self.w.tier.visible()
        dirs = [b"", *(p for p, o in visible.items() if o.kind == Kind.DIR)]
        path = join(choose(dirs, d), n)
        if path not in visible and path.count(b"/") < 3:
            self.w.foreign_mkdir(path)

    @rule(f=pick)
    def foreign_remove(self, f: int) -> None:
        if paths := list(self.w.tier.visible()):
            self.w.foreign_remove(choose(paths, f))

    # -- the journal -------------------------------------------------------------------------

    @rule(full=st.booleans())
    def fill_journal(self, full: bool) -> None:
        """No room for the journal, for a while: nothing is committed, all of it later."""
        if full:
            self.w.full = True
        else:
            self.w.relieve()

    @rule()
    def crash(self) -> None:
        self.w.crash()

    @invariant()
    def all_is_right(self) -> None:
        self.wrong = True
        self.w.check()
        self.wrong = False

    def teardown(self) -> None:
        w = self.w
        if self.wrong:
            return
        w.drain()
        while w.handles:
            w.close(w.handles[0])
        while w.questions:
            w.merge(w.questions[0])
        for i, path in enumerate(self._held()):
            if path in w.walk() and w.ref_file(path).held:
                if i % 2:
                    w.discard(path)
                else:
                    w.publish_held(path)
        w.drain()
        w.check_drained()


TestOrderMachine = OrderMachine.TestCase
