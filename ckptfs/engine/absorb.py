"""Content of files in the mount: writes land in staging, closes make versions, reads come from anywhere."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from ckptfs.core import Inode
from ckptfs.core.model import Unsealed
from ckptfs.engine import clock
from ckptfs.engine.admission import Admission
from ckptfs.engine.fetch import Fetcher
from ckptfs.engine.hub import BEHIND_S, Hub
from ckptfs.staging import EXTENT, Blob
from ckptfs.staging.store import is_full
from ckptfs.tiers.base import Kind, TierError

log = logging.getLogger("ckptfs")

FULL_PATIENCE_S = 20.0
"""How long a copy is tried again that the staging tmpfs has no room for, though the budget has."""

SIGNAL_STEP_S = 0.25
"""How often a process waiting in fsync is looked at for a pending signal."""

Interrupted = Callable[[], bool] | None


class Absorb:
    """The data path. Fast paths have no `await`, so they are atomic on the event loop."""

    def __init__(self, hub: Hub, admission: Admission, fetcher: Fetcher) -> None:
        self.hub = hub
        self.admission = admission
        self.fetcher = fetcher
        self._locks: dict[int, trio.Lock] = {}
        self._seals = trio.Lock()

    def is_stream(self, name: bytes) -> bool:
        """Whether a name matches the stream globs (R6)."""
        text = os.fsdecode(name)
        return any(fnmatch.fnmatchcase(text, g) for g in self.hub.config.stream_globs)

    # -- writing -----------------------------------------------------------------------------

    async def write(self, inode: Inode, offset: int, buf: bytes, interrupted: Interrupted) -> int:
        """Put bytes into staging. With `interrupted` (direct handles) the count may be short."""
        size = len(buf)
        blob = self.hub.staging.blobs.get(inode.data)
        if (
            blob is not None
            and not blob.clean
            and blob.plain
            and not inode.close_mark
            and (
                inode.unsealed is Unsealed.REWRITTEN
                or (inode.unsealed is Unsealed.APPENDED and offset >= inode.size)
            )
            and (not inode.puts or not self.hub.core.content.needs_clone(inode, offset))
            and self.admission.fits(size)
            and inode.ino not in self._locks
        ):
            try:
                n = self.hub.staging.write_plain(blob, offset, buf)
            except OSError as e:
                if not is_full(e):
                    raise
                n = 0
            if n == size:
                self._wrote(inode, offset, n)
                return n
        return await self._write_slowly(inode, offset, buf, interrupted)

    def _wrote(self, inode: Inode, offset: int, n: int) -> None:
        end = offset + n
        if end > inode.size:
            inode.size = end
        inode.mtime_ns = inode.ctime_ns = clock.now_ns()
        self.hub.counters.absorbed.total += n

    async def _write_slowly(self, inode: Inode, offset: int, buf: bytes, interrupted: Interrupted) -> int:
        view = memoryview(buf)
        done = 0
        while done < len(buf):
            rest = view[done:]
            try:
                room = await self.admission.admit(len(rest), interrupted=interrupted, path=inode.path)
                n = await self._write_piece(inode, offset + done, rest[:room], interrupted)
            except OSError:
                if done and interrupted is not None:
                    return done
                raise
            done += n
            if n < len(rest) and interrupted is not None and done:
                return done
        return done

    async def _write_piece(
        self, inode: Inode, offset: int, piece: memoryview, interrupted: Interrupted
    ) -> int:
        staging = self.hub.staging
        while True:
            blob = await self.make_writable(inode, offset, interrupted)
            n = 0
            try:
                if blob.plain:
                    n = staging.write_plain(blob, offset, piece)
                else:
                    n = await staging.write_mixed(blob, offset, piece)
            except OSError as e:
                if not is_full(e):
                    raise
                # The staging tmpfs' own fence: account anew, and wait like anybody else.
                if not blob.dead:
                    staging.measure(blob)
                self.admission.fit()
                if interrupted is not None and interrupted():
                    raise OSError(errno.EINTR, os.strerror(errno.EINTR)) from e
                self.hub.work.beat()
                await self.hub.room.wait(0.1)
                return 0  # to be admitted anew: there is less room than it seemed
            if n:
                if inode.data == blob.id:  # else it was truncated meanwhile: as if written before
                    self._wrote(inode, offset, n)
                return n
            await self.hub.room.wait(0.1)

    async def make_writable(self, inode: Inode, offset: int, interrupted: Interrupted = None) -> Blob:
        """Staging of the inode that may be changed at `offset`; journals that it is dirty (before bytes).

        O_TRUNC does not wait for writers, so the content may be another after every wait.
        """
        content, staging = self.hub.core.content, self.hub.staging
        blob = staging.blobs.get(inode.data)
        absent = blob is None or blob.present is not None
        if absent or inode.ino in self._locks or content.needs_clone(inode, offset):
            async with self._lock(inode):
                while True:
                    blob = staging.blobs.get(inode.data)
                    if content.needs_clone(inode, offset):
                        await self._clone(inode, inode.size, offset, interrupted)
                    elif blob is None or blob.present is not None:
                        await self.fetcher.whole(inode, interrupted)
                    else:
                        break
        assert blob is not None
        if content.dirty(inode, offset, clock.now()):
            self.hub.make_dirty(blob)
            self.hub.commit()
        return blob

    @asynccontextmanager
    async def _lock(self, inode: Inode) -> AsyncIterator[None]:
        """Held while the inode's content is exchanged: copied, or fetched from the tier."""
        lock = self._locks.setdefault(inode.ino, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                del self._locks[inode.ino]

    async def _clone(self, inode: Inode, length: int, offset: int, interrupted: Interrupted) -> None:
        """Give the inode its own copy of the first `length` bytes; the sealed version keeps the old.

        Waits for room, or until the version is published and nothing at `offset` needs a copy any more.
        """
        hub = self.hub
        content = hub.core.content
        source_blob = hub.staging.blobs[inode.data]
        length = min(length, inode.size)

        def moot() -> bool:
            return inode.data != source_blob.id or not content.needs_clone(inode, offset)

        # Holes cost nothing, and stay holes.
        room = min(length, source_blob.ram + len(source_blob.spilled) * EXTENT)
        deadline = trio.current_time() + FULL_PATIENCE_S
        while True:
            await self.admission.admit_all(room, interrupted=interrupted, path=inode.path, moot=moot)
            if moot():
                return
            data = hub.new_data()
            blob = hub.staging.create(data)
            blob.filled = 0
            hub.staging.expect(blob, room)
            try:
                await self._copy(source_blob, blob, length)
                blob.filled = None
                break
            except TierError as e:
                hub.staging.delete(data)
                full = e.errno in (errno.ENOSPC, errno.EDQUOT)
                if not full or trio.current_time() > deadline:
                    log.error("a copy of %s could not be made: %s", os.fsdecode(inode.path()), e.message)
                    raise OSError(errno.ENOSPC if full else errno.EIO, e.message) from e
                # Huge pages make a copy larger than its source: the tmpfs' own fence.
                if interrupted is not None and interrupted():
                    raise OSError(errno.EINTR, os.strerror(errno.EINTR)) from e
                await hub.room.wait(0.1)
            except BaseException:
                hub.staging.delete(data)
                raise
        await hub.staging.truncate(blob, length)
        if inode.data != source_blob.id:
            hub.staging.delete(data)
            return
        mtime = inode.mtime_ns
        content.replace(inode, data, clock.now(), size=length)
        inode.mtime_ns = mtime
        hub.commit()

    async def _copy(self, source_blob: Blob, blob: Blob, length: int) -> None:
        if not length:
            return
        source = self.hub.staging.pin(source_blob, 0, length)
        try:
            await self.hub.local("clone", source, blob.path)
        finally:
            self.hub.staging.unpin(source_blob)

    async def truncate(self, inode: Inode, size: int) -> None:
        """truncate(2), ftruncate(2) and O_TRUNC."""
        content = self.hub.core.content
        if size == 0:
            self._fresh(inode, clock.now())
            return
        while True:
            if size < inode.size and content.needs_clone(inode, size):
                async with self._lock(inode):
                    if size < inode.size and content.needs_clone(inode, size):
                        await self._clone(inode, size, size, None)
            blob = await self.make_writable(inode, min(size, inode.size))
            await self.hub.staging.truncate(blob, size)
            if inode.data == blob.id:
                break
        inode.size = size
        inode.mtime_ns = inode.ctime_ns = clock.now_ns()

    def _fresh(self, inode: Inode, now: float) -> None:
        """Empty staging for the inode; whatever it had stays for the versions that need it."""
        data = self.hub.new_data()
        self.hub.staging.create(data)
        self.hub.core.content.replace(inode, data, now)
        self.hub.commit()

    # -- sealing -----------------------------------------------------------------------------

    async def closed(self, inode: Inode) -> None:
        """The opener's last descriptor is gone; make that survive a crash before close(2) returns."""
        if inode.unsealed is Unsealed.NO or inode.dead or inode.close_mark or inode.held:
            return
        if self.hub.durable_staging and not await self._make_safe(inode):
            return  # somebody writes again, and will close it
        if self.hub.core.content.mark_closed(inode):
            self.hub.commit()

    async def seal(self, inode: Inode, *, still_open: bool = False) -> None:
        """Make a version of what was written and queue it for the tier.

        At once when close(2) has made it safe: its place in the log is before whatever its writer does
        next (R7). `still_open`: writers may go on meanwhile.
        """
        if inode.unsealed is Unsealed.NO or inode.dead or inode.held:
            return
        if self.hub.durable_staging and (not inode.close_mark or self._seals.locked()):
            async with self._seals:
                safe = bool(inode.close_mark) or await self._make_safe(inode)
                if not safe and not still_open:
                    return  # opened again: the next close seals it
                self.seal_now(inode)
        else:
            self.seal_now(inode)

    async def _make_safe(self, inode: Inode) -> bool:
        """Bytes and digests on disk (durable staging only). False when there was a write meanwhile."""
        before = inode.data, inode.mtime_ns
        await self.sync(inode)
        await self._record_digests(inode)
        return (inode.data, inode.mtime_ns) == before

    def seal_now(self, inode: Inode) -> None:
        """The seal itself: one journal transaction."""
        self.hub.core.content.seal(inode, clock.now())
        self.hub.commit()
        self.hub.work.beat()

    async def sync(self, inode: Inode) -> None:
        """fdatasync of the staged bytes (durable staging only)."""
        blob = self.hub.staging.blobs.get(inode.data)
        if blob is None:
            return
        blob.users += 1
        try:
            for fd in self.hub.staging.descriptors(blob):
                await trio.to_thread.run_sync(os.fdatasync, fd)
        finally:
            self.hub.staging.unuse(blob)

    async def _record_digests(self, inode: Inode) -> None:
        """Durable staging is checked against these after a reboot, before it is uploaded."""
        hub = self.hub
        blob = hub.staging.blobs.get(inode.data)
        if blob is None:
            return
        source = hub.staging.pin(blob, 0, inode.size)
        try:
            digests = await hub.local("digest_chunks", source, hub.core.content.chunk_for(inode.size))
        except TierError as e:
            log.warning("no digests for %s: %s", os.fsdecode(inode.path()), e.message)
            return
        finally:
            hub.staging.unpin(blob)
        rows = [(d.offset, d.length, d.xxh3) for d in digests]
        while not hub.journaled(lambda: hub.journal.set_digests(blob.id, rows)):  # noqa: ASYNC110 (a disk)
            await trio.sleep(BEHIND_S)

    def interrupt(self, inode: Inode, reason: str) -> None:
        """Its writer was killed: keep, don't publish (R6)."""
        self.hub.core.content.interrupt(inode, clock.now(), reason)
        self.hub.commit()
        log.warning(
            "%s is interrupted (%s): kept in the mount, not published; `ckptfs publish` or `ckptfs discard`"
            " it",
            os.fsdecode(inode.path()), reason,
        )  # fmt: skip
        self.hub.changed.beat()

    async def run_streams(self) -> None:
        """R6: append-only streams that stay open get a version now and then."""
        while True:
            await trio.sleep(self.hub.config.stream_interval)
            for inode in list(self.hub.open_writers.values()):
                # A new log is "rewritten" only because it was created: no version of it exists yet.
                appended = inode.unsealed is Unsealed.APPENDED or (inode.node is None and not inode.puts)
                if appended and not inode.held and self.is_stream(inode.name or b""):
                    await self.seal(inode, still_open=True)

    # -- waiting -----------------------------------------------------------------------------

    async def wait_durable(self, inode: Inode, interrupted: Callable[[], bool]) -> None:
        """fsync under `fsync=tier`: seal and wait until the tier has it. EIO for a held file, EINTR when
        a signal is pending (the kernel can't end a waiting fsync by itself)."""
        await self.seal(inode, still_open=True)
        hub = self.hub
        last = inode.puts[-1] if inode.puts else None
        hub.waiting_for_durable += 1
        hub.work.beat()
        try:
            while last is not None:
                if last.id in hub.core.state.log:
                    await hub.changed.wait(SIGNAL_STEP_S)
                    if interrupted():
                        raise OSError(errno.EINTR, os.strerror(errno.EINTR))
                elif inode.puts and inode.puts[0].first_at == last.first_at:
                    last = inode.puts[0]  # replaced unsent (R4b): durable with its successor
                else:
                    break
        finally:
            hub.waiting_for_durable -= 1
        if inode.held:
            log.error(
                "fsync of %s: it is %s and will not be published", os.fsdecode(inode.path()), inode.held
            )
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def wait_dir_durable(self, dir: Inode) -> None:
        """fsync of a directory under `fsync=tier`: everything logged below it so far."""
        hub = self.hub
        waiting = {e.id for e in hub.core.state.log.values() if _below(e.dir, dir)}
        hub.waiting_for_durable += 1
        hub.work.beat()
        try:
            while waiting & hub.core.state.log.keys():
                await hub.changed.wait(1.0)
        finally:
            hub.waiting_for_durable -= 1

    # -- reading -----------------------------------------------------------------------------

    async def read(self, inode: Inode, offset: int, size: int) -> bytes:
        """Bytes at `offset`, short at the end of the file."""
        size = min(size, inode.size - offset)
        if size <= 0 or inode.kind != Kind.FILE:
            return b""
        while True:
            blob = self.hub.staging.blobs.get(inode.data)
            if blob is not None and blob.present is None and not blob.spilled:
                if blob.clean:
                    self.hub.staging.touch(blob)
                return self.hub.staging.read_plain(blob, offset, size)
            if blob is not None and blob.present is None:
                found = await self.hub.staging.read_mixed(blob, offset, size)
            else:
                found = await self.fetcher.read(inode, offset, size)
            if found is not None:
                return found
            size = min(size, inode.size - offset)
            if size <= 0:
                return b""


def _below(inode: Inode | None, dir: Inode) -> bool:
    while inode is not None:
        if inode is dir:
            return True
        inode = inode.parent
    return False
