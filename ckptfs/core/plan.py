"""Which chunks to send next: oldest versions first, settled ones only (flow, R4b, R5)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from ckptfs.core.model import ROOT, Entry, EntryKind, Node
from ckptfs.core.state import State
from ckptfs.tiers.base import INLINE, Digest, Traits, Upload, bound_path

SMALL = 1 << 20
"""Versions up to this many bytes go in one piece, many in one call."""

SMALL_BATCH = 64
SMALL_BATCH_BYTES = 8 << 20
LOOK_AHEAD = 2_000
"""How many log entries one planning step looks at."""

BEGINNING = -1
"""In `Entry.in_flight`: its upload is being begun."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Open the upload of a large version, bound for `path`."""

    entry: Entry
    path: bytes


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


class Ahead:
    """What lies before an entry in the log and concerns its name (R5).

    An upload ranks by its creation on some object stores: one that is created before an earlier entry has
    written or removed its key is discarded when it completes, and reported as done.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._targets: set[tuple[int, bytes]] = set()
        self._moves: list[Entry] = []
        self._places: dict[int, Entry] = {}

    def passed(self, e: Entry) -> None:
        """This entry comes before all that are asked about from now on."""
        self._targets.add((e.dir.ino, e.name))
        if e.kind in (EntryKind.MOVE, EntryKind.MKDIR):
            self._places[e.node.id] = e
        if e.kind == EntryKind.MOVE:
            self._moves.append(e)

    def path(self, e: Entry) -> bytes:
        """Where the entry goes on the tier when its turn comes: what lies before it will be done then.

        That is not its present path in the mount when it was unlinked and its directory renamed since.
        """
        return _join(self._dir(e.dir.node) if e.dir.node is not None else e.dir.path(), e.name)

    def _dir(self, node: Node) -> bytes:
        if node.id == ROOT:
            return b""
        last = self._places.get(node.id)
        if last is not None:
            return self.path(last)
        if node.parent is not None:
            return _join(self._dir(node.parent), node.name)
        return (
            node.inode.path() if node.inode is not None else node.name
        )  # lost by the tier: made again there

    def concerns(self, e: Entry) -> bool:
        """Whether an earlier entry or a late removal is about the entry's path, or about what it is in."""
        if (e.dir.ino, e.name) in self._targets:
            return True
        path = self.path(e)
        for move in self._moves:
            if _within(path, move.node.path()) or _within(path, self.path(move)):
                return True
        return self._grave(e, path)

    def _grave(self, e: Entry, path: bytes) -> bool:
        """A removal under the same path, of a directory made again since. (One in the same directory waits
        for this entry, see `Order.next_removals`.)"""
        node: Node | None = self.state.root_node
        for part in path.split(b"/"):
            if node is None:
                return False
            up, node = node, node.children.get(part)
        return node is not None and node.dead_pos > 0 and up is not e.dir.node


def _join(dir: bytes, name: bytes) -> bytes:
    return dir + b"/" + name if dir else name


def _within(path: bytes, top: bytes) -> bool:
    return path == top or path.startswith(top + b"/")


class Planner:
    """FIFO by log order, so that the oldest undurable byte never starves.

    `reuploaded_bytes`: what was sent in vain, because the name changed in mid-upload (R5).
    """

    def __init__(self, state: State, *, settle_s: float, traits: Traits) -> None:
        self.state = state
        self.settle_s = settle_s
        self.traits = traits
        self.reuploaded_bytes = 0

    def next_jobs(self, now: float, limit: int, *, hurry: bool) -> list[Job]:
        """Up to `limit` jobs; each is in flight until one of the methods below is called for it.

        `hurry`: don't wait out the settle time (the cache is filling up, or somebody waits). Without it the
        first version that has not settled ends the look: what is behind it can't be published before it,
        and a burst of small files must not be walked through at every one of them. Versions that travel
        with their publishing need no job: they are only made ready for it.
        """
        jobs: list[Job] = []
        small: list[Entry] = []
        small_bytes = 0
        bound = self.traits.bound
        ahead = Ahead(self.state)
        for e in islice(self.state.log.values(), LOOK_AHEAD):
            if len(jobs) >= limit:
                break
            astray = bound and self._astray(e, ahead)
            if e.kind != EntryKind.PUT or (e.complete and not astray):
                if bound:
                    ahead.passed(e)
                continue
            if not hurry and 0 <= now - e.first_at < self.settle_s:
                break
            if astray:
                if e.in_flight:
                    ahead.passed(e)
                    continue  # what is on its way is awaited, nothing more is sent
                self.reuploaded_bytes += e.sent_bytes
                self.state.forget_sent(e)
            if e.length <= self.traits.inline_bytes:
                e.upload = INLINE
                self.state.touch_entry(e)
            elif e.length <= SMALL and not bound:
                if not e.in_flight and e.upload is None:
                    small.append(e)
                    small_bytes += e.length
                    e.in_flight.add(0)
                if len(small) >= SMALL_BATCH or small_bytes >= SMALL_BATCH_BYTES:
                    jobs.append(Small(tuple(small)))
                    small, small_bytes = [], 0
            elif e.upload is None:
                if not e.in_flight and not (bound and ahead.concerns(e)):
                    e.in_flight.add(BEGINNING)
                    jobs.append(Begin(e, ahead.path(e)))
            else:
                for offset in range(0, e.length, e.chunk):
                    if len(jobs) >= limit:
                        break
                    if offset not in e.sent and offset not in e.in_flight:
                        e.in_flight.add(offset)
                        jobs.append(Chunk(e, offset, min(e.chunk, e.length - offset)))
            if bound:
                ahead.passed(e)
        if small:
            jobs.append(Small(tuple(small)))
        return jobs

    def take_reuploaded(self) -> int:
        """Bytes sent in vain since the last call."""
        count, self.reuploaded_bytes = self.reuploaded_bytes, 0
        return count

    def _astray(self, e: Entry, ahead: Ahead) -> bool:
        """Whether its upload belongs to a name that it does not go to any more."""
        return (
            e.upload is not None
            and e.upload != INLINE
            and not e.frozen
            and bound_path(e.upload) != ahead.path(e)
        )

    def next_due(self, now: float) -> float | None:
        """Seconds until an unsent version settles; None when there is none within sight."""
        for e in islice(self.state.log.values(), LOOK_AHEAD):
            if e.kind == EntryKind.PUT and e.untouched:
                return max(0.0, e.first_at + self.settle_s - now)
        return None

    def begun(self, entry: Entry, upload: Upload) -> None:
        """The upload is open (journal it before its first chunk)."""
        entry.in_flight.discard(BEGINNING)
        if entry.id not in self.state.log:
            self.state.abandoned.append((entry.id, upload))
            return
        entry.upload = upload
        self.state.touch_entry(entry)

    def sent(self, entry: Entry, upload: Upload, offset: int, length: int, xxh3: bytes) -> None:
        """A chunk (or a whole small version) is on the tier, unseen."""
        entry.in_flight.discard(offset)
        small = entry.length <= SMALL and not self.traits.bound
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
            e.in_flight.discard(
                BEGINNING if isinstance(job, Begin) else job.offset if isinstance(job, Chunk) else 0
            )
            if redo and e.id in self.state.log:
                self.state.forget_sent(e)
