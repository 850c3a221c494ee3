"""Open files, with what only the tier knows: how large a file may be, and when a write has to wait for it."""

from __future__ import annotations

import errno
import os

import pyfuse3
from pyfuse3 import FileHandleT, FileInfo

from ckptfs.core import Inode
from ckptfs.fuse.files import Files


class LimitedFiles(Files):
    """Refuses what the tier cannot hold before it is staged (R9), where it would be stuck for good."""

    def _handle(self, inode: Inode, flags: int, ctx: pyfuse3.RequestContext) -> FileInfo:
        info = super()._handle(inode, flags, ctx)
        handle = self.files[info.fh]
        if handle.direct and flags & os.O_DSYNC:  # a part of O_SYNC too
            hub = self.hub
            if hub.durable_staging or hub.fsync_policy(inode) == "tier":
                # The kernel follows a write through the page cache with an fsync, but not a direct one.
                handle.direct = info.direct_io = False
        return info

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        room = self.hub.pool.largest - off
        if len(buf) > room:
            # Up to the limit, as write(2) says; but the kernel takes a short count for an error where it
            # writes through the page cache.
            if room <= 0 or not self.files[fh].direct:
                raise pyfuse3.FUSEError(errno.EFBIG)
            buf = buf[:room]
        return await super().write(fh, off, buf)

    async def resize(self, inode: Inode, size: int, fh: FileHandleT | None) -> None:
        if size > max(self.hub.pool.largest, inode.size):
            raise pyfuse3.FUSEError(errno.EFBIG)
        await super().resize(inode, size, fh)
