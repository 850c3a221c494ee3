"""The handlers: namespace requests. File content is in `fuse/files.py`.

Each changes the core in one step without `await`, journals it, and only then replies (invariant 2).
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileNameT, FlagT, InodeT, ModeT, XAttrNameT

from ckptfs.core import Inode
from ckptfs.core.model import Unsealed
from ckptfs.core.names import NAME_MAX
from ckptfs.engine import clock
from ckptfs.engine.hub import Hub
from ckptfs.engine.space import SpaceInfo
from ckptfs.engine.view import View
from ckptfs.fuse.files import Files
from ckptfs.fuse.guard import guarded
from ckptfs.fuse.handles import DirHandle
from ckptfs.fuse.limits import LimitedFiles
from ckptfs.tiers.base import Kind

BLOCK_SIZE = 256 << 10
"""st_blksize: what buffered writers use as their buffer, in bytes."""

XATTR_STATE = b"user.ckptfs.state"

FORMATS = {Kind.FILE: stat.S_IFREG, Kind.DIR: stat.S_IFDIR, Kind.LINK: stat.S_IFLNK}


def fail(code: int) -> pyfuse3.FUSEError:
    """The reply for an errno."""
    return pyfuse3.FUSEError(code)


@guarded
class Operations(LimitedFiles):
    """All handlers of a mount."""

    def __init__(self, hub: Hub, files: Files.Parts, view: View, space: SpaceInfo) -> None:
        super().__init__(hub, files)
        self.view = view
        self.space = space
        self._timeout = hub.config.attr_timeout
        self._dirs: dict[int, DirHandle] = {}

    # -- attributes --------------------------------------------------------------------------

    def _attributes(self, inode: Inode) -> EntryAttributes:
        a = EntryAttributes()
        a.st_ino = InodeT(inode.ino)
        a.generation = 0
        a.entry_timeout = self.view.remaining(inode)
        a.attr_timeout = self._timeout
        a.st_mode = ModeT(FORMATS[inode.kind] | inode.mode)
        # Directories say 1, "not counted", as btrfs does.
        a.st_nlink = 0 if inode.dead else 1
        a.st_uid, a.st_gid = inode.uid, inode.gid
        a.st_rdev = 0
        a.st_size = inode.size
        a.st_blksize = BLOCK_SIZE
        a.st_blocks = -(-inode.size // 512)
        a.st_atime_ns, a.st_mtime_ns, a.st_ctime_ns = inode.atime_ns, inode.mtime_ns, inode.ctime_ns
        return a

    def _known(self, inode: Inode) -> EntryAttributes:
        """Attributes for a reply that makes the kernel remember the inode."""
        inode.lookups += 1
        return self._attributes(inode)

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        dir = self._inode(parent_inode)
        if name == b".":
            return self._known(dir)
        if name == b"..":
            return self._known(dir.parent or dir)
        child = dir.children.get(name)
        if child is None and len(name) > NAME_MAX:
            raise fail(errno.ENAMETOOLONG)
        if child is None or not (child.local or child.pending):
            child = await self.view.lookup(dir, name)
        if child is None:
            raise fail(errno.ENOENT)
        return self._known(child)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for ino, count in inode_list:
            inode = self.hub.core.state.inodes.get(ino)
            if inode is not None:
                inode.lookups -= count
                if inode.dead:
                    self.hub.core.order.reap(inode)
        self.hub.commit()

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        return self._attributes(self._inode(inode))

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> EntryAttributes:
        target = self._inode(inode)
        if fields.update_size:
            await self.resize(target, attr.st_size, fh)
        others = (
            fields.update_mode or fields.update_uid or fields.update_gid
            or fields.update_atime or fields.update_mtime
        )  # fmt: skip
        if others:
            self.hub.core.names.setattr(
                target,
                clock.now(),
                mode=attr.st_mode if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=attr.st_atime_ns if fields.update_atime else None,
                mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            )
            if target.unsealed is not Unsealed.NO and (fields.update_atime or fields.update_mtime):
                self.keep_times(target)
            self.hub.commit()
            self.hub.work.beat()
        return self._attributes(target)

    async def access(self, inode: InodeT, mode: ModeT, ctx: pyfuse3.RequestContext) -> bool:
        return True  # default_permissions: the kernel has checked

    # -- names -------------------------------------------------------------------------------

    async def _room_for(self, parent: InodeT, name: FileNameT) -> Inode:
        """The directory, when `name` can be made in it (asks the tier about unknown names)."""
        dir = self._inode(parent)
        if dir.children.get(name) is None:
            await self.view.lookup(dir, name)
        return dir

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        dir = await self._room_for(parent_inode, name)
        new = self.hub.core.names.mkdir(
            dir, name, stat.S_IMODE(mode) & ~ctx.umask, ctx.uid, ctx.gid, clock.now()
        )
        self.view.made(new)
        self.hub.commit()
        self.hub.work.beat()
        return self._known(new)

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        dir = await self._room_for(parent_inode, name)
        new = self.hub.core.names.symlink(dir, name, target, ctx.uid, ctx.gid, clock.now())
        self.hub.commit()
        self.hub.work.beat()
        return self._known(new)

    async def readlink(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileNameT:
        return FileNameT(self._inode(inode).target)

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        if not stat.S_ISREG(mode):
            raise fail(errno.EPERM)
        dir = await self._room_for(parent_inode, name)
        new = self.make_file(dir, name, mode, ctx)
        await self.absorb.seal(new)
        return self._known(new)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        raise fail(errno.EPERM)  # link(2): "the filesystem does not support the creation of hard links"

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        dir = await self._room_for(parent_inode, name)
        self._going(dir, name)
        self.hub.core.names.unlink(dir, name, clock.now())
        self.hub.commit()
        self.hub.work.beat()
        self.hub.changed.beat()

    def _going(self, dir: Inode, name: bytes) -> None:
        """A name is about to be taken from a file that may be open."""
        target = dir.children.get(name)
        if target is not None and target.opens:
            self.absorb.fetcher.orphan(target)

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        dir = await self._room_for(parent_inode, name)
        await self._look_inside(dir, name)
        self.hub.core.names.rmdir(dir, name, clock.now())
        self.hub.commit()
        self.hub.work.beat()

    async def _look_inside(self, dir: Inode, name: bytes) -> None:
        """Before a directory is judged empty: what others put there counts."""
        child = dir.children.get(name)
        if child is not None and child.kind == Kind.DIR and not child.children:
            await self.view.refresh_above(child)

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        old = await self._room_for(parent_inode_old, name_old)
        new = await self._room_for(parent_inode_new, name_new)
        await self._look_inside(new, name_new)
        self._going(new, name_new)
        self.hub.core.names.rename(old, name_old, new, name_new, flags, clock.now())
        self.hub.commit()
        self.hub.work.beat()

    # -- directories -------------------------------------------------------------------------

    async def opendir(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileHandleT:
        dir = self._inode(inode)
        if dir.kind != Kind.DIR:
            raise fail(errno.ENOTDIR)
        fh = self.new_fh()
        self._dirs[fh] = DirHandle(dir)
        dir.opens += 1
        return fh

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        handle = self._dirs[fh]
        if start_id == 0 or handle.names is None:
            await self.view.refresh(handle.inode)
            handle.names = list(handle.inode.children)
        for index in range(start_id, len(handle.names)):
            name = handle.names[index]
            inode = handle.inode.children.get(name)
            if inode is None:
                continue  # gone since the listing began
            if not pyfuse3.readdir_reply(token, FileNameT(name), self._attributes(inode), index + 1):
                break
            inode.lookups += 1

    async def releasedir(self, fh: FileHandleT) -> None:
        dir = self._dirs.pop(fh).inode
        dir.opens -= 1
        self.hub.core.order.reap(dir)
        self.hub.commit()

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        dir = self._dirs[fh].inode
        if self.hub.fsync_policy(dir) == "tier":
            await self.absorb.wait_dir_durable(dir)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        s = pyfuse3.StatvfsData()
        total, free = self.space.answer()
        s.f_bsize = s.f_frsize = 4096
        s.f_blocks = total // 4096
        s.f_bfree = s.f_bavail = free // 4096
        s.f_files = s.f_ffree = s.f_favail = 1 << 40
        s.f_namemax = NAME_MAX
        return s

    # -- extended attributes -----------------------------------------------------------------

    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        target = self._inode(inode)
        if not name.startswith(b"user."):
            raise fail(errno.ENOTSUP)
        if name.startswith(b"user.ckptfs."):
            raise fail(errno.EPERM)
        if sum(map(len, target.xattrs.values())) + len(value) > 64 << 10:
            raise fail(errno.ENOSPC)
        target.xattrs[bytes(name)] = bytes(value)
        self.hub.core.state.keep(target)
        self.hub.commit()

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: pyfuse3.RequestContext) -> bytes:
        target = self._inode(inode)
        if name == XATTR_STATE and target.kind != Kind.LINK:
            return self.parts.state_of(target).encode()
        value = target.xattrs.get(bytes(name))
        if value is None:
            raise fail(pyfuse3.ENOATTR)
        return value

    async def listxattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> Sequence[XAttrNameT]:
        return [XAttrNameT(n) for n in self._inode(inode).xattrs]

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: pyfuse3.RequestContext) -> None:
        target = self._inode(inode)
        if target.xattrs.pop(bytes(name), None) is None:
            raise fail(pyfuse3.ENOATTR)
        self.hub.core.state.touch(target)
        self.hub.core.order.reap(target)
        self.hub.commit()
