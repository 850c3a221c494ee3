"""The mount's namespace: what names exist, and what each change of them means for the log.

Methods raise `OSError` with the errno the caller of the syscall gets. Names of files that were
never sealed are in no log: the tier hears of them at the seal (R6).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ckptfs.core.model import EntryKind, Inode, Node, Unsealed, to_ns
from ckptfs.core.order import Order
from ckptfs.core.state import State
from ckptfs.tiers.base import RESERVED, Attrs, Kind

NAME_MAX = 255
"""Longest name in bytes."""

RENAME_NOREPLACE = 1
"""Flag of renameat2(2)."""

S_ISGID = 0o2000
MODE_BITS = 0o7777


def fail(code: int) -> OSError:
    """An `OSError` for an errno."""
    return OSError(code, os.strerror(code))


def _join(dir: bytes, name: bytes) -> bytes:
    return dir + b"/" + name if dir else name


class Names:
    """Operations on names of one mount. Times in nanoseconds, `now` in seconds."""

    def __init__(self, state: State, order: Order, *, forbids: Callable[[bytes], int] | None = None) -> None:
        """`forbids`: the errno for a path that the tier cannot hold (R9), 0 for one that it can."""
        self.state = state
        self.order = order
        self.forbids = forbids

    def child(self, parent: Inode, name: bytes) -> Inode | None:
        """The inode under a name as the core knows it (the tier may know more)."""
        return parent.children.get(name)

    def check_new(self, parent: Inode, name: bytes) -> None:
        """Refuse what can't be made: EEXIST, ENAMETOOLONG, EPERM (reserved), ENOENT (dead parent)."""
        if len(name) > NAME_MAX:
            raise fail(errno.ENAMETOOLONG)
        if name.startswith(RESERVED):
            raise fail(errno.EPERM)
        if parent.dead:
            raise fail(errno.ENOENT)
        if parent.kind != Kind.DIR:
            raise fail(errno.ENOTDIR)
        if name in parent.children:
            raise fail(errno.EEXIST)
        self._check_path(_join(parent.path(), name))

    def _check_path(self, path: bytes) -> None:
        code = self.forbids(path) if self.forbids is not None else 0
        if code:
            raise fail(code)

    def _check_tree(self, inode: Inode, path: bytes) -> None:
        """Refuse a new path that the tier cannot hold, or under which it cannot hold what is inside."""
        if self.forbids is None:
            return
        todo = [(inode, path)]
        while todo:
            i, p = todo.pop()
            self._check_path(p)
            todo += [(child, _join(p, name)) for name, child in i.children.items()]

    def _attach(self, inode: Inode, parent: Inode, name: bytes, now: float) -> None:
        inode.parent, inode.name = parent, name
        parent.children[name] = inode
        self.state.keep(inode)
        self._changed_dir(parent, now)

    def _changed_dir(self, dir: Inode, now: float) -> None:
        dir.mtime_ns = dir.ctime_ns = to_ns(now)
        if not dir.dead:
            self.order.attrs_changed(dir)

    def _new(self, parent: Inode, kind: Kind, mode: int, uid: int, gid: int, now: float) -> Inode:
        ns = to_ns(now)
        if parent.mode & S_ISGID:
            gid = parent.gid
            if kind == Kind.DIR:
                mode |= S_ISGID
        inode = Inode(self.state.next_id(), kind, Attrs(mode & MODE_BITS, uid, gid, ns, ns))
        self.state.inodes[inode.ino] = inode
        return inode

    def create(
        self, parent: Inode, name: bytes, mode: int, uid: int, gid: int, data: int, now: float
    ) -> Inode:
        """A new empty file with staging `data`, not sealed."""
        self.check_new(parent, name)
        inode = self._new(parent, Kind.FILE, mode, uid, gid, now)
        inode.unsealed = Unsealed.REWRITTEN
        inode.dirty_at = now
        self.state.set_data(inode, data)
        self._attach(inode, parent, name, now)
        return inode

    def mkdir(self, parent: Inode, name: bytes, mode: int, uid: int, gid: int, now: float) -> Inode:
        """A new directory, logged."""
        self.check_new(parent, name)
        inode = self._new(parent, Kind.DIR, mode, uid, gid, now)
        inode.node = self.order.new_node(inode)
        self._attach(inode, parent, name, now)
        self.order.append_mkdir(inode)
        return inode

    def symlink(self, parent: Inode, name: bytes, target: bytes, uid: int, gid: int, now: float) -> Inode:
        """A new symbolic link, logged."""
        self.check_new(parent, name)
        inode = self._new(parent, Kind.LINK, 0o777, uid, gid, now)
        inode.target = target
        inode.size = len(target)
        self._attach(inode, parent, name, now)
        e = self.order.append(EntryKind.LINK, inode, self.order.new_node(inode), parent, name)
        e.sealed_at = e.first_at = now
        return inode

    def unlink(self, parent: Inode, name: bytes, now: float) -> Inode:
        """Remove a file or link."""
        inode = self._existing(parent, name)
        if inode.kind == Kind.DIR:
            raise fail(errno.EISDIR)
        self._detach(inode, now)
        return inode

    def rmdir(self, parent: Inode, name: bytes, now: float) -> Inode:
        """Remove an empty directory (the caller has made sure that its listing is known)."""
        inode = self._existing(parent, name)
        if inode.kind != Kind.DIR:
            raise fail(errno.ENOTDIR)
        if inode.children:
            raise fail(errno.ENOTEMPTY)
        self._detach(inode, now)
        return inode

    def _existing(self, parent: Inode, name: bytes) -> Inode:
        inode = parent.children.get(name)
        if inode is None:
            raise fail(errno.ENOENT)
        return inode

    def _detach(self, inode: Inode, now: float) -> None:
        """Take an inode out of the namespace for good; what the tier has of it goes late."""
        parent = inode.parent
        assert parent is not None
        assert inode.name is not None
        del parent.children[inode.name]
        inode.parent = inode.name = None
        inode.ctime_ns = to_ns(now)
        self._changed_dir(parent, now)
        self.order.unhold(inode)
        inode.unsealed = Unsealed.NO
        inode.close_mark = 0
        self.order.drop_temporary(inode, now)
        if inode.node is not None and not inode.node.dead_pos and (inode.node.present or inode.node.pending):
            self.order.bury(inode.node)
        for e in inode.puts:
            self.order.bury(e.node)
        self.order.release_held(inode)
        self.state.touch(inode)
        self.order.reap(inode)

    def rename(
        self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int, now: float
    ) -> None:
        """Rename a file, link or whole directory, over an existing one if that can be replaced.

        Raises EEXIST, EISDIR, ENOTDIR, ENOTEMPTY, EINVAL (unsupported flags, or into itself),
        ENAMETOOLONG, EPERM.
        """
        if flags & ~RENAME_NOREPLACE:
            raise fail(errno.EINVAL)
        inode = self._existing(parent, name)
        old = new_parent.children.get(new_name)
        if old is not None and flags & RENAME_NOREPLACE:
            raise fail(errno.EEXIST)
        if old is inode:
            return
        if old is None:
            self.check_new(new_parent, new_name)
        elif inode.kind == Kind.DIR:
            if old.kind != Kind.DIR:
                raise fail(errno.ENOTDIR)
            if old.children:
                raise fail(errno.ENOTEMPTY)
        elif old.kind == Kind.DIR:
            raise fail(errno.EISDIR)
        up: Inode | None = new_parent
        while up is not None:
            if up is inode:
                raise fail(errno.EINVAL)
            up = up.parent
        self._check_tree(inode, _join(new_parent.path(), new_name))
        if old is not None:
            self._detach(old, now)
        del parent.children[name]
        self._changed_dir(parent, now)
        self._attach(inode, new_parent, new_name, now)
        inode.ctime_ns = to_ns(now)
        if inode.kind == Kind.DIR:
            self._log_dir_move(inode, new_parent, new_name)
        else:
            self._log_file_move(inode, new_parent, new_name)
        self.order.reap(inode)

    def _log_dir_move(self, inode: Inode, dir: Inode, name: bytes) -> None:
        node = inode.node
        if node is not None and (node.present or node.pending):
            self.order.append(EntryKind.MOVE, inode, node, dir, name)
        self.order.retarget(self.order.entries_under(inode))

    def _log_file_move(self, inode: Inode, dir: Inode, name: bytes) -> None:
        """R4a, R6, or a plain MOVE of what is published."""
        order = self.order
        live = order.live_puts(inode)
        coming = [e.node for e in inode.puts if e.frozen and not e.node.dead_pos]
        if live:
            order.retarget(live, dir, name)
            self._bury_published(inode, coming, None)
        elif inode.local and (inode.unsealed or inode.held):
            self._bury_published(inode, coming, inode)
        else:
            node = coming[-1] if coming else inode.node
            if node is not None:
                order.append(EntryKind.MOVE, inode, node, dir, name)

    def _bury_published(self, inode: Inode, coming: list[Node], held_by: Inode | None) -> None:
        if inode.node is not None:
            self.order.bury(inode.node, held_by)
        for node in coming:
            self.order.bury(node, held_by)

    def setattr(
        self,
        inode: Inode,
        now: float,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
    ) -> None:
        """Change attributes; what is published already gets them late (R1)."""
        if mode is not None:
            inode.mode = mode & MODE_BITS
        if uid is not None:
            inode.uid = uid
        if gid is not None:
            inode.gid = gid
        if atime_ns is not None:
            inode.atime_ns = atime_ns
        if mtime_ns is not None:
            inode.mtime_ns = mtime_ns
        inode.ctime_ns = to_ns(now)
        if inode.puts and not inode.unsealed and inode.kind == Kind.FILE:
            last = inode.puts[-1]
            if not last.frozen:
                last.mtime_ns, last.atime_ns = inode.mtime_ns, inode.atime_ns
                self.state.touch_entry(last)
        if inode.kept or inode.node is not None:
            self.state.keep(inode)
        on_tier = inode.node is not None and (inode.node.present or inode.kind == Kind.DIR)
        if not inode.dead and (on_tier or any(e.frozen for e in inode.puts)):
            self.order.attrs_changed(inode)
