"""The handlers: content of files. Names are in `fuse/operations.py`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, InodeT, ModeT

from ckptfs.core import Inode
from ckptfs.core.model import Unsealed
from ckptfs.engine import clock
from ckptfs.engine.absorb import Absorb
from ckptfs.engine.hub import Hub
from ckptfs.fuse import processes
from ckptfs.fuse.handles import FileHandle
from ckptfs.tiers.base import Kind

FIRST_FH = 1
SET_ID = stat.S_ISUID | stat.S_ISGID


class Files(pyfuse3.Operations):
    """Handlers of open files."""

    @dataclass(frozen=True)
    class Parts:
        """What the handlers call."""

        absorb: Absorb
        state_of: Callable[[Inode], str]

    def __init__(self, hub: Hub, parts: Parts) -> None:
        super().__init__()
        self.hub = hub
        self.parts = parts
        self.absorb = parts.absorb
        self.files: dict[int, FileHandle] = {}
        self._next_fh = FIRST_FH

    def _inode(self, ino: InodeT) -> Inode:
        inode = self.hub.core.state.inodes.get(ino)
        if inode is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return inode

    def _attributes(self, inode: Inode) -> EntryAttributes:
        raise NotImplementedError

    def new_fh(self) -> FileHandleT:
        """A handle number never used before in this mount."""
        self._next_fh += 1
        return FileHandleT(self._next_fh)

    def _handle(self, inode: Inode, flags: int, ctx: pyfuse3.RequestContext) -> FileInfo:
        mode = flags & os.O_ACCMODE
        writes = mode != os.O_RDONLY
        # O_RDWR stays cached: shared mappings need the page cache (ENODEV otherwise).
        direct = mode == os.O_WRONLY
        tgid = processes.tgid_of(ctx.pid) if writes else 0
        fh = self.new_fh()
        strips = direct and ctx.uid != 0
        self.files[fh] = FileHandle(
            inode, writes=writes, direct=direct, strips=strips, tid=ctx.pid, tgid=tgid
        )
        inode.opens += 1
        if writes:
            inode.writers += 1
            self.hub.open_writers[inode.ino] = inode
        # keep_cache: writes through the mount are coherent with it; dropping it at every open is not needed.
        return FileInfo(fh=fh, direct_io=direct, keep_cache=True)

    def make_file(self, dir: Inode, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> Inode:
        """A new empty file: staging file first, then the row, then the reply."""
        hub = self.hub
        hub.core.names.check_new(dir, name)
        data = hub.new_data()
        hub.staging.create(data)
        try:
            inode = hub.core.names.create(
                dir, name, stat.S_IMODE(mode) & ~ctx.umask, ctx.uid, ctx.gid, data, clock.now()
            )
        except OSError:
            hub.staging.delete(data)
            raise
        hub.commit()
        return inode

    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[FileInfo, EntryAttributes]:
        # The kernel has just looked the name up: no question to the tier.
        dir = self._inode(parent_inode)
        existing = dir.children.get(name)
        if existing is not None:
            # Another node's file appeared since, or two processes create at once.
            if flags & os.O_EXCL:
                raise pyfuse3.FUSEError(errno.EEXIST)
            info = await self.open(InodeT(existing.ino), flags, ctx)
        else:
            existing = self.make_file(dir, name, mode, ctx)
            info = self._handle(existing, flags, ctx)
        existing.lookups += 1
        return info, self._attributes(existing)

    async def open(self, inode: InodeT, flags: FlagT, ctx: pyfuse3.RequestContext) -> FileInfo:
        target = self._inode(inode)
        if target.kind == Kind.DIR:
            raise pyfuse3.FUSEError(errno.EISDIR)
        info = self._handle(target, flags, ctx)
        if flags & os.O_TRUNC:  # with O_RDONLY too: the kernel has asked for write permission
            try:
                if ctx.uid != 0:
                    self._strip(target)
                await self.absorb.truncate(target, 0)
                if target.writers == 0:
                    await self.absorb.seal(target)
            except BaseException:
                await self._close(info.fh)
                raise
        return info

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return await self.absorb.read(self.files[fh].inode, off, size)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        handle = self.files[fh]
        handle.closed = False
        if handle.direct:
            if handle.strips and handle.inode.mode & SET_ID:
                self._strip(handle.inode)
            tid = handle.tid
            return await self.absorb.write(handle.inode, off, buf, lambda: processes.signal_pending(tid))
        try:
            return await self.absorb.write(handle.inode, off, buf, None)
        except OSError as e:
            # It may have been the write-back of a mapping, which hears of no error: what it lost
            # must never be published as if it were whole.
            self.absorb.interrupt(handle.inode, f"a write failed: {e.strerror}")
            raise

    def _strip(self, inode: Inode) -> None:
        """A write or truncation by somebody without CAP_FSETID ends set-user-id and set-group-id."""
        mode = inode.mode & ~stat.S_ISUID
        if mode & stat.S_IXGRP:
            mode &= ~stat.S_ISGID
        if mode != inode.mode:
            self.hub.core.names.setattr(inode, clock.now(), mode=mode)
            self.hub.commit()

    async def flush(self, fh: FileHandleT) -> None:
        """close(2) of one descriptor, perhaps not the last; the kernel waits for the answer."""
        handle = self.files[fh]
        inode = handle.inode
        if not handle.writes or inode.unsealed is Unsealed.NO:
            return
        signal = processes.killed_by(handle.tgid)
        if signal:
            handle.killed = signal
        elif not processes.holds_for_writing(handle.tgid, inode.name or b"", inode.ino):
            handle.closed = True
            if inode.writers == 1 or self._all_closed(inode):
                await self.absorb.closed(inode)

    def _all_closed(self, inode: Inode) -> bool:
        """Whether no other process still means to write (its RELEASE may just not be here yet)."""
        return all(h.closed for h in self.files.values() if h.inode is inode and h.writes)

    async def release(self, fh: FileHandleT) -> None:
        """The last descriptor of this open file is gone."""
        await self._close(fh)

    async def _close(self, fh: int) -> None:
        handle = self.files.pop(fh)
        inode = handle.inode
        inode.opens -= 1
        if inode.opens == 0:
            self.absorb.fetcher.forget(inode)
        if handle.writes:
            inode.writers -= 1
            if handle.killed and inode.unsealed is Unsealed.REWRITTEN and self._may_interrupt(inode):
                self.absorb.interrupt(inode, f"its writer was killed by signal {handle.killed}")
            if inode.writers == 0:
                self.hub.open_writers.pop(inode.ino, None)
                await self.absorb.seal(inode)
        self.hub.core.order.reap(inode)
        self.hub.commit()

    def _may_interrupt(self, inode: Inode) -> bool:
        return not inode.dead and not inode.held and not self.absorb.is_stream(inode.name or b"")

    async def closed_all(self) -> None:
        """The mount is gone: whatever is still open will never be heard of again.

        After a lazy unmount the last FLUSH has come, the last RELEASE has not.
        """
        for fh in list(self.files):
            handle = self.files[fh]
            inode = handle.inode
            if handle.writes and inode.unsealed is not Unsealed.NO and not inode.close_mark:
                signal = handle.killed or 0
                reason = f"its writer was killed by signal {signal}" if signal else "open at unmount"
                if self._may_interrupt(inode):
                    self.absorb.interrupt(inode, reason)
            await self._close(fh)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        inode = self.files[fh].inode
        if self.hub.fsync_policy(inode) == "tier":
            tid = self.files[fh].tid
            await self.absorb.wait_durable(inode, lambda: processes.signal_pending(tid))
        elif self.hub.durable_staging:
            await self.absorb.sync(inode)

    async def resize(self, inode: Inode, size: int, fh: FileHandleT | None) -> None:
        """truncate(2) and ftruncate(2)."""
        if inode.kind != Kind.FILE:
            raise pyfuse3.FUSEError(errno.EINVAL)
        inode.opens += 1
        try:
            await self.absorb.truncate(inode, size)
            if inode.writers == 0:
                await self.absorb.seal(inode)
        finally:
            inode.opens -= 1
            self.hub.core.order.reap(inode)
            self.hub.commit()

    def keep_times(self, inode: Inode) -> None:
        """A dirty file's times are its staging file's, so that a crash keeps them."""
        blob = self.hub.staging.blobs.get(inode.data)
        if blob is not None:
            self.hub.staging.set_times(blob, inode.atime_ns, inode.mtime_ns)
