"""One ordered batch of ops on a file tier."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Sequence

from ckptfs.tiers import file_records
from ckptfs.tiers.base import (
    Applied,
    Failed,
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Outcome,
    Put,
    Remove,
    SetAttrs,
    TierError,
    Trouble,
    Upload,
)
from ckptfs.tiers.file_attrs import by_descriptor, mode_for, pinned, set_link_attrs, set_mode, set_owner
from ckptfs.tiers.file_conflicts import keep_aside
from ckptfs.tiers.file_dirs import Dirs
from ckptfs.tiers.file_errors import failed, show
from ckptfs.tiers.file_names import Seen, components, ident_of_token, look, split
from ckptfs.tiers.file_publish import Publisher
from ckptfs.tiers.file_replay import is_link, landed
from ckptfs.tiers.file_upload import Uploads

_VERBS = {
    Put: "publishing",
    Link: "linking",
    Mkdir: "making directory",
    Move: "moving",
    Remove: "removing",
    SetAttrs: "setting attributes of",
}


def apply(root_fd: int, uploads: Uploads, ops: Sequence[Op]) -> Outcome:
    """Apply the ops in order, stopping at the first failure.

    Name changes are made durable by one fsync per directory at the end; when that fails nothing
    counts as applied, and the ops recognise their work when they come again.
    """
    with Dirs(root_fd) as dirs:
        return _Batch(root_fd, uploads, dirs).run(ops)


class _Batch:
    """State of one `apply`; also the `View` that `file_replay` looks through."""

    def __init__(self, root_fd: int, uploads: Uploads, dirs: Dirs) -> None:
        self._root_fd = root_fd
        self._uploads = uploads
        self._dirs = dirs
        self._publisher = Publisher(root_fd, uploads, dirs, self)

    def run(self, ops: Sequence[Op]) -> Outcome:
        applied: list[Applied] = []
        failure: Failed | None = None
        self._publisher.make_ready(ops)
        for index, op in enumerate(ops):
            try:
                self._dirs.trim()
                applied.append(self._apply(index, op, ops[index + 1 :]))
            except (OSError, TierError) as exc:
                failure = failed(exc, _what(op))
                break
        try:
            self._dirs.sync()
        except OSError as exc:
            return Outcome((), failed(exc, "making the batch durable"))
        return Outcome(tuple(applied), failure)

    def _apply(self, index: int, op: Op, rest: Sequence[Op]) -> Applied:
        for path in (op.src, op.dst) if isinstance(op, Move) else (op.path,):
            if not components(path) and not isinstance(op, (Mkdir, SetAttrs)):
                raise TierError(Trouble.REFUSED, "the tier's root cannot be replaced", errno.EBUSY)
        if isinstance(op, Put):
            return self._publisher.put(index, op, rest)
        if isinstance(op, Link):
            return self._link(op)
        if isinstance(op, Mkdir):
            return self._mkdir(op)
        if isinstance(op, Move):
            return self._move(op, rest)
        if isinstance(op, Remove):
            return self._remove(op, rest)
        return self._set_attrs(op)

    # -- file_replay.View ------------------------------------------------------------------------

    def at(self, path: bytes) -> Seen | None:
        """The object at a path now."""
        parent, name = split(path)
        dir_fd = self._dirs.find(parent)
        return look(dir_fd, name) if dir_fd is not None else None

    def is_gone(self, upload: Upload) -> bool:
        """Whether a hidden file is gone."""
        fd = self._uploads.open(self._root_fd, upload, os.O_RDONLY)
        if fd is None:
            return True
        os.close(fd)
        return False

    # -- ops -------------------------------------------------------------------------------------

    def _parent(self, path: bytes) -> tuple[int, bytes, bool]:
        """Directory (made when missing) and name of a path; whether something foreign was kept."""
        parent, name = split(path)
        before = self._dirs.conflicts
        return self._dirs.ensure(parent), name, self._dirs.conflicts > before

    def _link(self, op: Link) -> Applied:
        dir_fd, name, conflict = self._parent(op.path)
        there = look(dir_fd, name)
        if there is None or not is_link(there, op):
            if there is not None:
                conflict |= self._publisher.make_way(op.path, dir_fd, there, op.expected, Kind.LINK)
            self._place_link(op.target, dir_fd, name)
        set_link_attrs(dir_fd, name, op.attrs)
        self._dirs.touch(dir_fd)
        now = look(dir_fd, name)
        if now is None or not is_link(now, op):
            raise OSError(errno.EAGAIN, "another writer replaced it")
        return Applied(now.token, now.ident, conflict)

    def _place_link(self, target: bytes, dir_fd: int, name: bytes) -> None:
        """A symbolic link under a hidden name, then renamed: the old object is never missing."""
        hidden = b"link-" + secrets.token_hex(8).encode()
        home_fd = self._uploads.open_home(self._root_fd)
        try:
            os.symlink(target, hidden, dir_fd=home_fd)
            try:
                os.rename(hidden, name, src_dir_fd=home_fd, dst_dir_fd=dir_fd)
                return
            except OSError as exc:
                os.unlink(hidden, dir_fd=home_fd)
                if exc.errno != errno.EXDEV:
                    raise
        finally:
            os.close(home_fd)
        beside = self._uploads.beside + hidden
        os.symlink(target, beside, dir_fd=dir_fd)
        try:
            os.rename(beside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError:
            os.unlink(beside, dir_fd=dir_fd)
            raise

    def _mkdir(self, op: Mkdir) -> Applied:
        if not op.path:
            return self._set_attrs(SetAttrs(b"", Kind.DIR, op.attrs, None))
        dir_fd, name, conflict = self._parent(op.path)
        there = look(dir_fd, name)
        if there is not None and there.kind is not Kind.DIR:
            keep_aside(self._root_fd, dir_fd, name, there, leave=False)
            conflict = True
        if there is None or conflict:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=dir_fd)
                self._dirs.made.add(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_ino)
        self._dirs.touch(dir_fd)
        applied = self._set_attrs(SetAttrs(op.path, Kind.DIR, op.attrs, None))
        if not applied.ident:
            raise OSError(errno.EAGAIN, "another writer removed it")
        return Applied(applied.token, applied.ident, conflict)

    def _move(self, op: Move, rest: Sequence[Op]) -> Applied:
        src_parent, src_name = split(op.src)
        src_fd = self._dirs.find(src_parent)
        there = look(src_fd, src_name) if src_fd is not None else None
        if src_fd is None or there is None or there.kind is not op.kind or op.ident not in ("", there.ident):
            done = self._was_moved(op, there, rest)
            if done is not None:
                return done
            if src_fd is None or there is None or not (there.kind is op.kind is Kind.DIR):
                # Removed or replaced by another writer. What is at `src` now is theirs and stays.
                return Applied(conflict=True)
            # A directory that was removed and made again under its name moves like the old one.
        dst_fd, dst_name, conflict = self._parent(op.dst)
        occupant = look(dst_fd, dst_name)
        if occupant is not None and occupant.ident == there.ident:
            if op.src != op.dst and there.kind is not Kind.DIR:
                os.unlink(src_name, dir_fd=src_fd)  # two names of one file: rename(2) would do nothing
        else:
            if occupant is not None:
                conflict |= self._publisher.make_way(op.dst, dst_fd, occupant, op.expected, op.kind)
            self._rename(op, src_fd, src_name, dst_fd, dst_name, there)
        if op.kind is Kind.DIR:
            self._dirs.forget(op.src)
            self._dirs.forget(op.dst)
            self._uploads.sweep_below(self._root_fd, op.src, op.dst)
        self._dirs.touch(src_fd)
        self._dirs.touch(dst_fd)
        now = look(dst_fd, dst_name)
        if now is None:
            raise OSError(errno.EAGAIN, "another writer removed it")
        return Applied(now.token, now.ident, conflict)

    def _rename(
        self, op: Move, src_fd: int, src_name: bytes, dst_fd: int, dst_name: bytes, there: Seen
    ) -> None:
        try:
            os.rename(src_name, dst_name, src_dir_fd=src_fd, dst_dir_fd=dst_fd)
        except OSError as exc:
            if exc.errno != errno.EXDEV or op.kind is Kind.DIR:
                raise
            if op.kind is Kind.FILE:
                self._publisher.move_copy(src_fd, op.src, op.dst, dst_fd)
            else:
                self._place_link(there.target, dst_fd, dst_name)
                os.unlink(src_name, dir_fd=src_fd)

    def _was_moved(self, op: Move, at_src: Seen | None, rest: Sequence[Op]) -> Applied | None:
        """The answer when this move was made by an earlier try, else None."""
        at_dst = self.at(op.dst)
        if op.ident:
            moved = landed(self, op.dst, lambda there: there.ident == op.ident, rest)
        else:
            moved = at_src is None and at_dst is not None and at_dst.kind is op.kind
        if not moved:
            return None
        for path in (op.src, op.dst):
            parent, name = split(path)
            dir_fd = self._dirs.find(parent)
            if dir_fd is None:
                continue
            self._dirs.touch(dir_fd)
            if path == op.src and at_src is not None and at_src.st.st_ino in self._dirs.made:
                # The Mkdir before this one was repeated too and made an empty directory again.
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=dir_fd)
                self._dirs.forget(path)
        if at_dst is None:
            return Applied("", op.ident)
        return Applied(at_dst.token, at_dst.ident)

    def _remove(self, op: Remove, rest: Sequence[Op]) -> Applied:
        parent, name = split(op.path)
        dir_fd = self._dirs.find(parent)
        there = look(dir_fd, name) if dir_fd is not None else None
        if dir_fd is None or there is None:
            if dir_fd is not None:
                self._dirs.touch(dir_fd)  # maybe removed by an earlier try whose fsync failed
            return Applied()
        if op.kind is Kind.DIR and there.kind is Kind.DIR:
            self._publisher.remove_dir(op.path, dir_fd)
            return Applied()
        if there.kind is not op.kind or there.token != op.expected:
            later = any(isinstance(item, Put) and item.upload.ident == there.ident for item in rest)
            return Applied(conflict=not later)
        os.unlink(name, dir_fd=dir_fd)
        self._dirs.touch(dir_fd)
        if there.kind is Kind.FILE and there.st.st_nlink == 1:
            file_records.drop_manifest(self._root_fd, there.st.st_ino)
        return Applied()

    def _set_attrs(self, op: SetAttrs) -> Applied:
        parent, name = split(op.path)
        dir_fd = self._dirs.find(parent)
        there = (look(dir_fd, name) if op.path else look(dir_fd, b".")) if dir_fd is not None else None
        if dir_fd is None or there is None:
            return Applied()
        if there.kind is not op.kind or not _may_set(there, op):
            return Applied(conflict=True)
        if there.kind is Kind.LINK:
            set_link_attrs(dir_fd, name, op.attrs)
        else:
            self._set_pinned(op, dir_fd, name or b".", there)
        self._dirs.touch(dir_fd)
        now = look(dir_fd, name or b".")
        if now is None:
            return Applied()
        return Applied(now.token, now.ident)

    def _set_pinned(self, op: SetAttrs, dir_fd: int, name: bytes, there: Seen) -> None:
        """Attributes of a file or directory, by a descriptor that no other writer can redirect."""
        fd = pinned(dir_fd, name)
        try:
            target = by_descriptor(fd)
            st = os.fstat(fd)
            if st.st_ino != there.st.st_ino:
                raise OSError(errno.EAGAIN, "another writer replaced it")
            old = file_records.load(self._root_fd, target, st) if there.kind is Kind.FILE else None
            owned = set_owner(target, op.attrs)
            try:
                os.utime(target, ns=(op.attrs.atime_ns, op.attrs.mtime_ns))
            except PermissionError:
                if st.st_uid == os.geteuid():
                    raise  # else it is another user's object, adopted as it is
            now = os.fstat(fd)
            if old is not None and _is_recorded(old, st, op) and not old.describes(now):
                if now.st_mode & 0o200 == 0 and os.geteuid() != 0:
                    set_mode(target, 0o600)  # attributes of a file one may not write cannot be set
                file_records.refresh(self._root_fd, target, old, now)
            set_mode(target, mode_for(op.attrs, owned, now, st.st_ino in self._dirs.made))
            self._sync_inode(fd, target)
        finally:
            os.close(fd)

    def _sync_inode(self, fd: int, target: str) -> None:
        """Make attributes durable. A file the daemon may not open is left to the directory's fsync."""
        try:
            real = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            return
        try:
            os.fsync(real)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # directories on file systems without their fsync
                raise
        finally:
            os.close(real)


def _may_set(there: Seen, op: SetAttrs) -> bool:
    """Whether it is what the caller knows, or that with these times already set by an earlier try."""
    if there.kind is Kind.DIR or there.token == op.expected:
        return True
    return (
        there.kind is Kind.FILE
        and op.expected is not None
        and ident_of_token(op.expected) == there.ident
        and op.expected.split("-")[1:2] == [str(there.st.st_size)]
        and there.st.st_mtime_ns == op.attrs.mtime_ns
    )


def _is_recorded(record: file_records.Record, st: os.stat_result, op: SetAttrs) -> bool:
    """Whether the record describes this content, by its times before this or an interrupted try."""
    before = (op.expected or "").split("-")[-1]
    return record.size == st.st_size and (record.mtime_ns == st.st_mtime_ns or str(record.mtime_ns) == before)


def _what(op: Op) -> str:
    path = op.src if isinstance(op, Move) else op.path
    more = f" to {show(op.dst)}" if isinstance(op, Move) else ""
    return f"{_VERBS[type(op)]} {show(path)}{more}"
