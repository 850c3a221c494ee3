"""Who may put how many bytes into staging, and what is done when there is no room (rules B1-B7)."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from functools import partial

import trio

from ckptfs.core import EntryKind
from ckptfs.engine.hub import BEHIND_S, Hub
from ckptfs.staging import EXTENT
from ckptfs.staging.area import MARGIN
from ckptfs.tiers.base import TierError, Trouble

log = logging.getLogger("ckptfs")

STEP_S = 0.1
"""A waiting writer looks for a pending signal this often (B7)."""

PATIENCE_S = 3.0
"""After this long a writer that may be given a short count gets one, from the reserve, so that
renames, unlinks and listings waiting for its inode go on (B7)."""

SIP = 4096
"""Bytes of such a short write."""

RESERVE = MARGIN // 2
"""How far short writes may exceed the budget together; the staging tmpfs has the room."""

FIRM_PATIENCE_S = 5.0
"""How long a write that can't be refused without losing mapped stores waits when nothing can free room."""

SPILL_PARALLEL = 4

SHARED_RESERVE = 64 << 20
"""Bytes left free on a staging file system that is not ours alone: the journal is there too."""


class Admission:
    """The budget's gate. `limit` is the budget now, in bytes: the configured one, or less under memory
    pressure (B6)."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.limit = hub.budget
        self.room: Callable[[], tuple[int, int] | None] = lambda: None
        """(free, total) bytes of a staging file system that others fill too; None: it is ours alone."""
        self.keep_reserve: Callable[[], None] = lambda: None
        """Holds back room there for the journal, if it does not already and there is plenty."""
        self._wanted: list[int] = []
        """Sizes that are being waited for."""
        self._spilling = 0
        self._spill_wanted = trio.Event()
        self._spill_failed_at = 0.0
        self._said = 0.0

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes are within the budget now."""
        return self.hub.staging.used + size <= self.limit

    async def admit(
        self,
        size: int,
        *,
        interrupted: Callable[[], bool] | None = None,
        path: Callable[[], bytes],
        moot: Callable[[], bool] = lambda: False,
    ) -> int:
        """Wait until `size` bytes may be written, or `moot` says that nobody wants to; returns how many may.

        With `interrupted` the caller takes a short count, and EINTR when it says that a signal is
        pending. Without, all of `size` is admitted. ENOSPC by rule B1 only.
        """
        if self.fits(size):
            return size
        counters = self.hub.counters
        started = last = time.monotonic()
        counters.writers_waiting += 1
        self._wanted.append(size)
        self.hub.work.beat()
        try:
            while True:
                staging = self.hub.staging
                staging.evict(staging.used + size - self.limit)
                if self.fits(size) or moot():
                    return size
                waited = time.monotonic() - started
                if not self._relief() and (interrupted is not None or waited > FIRM_PATIENCE_S):
                    log.error(
                        "no space for %s: the cache of %d bytes is full of files still being written, and"
                        " there is no room to spill; enlarge --cache-size or --spill-size",
                        os.fsdecode(path()), self.limit,
                    )  # fmt: skip
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                await self.hub.room.wait(STEP_S)
                now = time.monotonic()
                counters.held_back_s += now - last
                last = now
                if interrupted is not None and not self.fits(size):
                    if interrupted():
                        raise OSError(errno.EINTR, os.strerror(errno.EINTR))
                    sip = min(size, SIP)
                    if now - started > PATIENCE_S and staging.used + sip <= self.limit + RESERVE:
                        return sip
        finally:
            counters.writers_waiting -= 1
            self._wanted.remove(size)

    async def admit_all(
        self,
        size: int,
        *,
        interrupted: Callable[[], bool] | None,
        path: Callable[[], bytes],
        moot: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until `size` bytes fit, for a copy that can't be made in pieces, or until it is `moot`."""
        while not self.fits(size) and not moot():
            await self.admit(size, interrupted=interrupted, path=path, moot=moot)

    def _relief(self) -> bool:
        """Whether room will come: an upload of a sealed version, a spill, or the tier's return (B1)."""
        stuck = False
        sealed = False
        for e in self.hub.core.state.log.values():
            if e.stuck:
                stuck = True
                break
            if e.kind == EntryKind.PUT:
                blob = self.hub.staging.blobs.get(e.data)
                if blob is not None and (blob.ram or blob.spilled):
                    sealed = True
                    break
        uploading = sealed and not stuck and self.hub.health.state == "up"
        if uploading:
            return True
        if self._can_spill():
            self._spill_wanted.set()
            return True
        return (
            self._spilling > 0
            or (sealed and not stuck)
            or self._under_pressure()
            or bool(self.hub.behind)  # what the journal will let go of is room
        )

    def _under_pressure(self) -> bool:
        """The limit is lowered for the machine's sake: admission slows, it does not fail (B6)."""
        return self.limit < self.hub.budget

    @property
    def headroom(self) -> int:
        """Bytes that a spill frees beyond what is asked for."""
        return min(self.limit // 8, 64 << 20)

    def _can_spill(self) -> bool:
        hub = self.hub
        if not hub.config.spill_dir or hub.staging.spill_dir is None:
            return False
        if time.monotonic() - self._spill_failed_at < 5.0 and self._spill_failed_at:
            return False
        in_use = hub.staging.spilled_bytes + self._spilling * EXTENT
        return in_use + EXTENT <= hub.config.spill_size and bool(hub.staging.spill_candidates(1))

    async def run_spill(self) -> None:
        """Move extents to the spill while writers need it."""
        while True:
            await self._spill_wanted.wait()
            self._spill_wanted = trio.Event()
            async with trio.open_nursery() as nursery:
                for _ in range(SPILL_PARALLEL):
                    nursery.start_soon(self._spill_lane)

    def _goal(self) -> int:
        """Spill until no more than this is used."""
        sizes = (size for size in self._wanted if size <= self.limit)
        return self.limit - max(self.headroom, max(sizes, default=0))

    async def _spill_lane(self) -> None:
        hub = self.hub
        while hub.staging.used > self._goal() and self._can_spill():
            blob, extent = hub.staging.spill_candidates(1)[0]
            self._spilling += 1
            hub.staging.spill_started(blob, extent)
            ok = False
            try:
                await hub.local(
                    "spill", blob.path, blob.spill_path, extent * EXTENT, EXTENT, hub.durable_staging
                )
                if hub.staging.may_punch(blob):
                    hub.spilled_ids.add(blob.id)
                    ok = hub.journaled(partial(hub.journal.add_spilled, blob.id, extent))
                    if not ok:  # nothing is wrong with the spill
                        await trio.sleep(BEHIND_S)
            except TierError as e:
                if e.trouble == Trouble.REDO:
                    continue  # published or given up meanwhile: there is nothing to spill any more
                self._spill_failed_at = time.monotonic()
                log.warning("spilling to %s failed: %s", hub.config.spill_dir, e)
                return
            finally:
                self._spilling -= 1
                hub.staging.spill_done(blob, extent, ok)

    # -- the machine's memory (B6) -------------------------------------------------------------

    def fit(self) -> None:
        """Set the budget by the room of a staging file system that others fill too, and where the journal
        needs some as well."""
        room = self.room()
        if room is None:
            return
        self.keep_reserve()
        free, size = room
        reserve = min(SHARED_RESERVE, size * 3 // 8)
        self.hub.budget = max(EXTENT, min(self.hub.config.cache_size, self.hub.staging.used + free - reserve))
        self.limit = min(self.limit, self.hub.budget)

    async def run_pressure(self, available: Callable[[], int], total: int) -> None:
        """Keep `memory_floor` of the machine free: clean cache goes first, then admission slows.

        `available` gives the bytes the machine can still hand out.
        """
        floor = int(self.hub.config.memory_floor * total)
        while True:
            self.fit()
            free = available()
            staging = self.hub.staging
            if free < floor:
                staging.evict(floor - free)
                free = available()
            if free < floor:
                limit = max(EXTENT, min(self.hub.budget, staging.used - (floor - free)))
                if time.monotonic() - self._said > 60:
                    self._said = time.monotonic()
                    log.warning(
                        "the machine has only %d MiB available: writers are slowed down until there is more",
                        free >> 20,
                    )
            else:
                limit = min(self.hub.budget, staging.used + (free - floor))
            if limit > self.limit:
                self.hub.room.beat()
            self.limit = limit
            await trio.sleep(0.25 if free < 2 * floor else 1.0)
