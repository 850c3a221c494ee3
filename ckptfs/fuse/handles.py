"""Open files and directories."""

from __future__ import annotations

from ckptfs.core import Inode


class FileHandle:
    """One open file description.

    `tid` and `tgid` are the thread and process that opened it (write requests don't carry them).
    `direct`: writes bypass the page cache, so that they may be answered short or with EINTR.
    `killed`: its process was dying of a signal when it closed it. `closed`: its opener has closed it,
    and nothing was written through it since. `strips`: its writes take the
    set-id bits away (the kernel does not do that for direct writes).
    """

    __slots__ = ("closed", "direct", "inode", "killed", "strips", "tgid", "tid", "writes")

    def __init__(
        self, inode: Inode, *, writes: bool, direct: bool, strips: bool, tid: int, tgid: int
    ) -> None:
        self.inode = inode
        self.writes = writes
        self.direct = direct
        self.strips = strips
        self.tid = tid
        self.tgid = tgid
        self.killed = 0
        self.closed = False


class DirHandle:
    """One open directory: a snapshot of its names, so that a listing is stable under change."""

    __slots__ = ("inode", "names")

    def __init__(self, inode: Inode) -> None:
        self.inode = inode
        self.names: list[bytes] | None = None
