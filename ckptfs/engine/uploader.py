"""Sends chunks: planned oldest first, in parallel over the workers' lanes, retried for ever."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import trio

from ckptfs.core import Entry
from ckptfs.core.plan import Begin, Chunk, Job, Small
from ckptfs.engine.hub import SENDING, Hub
from ckptfs.engine.supervise import attempted
from ckptfs.tiers.base import Draft, Failed, Source, TierError, Trouble, Upload

log = logging.getLogger("ckptfs")

BACKOFF_CAP_S = 5.0
BACKOFF_TRIES = 6
"""What a failure counts for that is a defect of ours: longer than most, but no stop."""
STUCK_RETRY_S = 15.0

QUIET_S = 0.2
BUSY_BYTES = 8 << 20
"""More than this many bytes written within `QUIET_S` is a checkpoint being written."""

BURST_S = 0.01
"""While there is nothing to do, a burst of closes wakes the planner (or publisher) once, not once each."""


def backoff(tries: int) -> float:
    """Seconds to wait before another try: full jitter, so that many lanes don't come back as one."""
    return random.uniform(0.0, min(BACKOFF_CAP_S, 0.05 * 2 ** min(tries, 8)))


class Uploader:
    """Keeps every lane busy while there is something to send."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.lanes = hub.config.workers * hub.config.worker_threads
        self._nursery: trio.Nursery
        self._busy = 0
        self._tries = 0
        self._absorbed = 0
        self._absorbing_until = 0.0

    async def run(self) -> None:
        """For ever."""
        hub = self.hub
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await hub.committed()  # first the journal forgets what is abandoned, and has what is begun
                if abandoned := hub.core.state.take_abandoned():
                    nursery.start_soon(attempted, hub, partial(self._abandon, abandoned), "giving up uploads")
                if not hub.core.state.log:
                    hub.health.up(SENDING)
                now = time.time()
                free = 0 if hub.blind else self._lanes_now() - self._busy
                jobs = hub.core.planner.next_jobs(now, free, hurry=hub.hurry()) if free > 0 else []
                hub.counters.reuploaded_bytes += hub.core.planner.take_reuploaded()
                if hub.core.state.changed:  # what travels with its publishing is ready for it
                    hub.commit()
                    hub.work.beat()
                for job in jobs:
                    self._start(job)
                due = hub.core.planner.next_due(now)
                pause = QUIET_S if self._absorbing_until else 1.0
                await hub.work.wait(pause if due is None else min(pause, due + 0.005))
                if not jobs:
                    await trio.sleep(BURST_S)

    def _lanes_now(self) -> int:
        """Few lanes while a checkpoint is being written: the trainer waits for that, not for the flush.

        All of them as soon as writers have to wait for the flush, or nobody writes.
        """
        total = self.hub.counters.absorbed.total
        now = time.monotonic()
        if total - self._absorbed >= BUSY_BYTES:
            self._absorbed = total
            self._absorbing_until = now + QUIET_S
        elif now >= self._absorbing_until:
            self._absorbed = total
            self._absorbing_until = 0.0
        if self._absorbing_until and not self.hub.counters.writers_waiting:
            return max(1, self.lanes // 4)
        return self.lanes

    def _start(self, job: Job) -> None:
        self._busy += 1
        self._nursery.start_soon(self._lane, job)

    async def _lane(self, job: Job) -> None:
        upload = job.entry.upload if isinstance(job, Chunk) else None
        try:
            await self._do(job)
            self._tries = 0
            self.hub.health.up(SENDING)
        except TierError as e:
            await self._failed(job, e, upload)
        except Exception:
            self.hub.counters.errors += 1
            log.exception("internal error while sending; it is sent again")
            await trio.sleep(backoff(BACKOFF_TRIES))
            self.hub.core.planner.failed(job)
        except trio.Cancelled:
            self.hub.core.planner.failed(job)  # the uploader itself begins anew
            raise
        finally:
            self._busy -= 1
            self.hub.work.beat()

    async def _failed(self, job: Job, e: TierError, upload: Upload | None) -> None:
        """The job stays in flight while it backs off, so that nobody plans it again meanwhile.

        `upload`: where a chunk was to go.
        """
        core = self.hub.core
        entries = job.entries if isinstance(job, Small) else (job.entry,)
        if e.trouble == Trouble.REFUSED and len(entries) > 1:
            # One of them is refused. Which one, they tell when sent alone; the others are not stuck.
            for entry in entries:
                self._start(Small((entry,)))
            return
        delay = backoff(self._tries)
        if e.trouble == Trouble.DOWN:
            self._tries += 1
            self.hub.health.down(SENDING, e)
        elif e.trouble == Trouble.REFUSED:
            for entry in entries:
                if entry.id in core.state.log:
                    if not entry.stuck:
                        log.error("%s is stuck: %s", os.fsdecode(entry.path()), e.message)
                    core.order.refused(entry, Failed(e.trouble, e.message, e.errno), time.time())
            self.hub.commit()
            self.hub.changed.beat()
            delay = random.uniform(STUCK_RETRY_S / 2, STUCK_RETRY_S)
        await self._pause(delay, entries)
        # Of several lanes that find an upload gone the first begins it anew.
        redo = e.trouble == Trouble.REDO and (upload is None or job_upload(job) is upload)
        if redo:
            log.warning("sending again: %s", e.message)
            self.hub.counters.reuploaded_bytes += sum(x.sent_bytes for x in entries)
        core.planner.failed(job, redo=redo)
        self.hub.commit()

    async def _pause(self, seconds: float, entries: Sequence[Entry]) -> None:
        """Sleep; shorter when the entries are skipped meanwhile, since others need the lane."""
        until = trio.current_time() + seconds
        alive = self.hub.core.state.log
        while (left := until - trio.current_time()) > 0 and any(e.id in alive for e in entries):
            await self.hub.changed.wait(left)

    async def _do(self, job: Job) -> None:
        if isinstance(job, Begin):
            await self._begin(job)
        elif isinstance(job, Chunk):
            await self._chunk(job)
        else:
            await self._small(job)
        self.hub.commit()

    @staticmethod
    def _draft(e: Entry, path: bytes) -> Draft:
        return Draft(e.version, path, e.length, e.chunk, e.attrs())

    async def _begin(self, job: Begin) -> None:
        # For the path it was planned for: about the present one there may be earlier entries (R5).
        upload = await self.hub.pool.call("begin", self._draft(job.entry, job.path))
        self.hub.core.planner.begun(job.entry, upload)

    async def _chunk(self, job: Chunk) -> None:
        await self.hub.limiter.take(job.length)
        e, upload = job.entry, job.entry.upload
        if upload is None or e.id not in self.hub.core.state.log:
            e.in_flight.discard(job.offset)  # begun anew, or skipped, since this was planned
            return
        source, unpin = self._source(e, job.offset, job.length)
        try:
            xxh3 = await self.hub.pool.call("send", upload, job.offset, source)
        finally:
            unpin()
        self._arrived(e, upload, job.offset, job.length, xxh3)

    async def _small(self, job: Small) -> None:
        await self.hub.limiter.take(sum(e.length for e in job.entries))
        batch = []
        unpins = []
        entries = [e for e in job.entries if e.id in self.hub.core.state.log]
        try:
            for e in entries:
                source, unpin = self._source(e, 0, e.length)
                unpins.append(unpin)
                batch.append((self._draft(e, e.path()), source))
            answers = await self.hub.pool.call("send_small", batch)
        finally:
            for unpin in unpins:
                unpin()
        for e, (upload, xxh3) in zip(entries, answers, strict=True):
            self._arrived(e, upload, 0, e.length, xxh3)

    def _source(self, e: Entry, offset: int, length: int) -> tuple[Source, Callable[[], None]]:
        staging = self.hub.staging
        blob = staging.blobs.get(e.data)
        if blob is None:
            raise TierError(Trouble.REFUSED, f"the staged bytes of {os.fsdecode(e.path())} are missing")
        return staging.pin(blob, offset, length), lambda: staging.unpin(blob)

    def _arrived(self, e: Entry, upload: Upload, offset: int, length: int, xxh3: bytes) -> None:
        self.hub.core.planner.sent(e, upload, offset, length, xxh3)
        self.hub.core.order.unstick(e)
        self.hub.counters.flushed.add(length)

    async def _abandon(self, uploads: list[Upload]) -> None:
        """Remove hidden bytes that will not be published."""
        tries = 0
        while True:
            try:
                await self.hub.pool.call("abandon", uploads)
                return
            except TierError as e:
                self.hub.health.down(SENDING, e)
                await trio.sleep(backoff(tries))
                tries += 1


def job_upload(job: Job) -> Upload | None:
    """Where the job's bytes go now."""
    return job.entry.upload if isinstance(job, Chunk) else None
