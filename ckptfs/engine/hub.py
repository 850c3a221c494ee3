"""What the parts of the engine share: the core, its journal, the staging, and news of changes."""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import trio

from ckptfs.config import Config
from ckptfs.core import Core, Inode
from ckptfs.engine.limit import Limiter
from ckptfs.flush.pool import WorkerDied, WorkerPool
from ckptfs.journal.journal import Journal
from ckptfs.staging import Blob, Staging
from ckptfs.tiers.base import TierError, Trouble

log = logging.getLogger("ckptfs")

JOURNAL_RESERVE = 32 << 20
"""Bytes of the journal's file system that new names don't use."""

BEHIND_S = 0.1
"""How often a journal that can't be written is tried again."""

WORKER_DEATHS = 10
"""A local job is begun again this often when its worker dies."""


class Pulse:
    """An event that can happen again and again: `wait` returns at the next `beat`."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def beat(self) -> None:
        """Wake all who wait now."""
        if self._event.statistics().tasks_waiting:
            self._event.set()
            self._event = trio.Event()

    async def wait(self, timeout: float) -> None:
        """Until the next beat, or `timeout` seconds."""
        with trio.move_on_after(timeout):
            await self._event.wait()


class Rate:
    """Bytes per second over the last few seconds."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, count: int) -> None:
        """Bytes that just passed."""
        self.total += count

    def sample(self, now: float) -> None:
        """Remember the total; called about twice a second."""
        self._marks.append((now, self.total))
        while len(self._marks) > 2 and self._marks[0][0] < now - self.WINDOW_S:
            self._marks.popleft()

    def per_second(self, now: float) -> float:
        """The rate."""
        if not self._marks:
            return 0.0
        t, total = self._marks[0]
        return (self.total - total) / max(0.25, now - t)


READING, SENDING, PUBLISHING, HANGING = "reading", "sending", "publishing", "hanging"
"""What the tier may fail at: a full one can be read and published to, a read-only one read."""


@dataclass
class Health:
    """How the tier is. `since` in seconds since the epoch."""

    since: float = field(default_factory=time.time)
    _errors: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """`up` or `down`."""
        return "down" if self._errors else "up"

    @property
    def error(self) -> str:
        """What went wrong last, empty when nothing is wrong."""
        return next(reversed(self._errors.values()), "")

    def up(self, what: str) -> None:
        """It did this."""
        if not self._errors:
            return
        self._errors.pop(what, None)
        if what in (SENDING, PUBLISHING):
            self._errors.pop(READING, None)
        if not self._errors:
            log.info("the tier answers again after %.1f s", time.time() - self.since)
            self.since = time.time()

    def down(self, what: str, error: TierError) -> None:
        """It did not (the death of a worker says nothing about it)."""
        if error.trouble not in (Trouble.DOWN, Trouble.REFUSED) or isinstance(error, WorkerDied):
            return
        if not self._errors:
            log.warning("the tier does not answer: %s; retrying until it does", error.message)
            self.since = time.time()
        self._errors.pop(what, None)
        self._errors[what] = error.message


@dataclass
class Counters:
    """What status tells besides the state itself."""

    absorbed: Rate = field(default_factory=Rate)
    flushed: Rate = field(default_factory=Rate)
    held_back_s: float = 0.0
    writers_waiting: int = 0
    reuploaded_bytes: int = 0
    errors: int = 0
    last_durable_path: str = ""
    last_durable_time: float = 0.0
    started: float = field(default_factory=time.time)


