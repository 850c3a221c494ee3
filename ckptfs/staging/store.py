"""The staging files of a mount and what they occupy (rules B3, B5).

All methods run on the event loop's thread. Writes to tmpfs are a memory copy and happen right
there; whatever touches the spill, which is on disk, goes through a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from ckptfs.staging.blob import EXTENT, Blob
from ckptfs.staging.linux import punch
from ckptfs.tiers.base import Source

MAX_FDS = 4_096
"""Staging files kept open; the process' limit is raised to suit."""


class Staging:
    """Blobs by data id, and the one accountant of staging memory.

    `used` is what all blobs occupy (allocated blocks, not sizes), in bytes. `freed` is called
    whenever that shrinks.
    """

    def __init__(self, data: Path, cache: Path, spill: Path | None) -> None:
        self.data_dir = data
        self.cache_dir = cache
        self.spill_dir = spill
        self._prefixes = {d: f"{d}/" for d in (data, cache, spill or data)}
        self.used = 0
        self.dirty_ram = 0
        self.spilled_bytes = 0
        self.blobs: dict[int, Blob] = {}
        self.freed: Callable[[], None] = lambda: None
        self._lru: OrderedDict[int, Blob] = OrderedDict()
        self._fds: OrderedDict[int, Blob] = OrderedDict()

    # -- files -------------------------------------------------------------------------------

    def _blob(self, id: int, dir: Path) -> Blob:
        spill = self._prefixes[self.spill_dir or dir]
        blob = Blob(id, f"{self._prefixes[dir]}{id}", f"{spill}{id}.spill")
        self.blobs[id] = blob
        return blob

    def create(self, id: int) -> Blob:
        """A new empty dirty blob."""
        blob = self._blob(id, self.data_dir)
        blob.fd = os.open(blob.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._opened(blob)
        return blob

    def create_cache(self, id: int, size: int) -> Blob:
        """A new clean blob with nothing present."""
        blob = self._blob(id, self.cache_dir)
        blob.fd = os.open(blob.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(blob.fd, size)
        blob.size = size
        blob.clean = True
        blob.present = set()
        self._opened(blob)
        self._lru[id] = blob
        return blob

    def recover(
        self, wanted: Iterable[int], spilled: dict[int, set[int]], old_spills: Iterable[Path] = ()
    ) -> list[int]:
        """Find the dirty blobs of a former daemon; delete what nobody wants. Returns missing ids.

        `old_spills`: directories that extents were spilled to earlier. A blob whose spill file is gone
        counts as missing: its spilled extents would read as zeros.
        """
        keep = set(wanted)
        found = self._spill_files(keep, old_spills)
        for path in self.data_dir.iterdir():
            if not path.name.isdigit() or int(path.name) not in keep:
                path.unlink()
                continue
            id = int(path.name)
            if spilled.get(id) and id not in found:
                continue
            blob = self._blob(id, self.data_dir)
            blob.spilled = set(spilled.get(id, ()))
            blob.spill_path = found.get(id, blob.spill_path)
            blob.spill_made = id in found
            self.spilled_bytes += len(blob.spilled) * EXTENT
            st = path.stat()
            blob.size = st.st_size
            self._account(blob, st.st_blocks * 512)
        return sorted(keep - set(self.blobs))

    def _spill_files(self, keep: set[int], old_spills: Iterable[Path]) -> dict[int, str]:
        """Spill files by data id; those nobody wants are deleted."""
        found: dict[int, str] = {}
        for dir in {*old_spills, self.spill_dir or self.data_dir}:
            for path in dir.glob("*.spill"):
                if path.stem.isdigit() and int(path.stem) in keep:
                    found[int(path.stem)] = str(path)
                else:
                    path.unlink()
        return found

    def open(self, blob: Blob) -> int:
        """The blob's descriptor; valid until the next await unless `users` is held."""
        if blob.fd < 0:
            blob.fd = os.open(blob.path, os.O_RDWR | os.O_CLOEXEC)
            self._opened(blob)
        return blob.fd

    def descriptors(self, blob: Blob) -> list[int]:
        """Descriptors of all files that hold the blob's bytes; hold `users` while they are in use."""
        return [self.open(blob), self._spill_fd(blob)] if blob.spilled else [self.open(blob)]

    def _opened(self, blob: Blob) -> None:
        self._fds[blob.id] = blob
        if len(self._fds) > MAX_FDS:
            for old in list(self._fds.values())[: MAX_FDS // 8]:
                if old.users == 0 and old is not blob:
                    self._close(old)

    def _close(self, blob: Blob) -> None:
        self._fds.pop(blob.id, None)
        for fd in (blob.fd, blob.spill_fd):
            if fd >= 0:
                os.close(fd)
        blob.fd = blob.spill_fd = -1

    def _spill_fd(self, blob: Blob) -> int:
        if blob.spill_fd < 0:
            blob.spill_fd = os.open(blob.spill_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._fds[blob.id] = blob
        return blob.spill_fd

    def delete(self, id: int) -> None:
        """Forget a blob and give back all it occupies (at once, or when its last worker is done)."""
        blob = self.blobs.get(id)
        if blob is None:
            return
        blob.dead = True
        if blob.pins or blob.users:
            return
        del self.blobs[id]
        self._lru.pop(id, None)
        self._close(blob)
        os.unlink(blob.path)
        self._drop_spill(blob)
        if blob.spill_made:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(blob.spill_path)
        self._account(blob, 0)

    def _drop_spill(self, blob: Blob) -> None:
        """Give back what the spill file occupies. The file stays: descriptors of it are in use."""
        if blob.spilled:
            self.spilled_bytes -= len(blob.spilled) * EXTENT
            blob.spilled = set()
            with contextlib.suppress(FileNotFoundError):
                os.truncate(blob.spill_path, 0)

    # -- accounting --------------------------------------------------------------------------

    def _account(self, blob: Blob, ram: int) -> None:
        delta = ram - blob.ram
        if delta:
            blob.ram = ram
            self.used += delta
            if not blob.clean:
                self.dirty_ram += delta
            if delta < 0:
                self.freed()

    def expect(self, blob: Blob, ram: int) -> None:
        """Count what a blob is about to occupy, until `measure` sees what it does."""
        self._account(blob, ram)

    def measure(self, blob: Blob) -> None:
        """Look up what the blob occupies, after something else has written to it."""
        st = os.fstat(self.open(blob))
        self._account(blob, st.st_blocks * 512)

    @property
    def clean_bytes(self) -> int:
        """What clean cache occupies."""
        return self.used - self.dirty_ram

    # -- reading and writing -----------------------------------------------------------------

    def write_plain(self, blob: Blob, offset: int, buf: bytes | memoryview) -> int:
        """Write to a blob that is `plain`; a short count (or ENOSPC) when the fence is reached."""
        fd = blob.fd if blob.fd >= 0 else self.open(blob)
        n = os.pwrite(fd, buf, offset)
        end = offset + n
        if end > blob.size:
            blob.size = end
        ram = os.fstat(fd).st_blocks * 512
        if ram != blob.ram:
            self._account(blob, ram)
        return n

    async def write_mixed(self, blob: Blob, offset: int, buf: bytes | memoryview) -> int:
        """Write at most up to the next extent boundary of a blob with spilled or busy extents."""
        extent = offset // EXTENT
        while extent in blob.busy:
            await blob.busy[extent].wait()
        if blob.dead:
            return 0
        piece = buf[: min(len(buf), (extent + 1) * EXTENT - offset)]
        if extent not in blob.spilled:
            return self.write_plain(blob, offset, piece)
        blob.users += 1
        try:
            fd = self._spill_fd(blob)
            n = await trio.to_thread.run_sync(os.pwrite, fd, piece, offset)
        finally:
            self.unuse(blob)
        if offset + n > blob.size:
            blob.size = offset + n
            os.ftruncate(self.open(blob), blob.size)
        return n

    def read_plain(self, blob: Blob, offset: int, length: int) -> bytes:
        """Read from a blob that is `plain` (or where the range is present and in RAM)."""
        return os.pread(blob.fd if blob.fd >= 0 else self.open(blob), length, offset)

    async def read_mixed(self, blob: Blob, offset: int, length: int) -> bytes | None:
        """Read from a blob with spilled extents. None: they were given up meanwhile, look again."""
        parts: list[bytes] = []
        blob.users += 1
        try:
            while length > 0:
                extent = offset // EXTENT
                n = min(length, (extent + 1) * EXTENT - offset)
                if extent in blob.spilled:
                    part = await trio.to_thread.run_sync(os.pread, self._spill_fd(blob), n, offset)
                    if extent not in blob.spilled:
                        return None
                    part = part.ljust(min(n, max(0, blob.size - offset)), b"\0")
                else:
                    part = os.pread(self.open(blob), n, offset)
                parts.append(part)
                offset += n
                length -= n
                if len(part) < n:
                    break
        finally:
            self.unuse(blob)
        return b"".join(parts)

    async def truncate(self, blob: Blob, size: int) -> None:
        """Set the size; the caller has made sure that no sealed version needs the bytes."""
        while blob.busy and size < blob.size:  # an extent on its way to the spill would come back
            await next(iter(blob.busy.values())).wait()
        if blob.dead:
            return
        os.ftruncate(self.open(blob), size)
        if blob.spilled and size < blob.size:
            os.ftruncate(self._spill_fd(blob), size)
            os.ftruncate(self._spill_fd(blob), max(size, (max(blob.spilled) + 1) * EXTENT))
        blob.size = size
        self.measure(blob)

    def set_times(self, blob: Blob, atime_ns: int, mtime_ns: int) -> None:
        """Times of a dirty file are its staging file's, so that a crash keeps them."""
        os.utime(self.open(blob), ns=(atime_ns, mtime_ns))

    def unuse(self, blob: Blob) -> None:
        """The counterpart of `users += 1`."""
        blob.users -= 1
        if blob.dead and not blob.users and not blob.pins:
            self.delete(blob.id)

    # -- for workers -------------------------------------------------------------------------

    def pin(self, blob: Blob, offset: int, length: int) -> Source:
        """A window for a worker to read; `unpin` when it is done."""
        blob.pins += 1
        return Source(
            blob.path,
            offset,
            length,
            blob.spill_path if blob.spilled else "",
            EXTENT,
            frozenset(blob.spilled),
        )

    def unpin(self, blob: Blob) -> None:
        """The worker is done."""
        blob.pins -= 1
        if blob.pins:
            return
        if blob.dead and not blob.users:
            self.delete(blob.id)
        elif blob.settling and not blob.dead:
            blob.settling = False
            self.make_clean(blob)

    # -- clean cache -------------------------------------------------------------------------

    def make_clean(self, blob: Blob) -> None:
        """The tier has it: from now on a cache that may shrink (B3)."""
        if blob.clean:
            return
        if blob.pins:
            blob.settling = True
            return
        path = f"{self._prefixes[self.cache_dir]}{blob.id}"
        os.rename(blob.path, path)
        blob.path = path
        blob.clean = True
        self.dirty_ram -= blob.ram
        if blob.spilled:
            blob.present = set(range(-(-blob.size // EXTENT))) - blob.spilled
            self._drop_spill(blob)
        self._lru[blob.id] = blob
        self.freed()

    def make_dirty(self, blob: Blob) -> None:
        """It is about to be written again; complete, and no cache any more."""
        blob.settling = False
        if blob.clean:
            path = f"{self._prefixes[self.data_dir]}{blob.id}"
            os.rename(blob.path, path)
            blob.path = path
            blob.clean = False
            self.dirty_ram += blob.ram
            self._lru.pop(blob.id, None)

    def touch(self, blob: Blob) -> None:
        """Used just now: evicted last."""
        if blob.clean and not blob.dead:
            self._lru[blob.id] = blob
            self._lru.move_to_end(blob.id)

    def evict(self, wanted: int, keep: Blob | None = None) -> int:
        """Free at least `wanted` bytes of clean cache, least recently used first. Returns how many."""
        freed = 0
        for blob in list(self._lru.values()):
            if freed >= wanted:
                break
            if blob.pins or blob.users or blob is keep:
                continue
            freed += self.shrink(blob, wanted - freed)
            if not blob.ram:
                del self._lru[blob.id]
        return freed

    def shrink(self, blob: Blob, wanted: int) -> int:
        """Punch extents out of a clean blob, lowest first, until `wanted` bytes are free."""
        before = blob.ram
        if blob.present is None:
            blob.present = set(range(-(-blob.size // EXTENT)))
        fd = self.open(blob)
        for extent in sorted(blob.present):
            if before - blob.ram >= wanted:
                break
            blob.present.discard(extent)
            punch(fd, extent * EXTENT, EXTENT)
            self.measure(blob)
        return before - blob.ram

    # -- spill -------------------------------------------------------------------------------

    def spill_candidates(self, limit: int) -> list[tuple[Blob, int]]:
        """Extents of dirty blobs to move out of RAM: large blobs first, their tails last."""
        found: list[tuple[Blob, int]] = []
        tails: list[tuple[Blob, int]] = []
        dirty = [b for b in self.blobs.values() if not b.clean and not b.dead and not b.pins and b.ram]
        for blob in sorted(dirty, key=lambda b: -b.ram):
            last = max(0, blob.size - 1) // EXTENT
            for extent in range(last + 1):
                if extent in blob.spilled or extent in blob.busy:
                    continue
                if blob.filled is not None and (extent + 1) * EXTENT > blob.filled:
                    break
                (tails if extent == last else found).append((blob, extent))
                if len(found) >= limit:
                    return found
        return (found + tails)[:limit]

    def spill_started(self, blob: Blob, extent: int) -> None:
        """The extent is being copied: writers to it wait."""
        blob.busy[extent] = trio.Event()
        blob.users += 1
        blob.spill_made = True

    @staticmethod
    def may_punch(blob: Blob) -> bool:
        """Whether a finished copy may take the extent's place now: a worker that reads the blob looks for
        it in RAM, and so does the cache that a published blob has become."""
        return not blob.dead and not blob.clean and not blob.pins

    def spill_done(self, blob: Blob, extent: int, ok: bool) -> None:
        """The copy is there and journaled (or not): give the RAM back."""
        if ok:
            blob.spilled.add(extent)
            self.spilled_bytes += EXTENT
            punch(self.open(blob), extent * EXTENT, EXTENT)
            self.measure(blob)
        blob.busy.pop(extent).set()
        self.unuse(blob)


def is_full(error: OSError) -> bool:
    """Whether the staging file system's own fence stopped a write."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
