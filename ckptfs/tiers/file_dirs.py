"""Directories of one batch: opened once, made durable once at its end."""

from __future__ import annotations

import errno
import os
from types import TracebackType

from ckptfs.tiers.base import Kind
from ckptfs.tiers.file_conflicts import keep_aside
from ckptfs.tiers.file_names import components, look, split
from ckptfs.tiers.file_root import open_dir

_OPEN = 200
"""Descriptors held before the batch syncs and closes them all, between two ops."""

_NO_DIR_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_REMOVED = frozenset({errno.ENOENT, errno.ESTALE})


class Dirs:
    """Open directories by path, and which of them have to be fsynced.

    Attributes: `root_fd`; `made`: st_ino of directories this batch created; `conflicts`: how often
    something foreign had to be moved out of a path. Not thread-safe; one per batch.
    """

    def __init__(self, root_fd: int) -> None:
        self.root_fd = root_fd
        self.made: set[int] = set()
        self.conflicts = 0
        self._open: dict[bytes, int] = {}
        self._renamed: list[int] = []
        self._dirty: set[int] = set()

    def __enter__(self) -> Dirs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def find(self, path: bytes) -> int | None:
        """A descriptor of an existing directory, valid until the next `trim`, or None."""
        fd = self._open.get(path)
        if fd is not None:
            return fd
        try:
            fd = open_dir(self.root_fd, components(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._open[path] = fd
        return fd

    def ensure(self, path: bytes) -> int:
        """The same, made with its parents where missing.

        What ckptfs publishes goes into a directory of the mount; when somebody removed it from
        the tier, or put something else in its place (kept in conflicts), it is made again.
        """
        fd = self.find(path)
        if fd is not None:
            return fd
        parent, name = split(path)
        parent_fd = self.ensure(parent)
        there = look(parent_fd, name)
        if there is not None and there.kind is not Kind.DIR:
            keep_aside(self.root_fd, parent_fd, name, there, leave=False)
            self.conflicts += 1
        try:
            os.mkdir(name, 0o777, dir_fd=parent_fd)
            self.made.add(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_ino)
        except FileExistsError:
            pass  # another writer was quicker
        self.touch(parent_fd)
        fd = self.find(path)
        if fd is None:
            raise OSError(errno.EAGAIN, "the directory keeps vanishing")
        return fd

    def trim(self) -> None:
        """Between two ops: keep the number of open descriptors bounded."""
        if len(self._open) + len(self._renamed) >= _OPEN:
            self.sync()
            self.close()

    def touch(self, fd: int) -> None:
        """The directory's entries changed: fsync it before the batch is reported."""
        self._dirty.add(fd)

    def forget(self, path: bytes) -> None:
        """`path` and what is below was renamed or removed: its name no longer leads to the open ones."""
        below = path + b"/"
        for name in [name for name in self._open if name == path or name.startswith(below)]:
            self._renamed.append(self._open.pop(name))

    def sync(self) -> None:
        """Make all name changes so far durable."""
        for fd in sorted(self._dirty):
            try:
                os.fsync(fd)
            except OSError as exc:
                # One that was removed meanwhile has nothing to keep; some file systems have no
                # fsync of directories and write names through.
                if exc.errno not in _NO_DIR_SYNC | _REMOVED:
                    raise
        self._dirty.clear()

    def close(self) -> None:
        """Close all descriptors."""
        for fd in [*self._open.values(), *self._renamed]:
            os.close(fd)
        self._open.clear()
        self._renamed.clear()
        self._dirty.clear()
