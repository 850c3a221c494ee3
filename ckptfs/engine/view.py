"""The merged view of names: what the core knows, refreshed from the tier in time (W2)."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from ckptfs.core import Inode
from ckptfs.engine.hub import READING, Hub
from ckptfs.engine.supervise import attempted
from ckptfs.tiers.base import Kind, TierError, Trouble

log = logging.getLogger("ckptfs")

LIST_AT_MOST = 2_000
"""A directory with more known names than this is asked about single names instead of listed again."""

PATIENCE_S = 1.0
"""How long the tier may take to say what is new where something is known already. A tier that hangs
(a hard NFS mount without its server) is not waited for again before it has answered."""


START_S = 5.0
START_DIRS = 200
"""How long, and at how many directories, to look when mounting."""


class _Question:
    """One that the tier has not answered yet."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.since = time.monotonic()


class View:
    """Looks names up. Local state answers at once; the tier is asked through a worker, in the background
    of `nursery`, and only waited for without limit where nothing is known."""

    def __init__(self, hub: Hub, nursery: trio.Nursery) -> None:
        self.hub = hub
        self.nursery = nursery
        self.timeout = hub.config.attr_timeout
        self._listed: dict[int, float] = {}
        self._checked: dict[tuple[int, bytes], float] = {}
        self._questions: dict[tuple[int, bytes], _Question] = {}

    def _on_tier(self, dir: Inode) -> bool:
        return dir.node is not None and dir.node.present and not dir.dead

    def _fresh(self, dir: Inode) -> bool:
        return time.monotonic() - self._listed.get(dir.ino, -1e9) < self.timeout

    def made(self, dir: Inode) -> None:
        """A directory was made here: all of its names are known, whether the tier answers or not."""
        self._listed.setdefault(dir.ino, -1e9)

    async def get_acquainted(self) -> None:
        """At the start: look at the root, and begin to look at the directories that the journal knows, so
        that their names are known in case the tier hangs later."""
        state = self.hub.core.state
        with trio.move_on_after(START_S):
            await self.refresh(state.root)
        dirs = [i for i in state.inodes.values() if i.kind == Kind.DIR and self._on_tier(i)]
        look = partial(self._look_ahead, dirs[:START_DIRS])
        self.nursery.start_soon(attempted, self.hub, look, "looking ahead")

    async def _look_ahead(self, dirs: list[Inode]) -> None:
        for dir in dirs:
            await self.refresh(dir)

    async def lookup(self, dir: Inode, name: bytes) -> Inode | None:
        """The inode under a name, or None. Waits for the tier only when nothing is known."""
        child = dir.children.get(name)
        if child is not None and (child.local or child.pending or child.node is None):
            return child
        if not self._on_tier(dir) or self._fresh(dir):
            return child
        if (dir.ino, name) in self.hub.core.state.targets:
            return child
        if len(dir.children) <= LIST_AT_MOST or dir.ino not in self._listed:
            await self.refresh(dir, known=child is not None)
        else:
            await self._check_name(dir, name)
        return dir.children.get(name)

    async def refresh(self, dir: Inode, *, force: bool = False, known: bool = False) -> None:
        """Make the known children of a directory those of the tier, unless that was done just now.

        `known`: what is known already will do when the tier is slow.
        """
        if not self._on_tier(dir) or (self._fresh(dir) and not force):
            return
        known = known or dir.ino in self._listed or self.hub.blind
        await self._ask((dir.ino, b""), lambda: self._list(dir), known)

    async def refresh_above(self, inode: Inode) -> None:
        """Before a directory is judged empty."""
        if inode.kind == Kind.DIR:
            await self.refresh(inode, force=True)

    def remaining(self, inode: Inode) -> float:
        """How long the kernel may go by what it knows of the inode's name, in seconds (W2): not beyond the
        attribute time-out since the tier was asked."""
        dir, name = inode.parent, inode.name
        if dir is None or name is None or not self._on_tier(dir):
            return self.timeout
        if inode.local or inode.pending or inode.node is None:
            return self.timeout
        asked = max(self._listed.get(dir.ino, -1e9), self._checked.get((dir.ino, name), -1e9))
        return min(self.timeout, max(0.0, asked + self.timeout - time.monotonic()))

    def expire(self, dir: Inode) -> None:
        """Ask the tier again at the next look into this directory."""
        if dir.ino in self._listed:
            self._listed[dir.ino] = -1e9

    # -- asking ------------------------------------------------------------------------------

    async def _ask(self, key: tuple[int, bytes], job: Callable[[], Awaitable[None]], known: bool) -> None:
        """Run `job`, or wait for the one that runs."""
        question = self._questions.get(key)
        if question is None:
            hangs = self._hangs()
            question = self._questions[key] = _Question()
            self.nursery.start_soon(self._answer, key, question, job)
        else:
            hangs = self._hangs()
        if not known:
            await question.answered.wait()
        elif not hangs:
            with trio.move_on_after(PATIENCE_S):
                await question.answered.wait()

    async def _answer(
        self, key: tuple[int, bytes], question: _Question, job: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await job()
        except Exception:
            self.hub.counters.errors += 1
            log.exception("internal error while looking at the tier")
        finally:
            del self._questions[key]
            question.answered.set()

    def _hangs(self) -> bool:
        if self.hub.blind:
            return True
        late = time.monotonic() - PATIENCE_S
        return any(q.since < late for q in self._questions.values())

    async def _check_name(self, dir: Inode, name: bytes) -> None:
        if time.monotonic() - self._checked.get((dir.ino, name), -1e9) >= self.timeout:
            await self._ask((dir.ino, name), lambda: self._look(dir, name), known=True)

    async def _look(self, dir: Inode, name: bytes) -> None:
        started = time.monotonic()
        tier = self.hub.core.tier
        asked = tier.ask()
        path = tier.tier_path(dir)
        if path is None:
            tier.give_up(asked)
            return
        try:
            found = await self.hub.pool.call("stat", path + b"/" + name if path else name)
        except TierError as e:
            tier.give_up(asked)
            self.hub.health.down(READING, e)
            return
        except BaseException:
            tier.give_up(asked)
            raise
        tier.merge_one(dir, name, asked, found)
        self.hub.commit()
        if len(self._checked) > 10_000:
            self._checked.clear()
        self._checked[(dir.ino, name)] = started

    async def _list(self, dir: Inode) -> None:
        tier = self.hub.core.tier
        tries = 0
        while self._on_tier(dir):
            if tries and dir.ino in self._listed:
                return  # what was known last must do
            tries += 1
            asked = tier.ask()
            path = tier.tier_path(dir)
            assert path is not None
            started = time.monotonic()
            try:
                heads = self.hub.core.planner.traits.heads
                familiar = tier.familiar(dir) if heads else None
                listing = await self.hub.pool.call("listdir", path, familiar)
            except TierError as e:
                gone = e.trouble == Trouble.CHANGED and e.errno in (errno.ENOENT, errno.ENOTDIR)
                if gone and tier.same_place(dir, asked):
                    tier.dir_vanished(dir, asked)
                    self.hub.commit()
                    return
                tier.give_up(asked)
                if not gone:
                    self.hub.health.down(READING, e)
                    await trio.sleep(random.uniform(0, min(2.0, 0.05 * 2 ** min(tries, 6))))
                else:
                    await self.hub.changed.wait(0.05)  # a rename of ours is on its way
                continue
            except BaseException:
                tier.give_up(asked)
                raise
            self.hub.health.up(READING)
            if not tier.same_place(dir, asked):
                tier.give_up(asked)
                await self.hub.changed.wait(0.05)
                continue
            tier.merge_listing(dir, asked, listing)
            self._listed[dir.ino] = started
            if self.hub.core.state.changed:
                self.hub.commit()
            return
