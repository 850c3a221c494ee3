"""Which chunks to send next: oldest versions first, settled ones only (flow, R4b, R5)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from ckptfs.core.model import Entry, EntryKind
from ckptfs.core.state import State
from ckptfs.tiers.base import Digest, Upload

SMALL = 1 << 20
"""Versions up to this many bytes go in one piece, many in one call."""

SMALL_BATCH = 64
SMALL_BATCH_BYTES = 8 << 20
LOOK_AHEAD = 2_000
"""How many log entries one planning step looks at."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Open the upload of a large version."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Chunk:
    """Send `length` bytes at `offset` of a version whose upload is open."""

    entry: Entry
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Small:
    """Send these whole versions in one call."""

    entries: tuple[Entry, ...]


Job = Begin | Chunk | Small


class Planner:
    """FIFO by log order, so that the oldest undurable byte never starves."""

    def __init__(self, state: State, *, settle_s: float) -> None:
        self.state = state
        self.settle_s = settle_s

    def next_jobs(self, now: float, limit: int, *, hurry: bool) -> list[Job]:
        """Up to `limit` jobs; each is in flight until one of the methods below is called for it.

        `hurry`: don't wait out the settle time (the cache is filling up, or somebody waits). Without it the
        first version that has not settled ends the look: what is behind it can't be published before it,
        and a burst of small files must not be walked through at every one of them.
        """
        jobs: list[Job] = []
        small: list[Entry] = []
        small_bytes = 0
        for e in islice(self.state.log.values(), LOOK_AHEAD):
            if len(jobs) >= limit:
                break
            if e.kind != EntryKind.PUT or e.complete:
                continue
            if not hurry and 0 <= now - e.first_at < self.settle_s:
                break
            if e.length <= SMALL:
                if e.in_flight or e.upload is not None:
                    continue
                small.append(e)
                small_bytes += e.length
                e.in_flight.add(0)
                if len(small) >= SMALL_BATCH or small_bytes >= SMALL_BATCH_BYTES:
                    jobs.append(Small(tuple(small)))
                    small, small_bytes = [], 0
            elif e.upload is None:
                if -1 not in e.in_flight:
                    e.in_flight.add(-1)
                    jobs.append(Begin(e))
            else:
                for offset in range(0, e.length, e.chunk):
                    if len(jobs) >= limit:
                        break
                    if offset not in e.sent and offset not in e.in_flight:
                        e.in_flight.add(offset)
                        jobs.append(Chunk(e, offset, min(e.chunk, e.length - offset)))
        if small:
            jobs.append(Small(tuple(small)))
        return jobs

    def next_due(self, now: float) -> float | None:
        """Seconds until an unsent version settles; None when there is none within sight."""
        for e in islice(self.state.log.values(), LOOK_AHEAD):
            if e.kind == EntryKind.PUT and e.untouched:
                return max(0.0, e.first_at + self.settle_s - now)
        return None

    def begun(self, entry: Entry, upload: Upload) -> None:
        """The upload is open (journal it before its first chunk)."""
        entry.in_flight.discard(-1)
        if entry.id not in self.state.log:
            self.state.abandoned.append((entry.id, upload))
            return
        entry.upload = upload
        self.state.touch_entry(entry)

    def sent(self, entry: Entry, upload: Upload, offset: int, length: int, xxh3: bytes) -> None:
        """A chunk (or a whole small version) is on the tier, unseen."""
        entry.in_flight.discard(offset)
        small = entry.length <= SMALL
        if entry.id not in self.state.log:
            if small:
                self.state.abandoned.append((entry.id, upload))
            return
        if small and entry.upload is None:
            entry.upload = upload
            self.state.touch_entry(entry)
        if entry.upload == upload:
            self.state.record_sent(entry, Digest(offset, length, xxh3))

    def failed(self, job: Job, *, redo: bool = False) -> None:
        """The job did not succeed: plan it again; `redo`: the upload itself is lost."""
        entries = job.entries if isinstance(job, Small) else (job.entry,)
        for e in entries:
            e.in_flight.discard(-1 if isinstance(job, Begin) else job.offset if isinstance(job, Chunk) else 0)
            if redo and e.id in self.state.log:
                self.state.forget_sent(e)
