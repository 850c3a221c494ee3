"""Reading what only the tier has: read-ahead into clean cache, digests checked (invariant 10)."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from ckptfs.core import Inode, Node
from ckptfs.engine.hub import READING, Hub
from ckptfs.engine.supervise import attempted
from ckptfs.staging import EXTENT, Blob
from ckptfs.tiers.base import Kind, TierError, Trouble

if TYPE_CHECKING:
    from ckptfs.engine.admission import Admission

log = logging.getLogger("ckptfs")

UNIT = 16 << 20
"""Bytes fetched at once: covers a whole chunk of the default size, so that its digest can be checked."""

STEP_S = 0.1
"""A writer that waits for the tier looks for a pending signal this often (B7)."""

AHEAD_UNITS = 3
"""Units fetched beyond the one asked for when a file is read in order."""


class Fetcher:
    """Fills clean blobs from the tier. Reads never wait for the budget: without room they bypass it."""

    def __init__(self, hub: Hub, admission: Admission, nursery: trio.Nursery) -> None:
        self.hub = hub
        self.admission = admission
        self.nursery = nursery
        self._next: dict[int, int] = {}
        self._orphans: dict[int, _Orphan] = {}

    async def read(self, inode: Inode, offset: int, size: int) -> bytes | None:
        """Bytes of a file that is not (wholly) in staging. None: its content was exchanged meanwhile."""
        blob = self._blob(inode)
        staging = self.hub.staging
        blob.users += 1
        try:
            unit = await self._unit(inode, blob)
            first, last = offset // EXTENT, (offset + size - 1) // EXTENT
            if blob.present is not None and any(x not in blob.present for x in range(first, last + 1)):
                for u in range(offset // unit, (offset + size - 1) // unit + 1):
                    if not await self._fetch(inode, blob, u):
                        return await self._bypass(inode, offset, size)
                if offset in (0, self._next.get(inode.ino, 0)):
                    self._read_ahead(inode, blob, (offset + size - 1) // unit + 1)
            if inode.data != blob.id:
                return None
            if blob.present is not None and any(x not in blob.present for x in range(first, last + 1)):
                return await self._bypass(inode, offset, size)  # evicted again already
            self._next[inode.ino] = offset + size
            staging.touch(blob)
            return staging.read_plain(blob, offset, size)
        except _Exchanged:
            return None
        finally:
            staging.unuse(blob)

    async def whole(self, inode: Inode, interrupted: Callable[[], bool] | None) -> None:
        """Bring all of a file that only the tier has into new staging, for a writer.

        Admitted, and where necessary spilled, piece by piece like any other write.
        """
        hub, before, size = self.hub, inode.data, inode.size
        data = hub.new_data()
        blob = hub.staging.create(data)
        blob.users += 1
        blob.filled = 0
        try:
            unit = await self._unit(inode, blob)
            await hub.staging.truncate(blob, size)
            for offset in range(0, size, unit):
                length = min(unit, size - offset)
                await self.admission.admit_all(length, interrupted=interrupted, path=inode.path)
                blob.pins += 1
                try:
                    await self._ask(inode, "fetch", offset, length, blob.path, interrupted=interrupted)
                finally:
                    hub.staging.measure(blob)
                    hub.staging.unpin(blob)
                blob.filled = offset + length
            blob.filled = None
            if inode.data == before:
                hub.core.state.set_data(inode, data)
                hub.commit()
        except _Exchanged:
            pass
        finally:
            if inode.data != data:
                hub.staging.delete(data)
            hub.staging.unuse(blob)

    def _blob(self, inode: Inode) -> Blob:
        """The clean blob that caches the inode's content."""
        hub = self.hub
        blob = hub.staging.blobs.get(inode.data)
        if blob is None:
            data = hub.new_data()
            blob = hub.staging.create_cache(data, inode.size)
            hub.core.state.set_data(inode, data)
            hub.commit()
        return blob

    async def _unit(self, inode: Inode, blob: Blob) -> int:
        """Bytes to fetch at once, so that whole chunks can be checked."""
        if not blob.unit:
            unit = UNIT
            node = self._node(inode)
            if node is not None and node.present and inode.size > UNIT:
                try:
                    digests = await self.hub.pool.call("digests", node.path(), node.token)
                except TierError:
                    digests = ()
                if digests and digests[0].length > UNIT:
                    unit = -(-digests[0].length // EXTENT) * EXTENT
            blob.unit = unit
        return blob.unit

    # -- open files whose names go away ----------------------------------------------------------

    def orphan(self, inode: Inode) -> None:
        """An open file is about to lose its name, and soon the tier its bytes: `rescue` brings them over."""
        node = inode.node
        if inode.kind == Kind.FILE and node is not None and node.present and not inode.dead:
            self._orphans[inode.ino] = _Orphan(inode, node)

    def forget(self, inode: Inode) -> None:
        """Nobody has it open any more."""
        self._next.pop(inode.ino, None)
        orphan = self._orphans.pop(inode.ino, None)
        if orphan is not None and orphan.blob is not None:
            self.hub.staging.unuse(orphan.blob)

    async def rescue(self) -> None:
        """Before the tier replaces or removes anything: what is still read of it must be here."""
        for orphan in list(self._orphans.values()):
            if orphan.blob is None and orphan.inode.dead and not orphan.given_up:
                await self._rescue(orphan)

    async def _rescue(self, orphan: _Orphan) -> None:
        inode = orphan.inode
        blob = self._blob(inode)
        blob.users += 1  # from now on not evicted either
        orphan.blob = blob
        try:
            unit = await self._unit(inode, blob)
            for u in range(-(-inode.size // unit)):
                if blob.present is not None and not await self._fetch(inode, blob, u):
                    raise OSError(errno.ENOSPC, "the cache has no room")
        except (OSError, _Exchanged) as e:
            orphan.given_up = True
            log.warning("an open file that lost its name may become unreadable: %s", e)

    def _node(self, inode: Inode) -> Node | None:
        orphan = self._orphans.get(inode.ino)
        return orphan.node if orphan is not None and inode.dead else inode.node

    def _read_ahead(self, inode: Inode, blob: Blob, unit: int) -> None:
        for u in range(unit, unit + AHEAD_UNITS):
            start = u * blob.unit // EXTENT
            if u * blob.unit >= inode.size:
                return
            if blob.present is None or start in blob.present or start in blob.fetching:
                continue
            if not self.admission.fits(blob.unit * 2):
                return
            self.nursery.start_soon(attempted, self.hub, partial(self._ahead, inode, blob, u), "read-ahead")

    async def _ahead(self, inode: Inode, blob: Blob, unit: int) -> None:
        if blob.dead:
            return
        blob.users += 1
        try:
            await self._fetch(inode, blob, unit)
        except (OSError, _Exchanged) as e:
            log.debug("read-ahead of %s: %s", os.fsdecode(inode.path()), e)
        finally:
            self.hub.staging.unuse(blob)

    async def _fetch(self, inode: Inode, blob: Blob, unit: int, *, must: bool = False) -> bool:
        """Bring one unit into the blob. False when there is no room for it in the budget."""
        start = unit * blob.unit // EXTENT
        length = min(blob.unit, inode.size - unit * blob.unit)
        extents = range(start, start + -(-length // EXTENT))
        while True:
            if blob.present is None or all(x in blob.present for x in extents):
                return True
            running = next((blob.fetching[x] for x in extents if x in blob.fetching), None)
            if running is None:
                break
            await running.wait()
        staging = self.hub.staging
        if not must and not self.admission.fits(length):
            staging.evict(staging.used + length - self.admission.limit, keep=blob)
            if not self.admission.fits(length) and not self._shift(blob, start, length):
                return False
        event = trio.Event()
        for x in extents:
            blob.fetching[x] = event
        blob.pins += 1
        try:
            await self._ask(inode, "fetch", unit * blob.unit, length, blob.path)
            if blob.present is not None:
                blob.present.update(extents)
        finally:
            for x in extents:
                blob.fetching.pop(x, None)
            event.set()
            if not blob.dead:
                staging.measure(blob)
            staging.unpin(blob)
        return True

    def _shift(self, blob: Blob, start: int, length: int) -> bool:
        """A file larger than the cache, read in order: drop what lies behind."""
        staging = self.hub.staging
        need = staging.used + length - self.admission.limit
        behind = sum(1 for x in blob.present or () if x < start)
        if blob.pins or behind * EXTENT < need:
            return False
        staging.shrink(blob, need)
        return self.admission.fits(length)

    async def _bypass(self, inode: Inode, offset: int, size: int) -> bytes:
        """Straight from the tier, when the budget has no room."""
        answer = await self._ask(inode, "read", offset, size)
        assert isinstance(answer, bytes)
        return answer

    async def _ask(
        self, inode: Inode, method: str, *args: object, interrupted: Callable[[], bool] | None = None
    ) -> object:
        """Ask for bytes of the inode's published object, for as long as the tier is down (never EIO
        for that). ESTALE when somebody replaced the object, EIO when its bytes are corrupt, EINTR when
        the writer that needs them is `interrupted`."""
        tries = 0
        while True:
            node = self._node(inode)
            if node is None or not node.present:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            moving = node.pending
            try:
                answer = await self._call(interrupted, method, node.path(), node.token, *args)
            except TierError as e:
                if e.trouble == Trouble.CORRUPT:
                    log.error("%s: %s", os.fsdecode(inode.path()), e.message)
                    self.hub.counters.errors += 1
                    raise OSError(errno.EIO, e.message) from e
                if e.trouble == Trouble.REDO:
                    raise _Exchanged from e
                if e.trouble == Trouble.CHANGED and not moving and tries >= 3:
                    raise OSError(errno.ESTALE, e.message) from e
                if e.trouble == Trouble.REFUSED:
                    raise OSError(e.errno or errno.EACCES, e.message) from e
                self.hub.health.down(READING, e)
                await trio.sleep(random.uniform(0, min(2.0, 0.02 * 2 ** min(tries, 7))))
                tries += 1
            else:
                self.hub.health.up(READING)
                return answer

    async def _call(self, interrupted: Callable[[], bool] | None, method: str, *args: object) -> object:
        if interrupted is None:
            return await self.hub.pool.call(method, *args)
        answer: list[object] = []
        error: list[TierError] = []

        async def ask() -> None:
            try:
                answer.append(await self.hub.pool.call(method, *args))
            except TierError as e:
                error.append(e)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not interrupted():  # noqa: ASYNC110 (a signal gives no event)
                await trio.sleep(STEP_S)
            nursery.cancel_scope.cancel()
        if error:
            raise error[0]
        if not answer:
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))
        return answer[0]


class _Orphan:
    """An open file without a name, the tier object of its bytes, and the staging that holds them now."""

    def __init__(self, inode: Inode, node: Node) -> None:
        self.inode = inode
        self.node = node
        self.blob: Blob | None = None
        self.given_up = False


class _Exchanged(Exception):
    """The staging file that was to be filled is gone: the inode has other content now."""
