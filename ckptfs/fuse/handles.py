"""Open files and directories."""

from __future__ import annotations

from ckptfs.core import Inode


class FileHandle:
    """One open file description.

    `tid` and `tgid` are the thread and process that opened it (write requests don't carry them).
    `direct`: writes bypass the page cache, so that they may be answered short or with EINTR.
    `killed`: its process was dying of a signal when it closed it.
    """

    __slots__ = ("direct", "inode", "killed", "tgid", "tid", "writes")

    def __init__(self, inode: Inode, *, writes: bool, direct: bool, tid: int, tgid: int) -> None:
        self.inode = inode
        self.writes = writes
        self.direct = direct
        self.tid = tid
        self.tgid = tgid
        self.killed = 0


class DirHandle:
    """One open directory: a snapshot of its names, so that a listing is stable under change."""

    __slots__ = ("entries", "inode")

    def __init__(self, inode: Inode) -> None:
        self.inode = inode
        self.entries: list[tuple[bytes, Inode]] | None = None
