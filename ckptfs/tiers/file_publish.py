"""Making hidden files visible: attributes and digests first, then one rename(2)."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from ckptfs.tiers import file_records
from ckptfs.tiers.base import Applied, Attrs, Kind, Op, Put, TierError, Trouble
from ckptfs.tiers.file_attrs import by_descriptor, mode_for, pinned, set_mode, set_owner
from ckptfs.tiers.file_conflicts import keep_aside
from ckptfs.tiers.file_copy import copy_range
from ckptfs.tiers.file_dirs import Dirs
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.file_names import Seen, attrs_of, look, path_of, split
from ckptfs.tiers.file_records import Record
from ckptfs.tiers.file_replay import View, is_upload, landed
from ckptfs.tiers.file_upload import Uploads
from ckptfs.tiers.window import WriteBehind

_AT_ONCE = 64
"""Hidden files made ready together, so that their fsyncs share the file system's commits."""
_RACES = 5
"""Tries when another writer keeps changing the target."""


class Publisher:
    """Puts of one batch.

    Concurrency: one batch, one thread. `view` is how `file_replay` looks at the tier.
    """

    def __init__(self, root_fd: int, uploads: Uploads, dirs: Dirs, view: View) -> None:
        self._root_fd = root_fd
        self._uploads = uploads
        self._dirs = dirs
        self._view = view
        self._ready: dict[int, bool | OSError | TierError] = {}

    # -- making ready ----------------------------------------------------------------------------

    def make_ready(self, ops: Sequence[Op]) -> None:
        """Give all hidden files of the batch their attributes and digests, durably.

        Nobody sees them yet, so this may happen out of order. Failures wait for the op's turn.
        """
        puts = [(index, op) for index, op in enumerate(ops) if isinstance(op, Put)]
        for first in range(0, len(puts), _AT_ONCE):
            with contextlib.ExitStack() as stack:
                opened = []
                for index, op in puts[first : first + _AT_ONCE]:
                    try:
                        fd = self._uploads.open(self._root_fd, op.upload, os.O_RDWR)
                        if fd is None:
                            self._ready[index] = False
                            continue
                        stack.callback(os.close, fd)
                        self._check_size(fd, op)
                        self._dress(fd, op.attrs, op.size, op)
                        opened.append((index, fd))
                    except (OSError, TierError) as exc:
                        self._ready[index] = exc
                for index, fd in opened:
                    try:
                        os.fsync(fd)
                        self._ready[index] = True
                    except OSError as exc:
                        self._ready[index] = exc

    @staticmethod
    def _check_size(fd: int, op: Put) -> None:
        size = os.fstat(fd).st_size
        if size != op.size:
            raise TierError(
                Trouble.REDO,
                f"the upload of {show(op.path)} has {size} bytes on the tier instead of {op.size}",
                errno.EIO,
            )

    def _dress(self, fd: int, attrs: Attrs, size: int, source: Put | Record) -> None:
        """Owner, times, digest record and, last because it may lock the daemon out, the mode."""
        if os.fstat(fd).st_mode & 0o600 != 0o600:
            os.fchmod(fd, 0o600)
        owned = set_owner(fd, attrs)
        os.utime(fd, ns=(attrs.atime_ns, attrs.mtime_ns))
        st = os.fstat(fd)  # the times as this file system keeps them
        record = Record(size, st.st_mtime_ns, source.version, source.digests)
        file_records.store(self._root_fd, fd, st.st_ino, record)
        set_mode(fd, mode_for(attrs, owned, st))

    # -- publishing ------------------------------------------------------------------------------

    def put(self, index: int, op: Put, rest: Sequence[Op]) -> Applied:
        """Publish one version; what another writer has there is kept (W3)."""
        ready = self._ready[index]
        if not ready:
            return self._was_put(op, rest)
        if not isinstance(ready, bool):
            raise ready
        parent, name = split(op.path)
        kept_before = self._dirs.conflicts
        dir_fd = self._dirs.ensure(parent)
        conflict = self._dirs.conflicts > kept_before
        for _ in range(_RACES):
            there = look(dir_fd, name)
            if there is not None and self._is_this(dir_fd, name, there, op):
                self._uploads.abandon(self._root_fd, (op.upload,))
                self._dirs.touch(dir_fd)
                return Applied(there.token, there.ident, conflict)
            if there is not None:
                conflict |= self.make_way(op.path, dir_fd, there, op.expected, Kind.FILE)
            try:
                ident = self._rename(op, dir_fd, parent, name)
            except OSError as exc:
                if exc.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # a directory came back under the name
            break
        else:
            raise OSError(errno.EAGAIN, "another writer keeps replacing it")
        self._dirs.touch(dir_fd)
        now = look(dir_fd, name)
        if now is None or now.ident != ident or now.st.st_size != op.size:
            raise TierError(
                Trouble.REDO, f"{show(op.path)} was replaced by another writer while published", errno.EAGAIN
            )
        if there is not None and there.kind is Kind.FILE and there.st.st_nlink == 1 and not conflict:
            file_records.drop_manifest(self._root_fd, there.st.st_ino)
        return Applied(now.token, now.ident, conflict)

    def _rename(self, op: Put, dir_fd: int, parent: bytes, name: bytes) -> str:
        """The step that makes it visible; returns the identity it has then."""
        with self._uploads.directory(self._root_fd, op.upload.handle) as (from_fd, hidden):
            if from_fd < 0:
                raise TierError(Trouble.REDO, f"the upload of {show(op.path)} is gone", errno.ENOENT)
            try:
                os.rename(hidden, name, src_dir_fd=from_fd, dst_dir_fd=dir_fd)
            except OSError as exc:
                if exc.errno != errno.EXDEV:
                    raise
            else:
                self._uploads.published(self._root_fd, op.upload.handle)
                return op.upload.ident
        fd = self._uploads.open(self._root_fd, op.upload, os.O_RDONLY)
        if fd is None:
            raise TierError(Trouble.REDO, f"the upload of {show(op.path)} is gone", errno.ENOENT)
        try:
            ident = self.copy_over(fd, op.attrs, op, parent, dir_fd, name)
        finally:
            os.close(fd)
        self._uploads.abandon(self._root_fd, (op.upload,))
        return ident

    def copy_over(
        self, fd: int, attrs: Attrs, source: Put | Record, parent: bytes, dir_fd: int, name: bytes
    ) -> str:
        """Replace `name` by a durable copy of `fd`, which is on another file system (EXDEV)."""
        size = os.fstat(fd).st_size
        if isinstance(source, Put):
            version = split(path_of(source.upload.handle))[1].removeprefix(self._uploads.beside).decode()
        else:
            version = f"move-{os.fstat(fd).st_ino}"
        new_fd, hidden = self._uploads.create_beside(self._root_fd, version, parent, dir_fd)
        try:
            copied = copy_range(fd, new_fd, 0, size, WriteBehind(new_fd, 0))
            if copied != size:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            self._dress(new_fd, attrs, size, source)
            os.fsync(new_fd)
            ident = str(os.fstat(new_fd).st_ino)
        finally:
            os.close(new_fd)
        os.rename(hidden, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        path = parent + b"/" + hidden if parent else hidden
        self._uploads.published(self._root_fd, path.decode("utf-8", "surrogateescape"))
        return ident

    def _is_this(self, dir_fd: int, name: bytes, there: Seen, op: Put) -> bool:
        """Whether the object under the name is this version already, also as a copy (EXDEV)."""
        if is_upload(there, op.upload, op.size):
            return True
        if there.kind is not Kind.FILE or there.token == op.expected or not op.version:
            return False
        fd = pinned(dir_fd, name)
        try:
            st = os.fstat(fd)
            record = file_records.load(self._root_fd, by_descriptor(fd), st)
        finally:
            os.close(fd)
        return (
            record is not None
            and record.describes(st)
            and (record.version, record.size, record.digests) == (op.version, op.size, op.digests)
        )

    def _was_put(self, op: Put, rest: Sequence[Op]) -> Applied:
        """The hidden file is gone: published by an earlier try, or lost."""
        parent, name = split(op.path)
        dir_fd = self._dirs.find(parent)
        there = look(dir_fd, name) if dir_fd is not None else None
        if dir_fd is not None and there is not None and self._is_this(dir_fd, name, there, op):
            self._dirs.touch(dir_fd)
            self._uploads.published(self._root_fd, op.upload.handle)
            return Applied(there.token, there.ident)
        if landed(self._view, op.path, lambda there: is_upload(there, op.upload, op.size), rest):
            return Applied("", op.upload.ident)
        raise TierError(
            Trouble.REDO,
            f"the upload of {show(op.path)} is gone from the tier before it was published",
            errno.ENOENT,
        )

    # -- what is in the way ----------------------------------------------------------------------

    def make_way(self, path: bytes, dir_fd: int, there: Seen, expected: str | None, coming: Kind) -> bool:
        """Prepare a name for rename(2) over it; True when something foreign had to be kept.

        What is as expected is left for rename(2) to replace, or removed where that cannot.
        """
        _, name = split(path)
        if there.kind is Kind.DIR:
            if there.token == expected and self.remove_dir(path, dir_fd):
                return False
            keep_aside(self._root_fd, dir_fd, name, there, leave=False)
            self._dirs.forget(path)
            self._dirs.touch(dir_fd)
            return True
        if there.token == expected:
            if coming is Kind.DIR:
                os.unlink(name, dir_fd=dir_fd)
            return False
        keep_aside(self._root_fd, dir_fd, name, there, leave=coming is not Kind.DIR)
        self._dirs.touch(dir_fd)
        return True

    def remove_dir(self, path: bytes, dir_fd: int) -> bool:
        """rmdir(2), uploads of ours in it removed first; False when others' files keep it."""
        _, name = split(path)
        for swept in (False, True):
            try:
                os.rmdir(name, dir_fd=dir_fd)
            except FileNotFoundError:
                break
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
                inside = self._dirs.find(path)
                if swept or inside is None:
                    return False
                self._uploads.sweep_dir(inside)
            else:
                break
        self._dirs.forget(path)
        self._dirs.touch(dir_fd)
        return True

    def move_copy(self, src_fd: int, src: bytes, dst: bytes, dst_fd: int) -> str:
        """A file's rename between two file systems: copied with attributes and digests."""
        _, src_name = split(src)
        parent, name = split(dst)
        fd = os.open(src_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=src_fd)
        try:
            st = os.fstat(fd)
            record = file_records.load(self._root_fd, fd, st)
            if record is None or not record.describes(st):
                record = Record(st.st_size, st.st_mtime_ns, "", ())
            ident = self.copy_over(fd, attrs_of(st), record, parent, dst_fd, name)
        finally:
            os.close(fd)
        os.unlink(src_name, dir_fd=src_fd)
        file_records.drop_manifest(self._root_fd, st.st_ino)
        return ident