class Hub:
    """Shared by all parts. Everything runs on the one trio thread, so a step without `await` is atomic."""

    def __init__(
        self, config: Config, core: Core, journal: Journal, staging: Staging, pool: WorkerPool
    ) -> None:
        self.config = config
        self.core = core
        self.journal = journal
        self.staging = staging
        self.pool = pool
        self.health = Health()
        self.counters = Counters()
        self.work = Pulse()
        """Something may be sent or published."""
        self.changed = Pulse()
        """Something became durable, or stuck."""
        self.room = Pulse()
        """Staging memory was freed."""
        self.budget = config.cache_size
        """Bytes that staging may use: as configured, or less where others fill its file system."""
        self.limiter = Limiter(config.flush_limit)
        self.waiting_for_durable = 0
        self.draining = False
        self.blind = False
        """The tier has not answered since the mount: what is on it is not known yet, and nothing is sent."""
        self.spilled_ids: set[int] = set()
        self.open_writers: dict[int, Inode] = {}
        """Inodes open for writing."""
        self.durable_staging = bool(config.cache_dir)
        self.behind = ""
        """Why the journal does not have everything that the core has, empty when it has (`commit`)."""
        self.last_resort: Callable[[], bool] = lambda: False
        """Gives the journal room that was kept for it; False when there is none."""
        self._said = -1e9
        self.misses = 0
        """How often a commit failed."""
        self._given_up: set[int] = set()
        """Blobs whose spilled extents must not count any more, which the journal has not heard of."""
        staging.freed = self.room.beat

    def commit(self) -> None:
        """Journal what the core changed, then delete the staging nobody needs. Before every reply.

        When the journal can't be written, nothing is lost or undone: `behind` says so, the changes wait
        for the next commit, and whoever must not go on before they are journaled awaits `committed`.
        """
        if self.journaled(self._commit) and self.behind:
            self.behind = ""
            log.warning("the journal can be written again")

    def _commit(self) -> None:
        state = self.core.state
        if self._given_up:
            self._drop_rows(self._given_up)
            self._given_up.clear()
        if state.changed:
            changes = state.take_changes()
            try:
                self.journal.commit(changes)
            except BaseException:
                state.put_back(changes)
                raise
        if state.freed:
            self._drop_rows(d for d in state.freed if d in self.spilled_ids or self.durable_staging)
            for data in state.take_freed():
                self.staging.delete(data)

    def _fell_behind(self, error: OSError) -> None:
        self.misses += 1
        if not self.behind:
            log.error("the journal can't be written (%s): changes wait until it can", error.strerror)
        self.behind = str(error.strerror)

    def journaled(self, write: Callable[[], None]) -> bool:
        """Write rows; False when the journal can't be written now."""
        while True:
            try:
                write()
            except OSError as e:
                if self.last_resort():
                    continue
                self._fell_behind(e)
                return False
            return True

    def takes_names(self) -> bool:
        """Whether the journal has room for more names. The last of its room is kept for what must not
        fail: closes, renames, removals, publishing."""
        if self.behind:
            self.commit()
        roomy = not self.behind and self.journal.has_room(JOURNAL_RESERVE)
        if not roomy and time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            log.error(
                "no room for more names in the journal %s: files are not made until others are on the tier",
                self.journal.path,
            )
        return roomy

    def _drop_rows(self, blobs: Iterable[int]) -> None:
        rows = set(blobs)
        self.journal.drop_data(rows)
        self.spilled_ids -= rows

    async def committed(self, moot: Callable[[], bool] = lambda: False) -> None:
        """Commit, and wait until the journal has it all: trouble there is latency too, not an error.
        Or until it is `moot`, because who waits is being killed."""
        self.commit()
        while self.behind and not moot():
            await trio.sleep(BEHIND_S)
            self.commit()

    def make_dirty(self, blob: Blob) -> None:
        """A blob is about to be written. What was spilled of it, and given up when it became clean, must
        not count after a crash: the next commit says so first."""
        if blob.clean and blob.id in self.spilled_ids:
            self._given_up.add(blob.id)
        self.staging.make_dirty(blob)

    def hurry(self) -> bool:
        """Whether to send without waiting out the settle time."""
        return (
            self.draining
            or self.waiting_for_durable > 0
            or self.counters.writers_waiting > 0
            or self.staging.used * 2 > self.budget
        )

    async def local(self, method: str, *args: Any) -> Any:
        """Run a job of `flush/local.py` on staging files; again when its worker dies in the middle.

        Only so often, lest a job that kills every worker keeps the mount without any.
        """
        for _ in range(WORKER_DEATHS):
            try:
                return await self.pool.call(method, *args)
            except WorkerDied as e:
                log.warning("%s is begun again: %s", method, e.message)
        return await self.pool.call(method, *args)

    def new_data(self) -> int:
        """Id of a new staging file."""
        return self.core.state.next_id()

    def fsync_policy(self, inode: Inode) -> str:
        """`cache` or `tier` for this file: the first matching rule, else the mount's."""
        if self.config.fsync_rules:
            path = os.fsdecode(inode.path())
            for glob, policy in self.config.fsync_rules:
                if fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path.rsplit("/", 1)[-1], glob):
                    return policy
        return self.config.fsync
