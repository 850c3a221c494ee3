"""Hidden files: where the bytes of a version go before they are published.

The usual place is `.ckptfs/uploads/<mount uuid>/<version>`. A file that must inherit from its
directory (setgid, default ACL) or live on the directory's own file system lies beside its target
as `.ckptfs-<mount uuid>-<version>`; then `.ckptfs/uploads/<mount uuid>/@<version>` holds its path,
so that what a crash leaves is found without walking the tree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from ckptfs.tiers.base import RESERVED, Draft, Source, TierError, Trouble, Upload
from ckptfs.tiers.file_errors import GONE, show
from ckptfs.tiers.file_names import checked_version, components, handle_of, path_of, split
from ckptfs.tiers.file_root import DIRECTORY, UPLOADS, make_dirs, open_dir
from ckptfs.tiers.linux import start_writeback
from ckptfs.tiers.window import WriteBehind, copy_window

_MARK = b"@"
_AT_ONCE = 64
"""Small files open at the same time."""


class Uploads:
    """The hidden files of one mount. Methods take the root's descriptor; thread-safe."""

    def __init__(self, mount_uuid: str) -> None:
        self.uuid = checked_version(mount_uuid).encode()
        self.home = UPLOADS + b"/" + self.uuid
        self.beside = RESERVED + b"-" + self.uuid + b"-"

    # -- making and filling --------------------------------------------------------------------

    def begin(self, root_fd: int, draft: Draft) -> Upload:
        """A new, empty hidden file of the size; one left by an earlier try is replaced."""
        fd, upload = self._create(root_fd, draft)
        try:
            os.ftruncate(fd, draft.size)
        finally:
            os.close(fd)
        return upload

    def send(self, root_fd: int, upload: Upload, offset: int, source: Source) -> bytes:
        """Copy a window into a hidden file and make it durable; returns its xxh3-128."""
        fd = self.open(root_fd, upload, os.O_WRONLY)
        if fd is None:
            raise TierError(
                Trouble.REDO, f"the upload {show(path_of(upload.handle))} is gone from the tier", errno.ENOENT
            )
        try:
            behind = WriteBehind(fd, offset)
            digest, _ = copy_window(source, fd, offset, behind)
            behind.finish()
            return digest
        finally:
            os.close(fd)

    def send_small(self, root_fd: int, batch: Sequence[tuple[Draft, Source]]) -> list[tuple[Upload, bytes]]:
        """Whole versions at once: all are written, then all are waited for, so that the disk (or
        the journal of its file system) works on them together."""
        sent: list[tuple[Upload, bytes]] = []
        for first in range(0, len(batch), _AT_ONCE):
            with contextlib.ExitStack() as stack:
                fds = []
                for draft, source in batch[first : first + _AT_ONCE]:
                    fd, upload = self._create(root_fd, draft)
                    stack.callback(os.close, fd)
                    os.ftruncate(fd, source.length)
                    digest, _ = copy_window(source, fd, 0)
                    start_writeback(fd, 0, source.length)
                    fds.append((fd, source.length))
                    sent.append((upload, digest))
                for fd, length in fds:
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, length, os.POSIX_FADV_DONTNEED)
        return sent

    # -- finding and removing ------------------------------------------------------------------

    def open(self, root_fd: int, upload: Upload, flags: int) -> int | None:
        """A descriptor of a hidden file, or None when it (or the file it was) is gone."""
        with self.directory(root_fd, upload.handle) as (dir_fd, name):
            if dir_fd < 0:
                return None
            try:
                fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
            except PermissionError:
                # A publish that was interrupted after it set a mode that locks the daemon out.
                os.chmod(name, 0o600, dir_fd=dir_fd)
                fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
            except OSError as exc:
                if exc.errno in GONE or exc.errno == errno.ELOOP:
                    return None
                raise
        if str(os.fstat(fd).st_ino) != upload.ident:
            os.close(fd)
            return None
        return fd

    @contextlib.contextmanager
    def directory(self, root_fd: int, handle: str) -> Iterator[tuple[int, bytes]]:
        """The directory of a hidden file and its name; descriptor -1 when the directory is gone."""
        path = path_of(handle)
        parent, name = split(path)
        names = parent.split(b"/") if parent else []
        ours = parent == self.home or name.startswith(self.beside)
        if not ours or b".." in names or not name:
            raise TierError(Trouble.REDO, f"{show(path)} is no upload of this mount", errno.EINVAL)
        try:
            fd = open_dir(root_fd, names)
        except OSError as exc:
            if exc.errno not in GONE:
                raise
            yield -1, name
            return
        try:
            yield fd, name
        finally:
            os.close(fd)

    def abandon(self, root_fd: int, uploads: Sequence[Upload]) -> None:
        """Remove hidden files; those published or gone already are left."""
        for upload in uploads:
            self._remove(root_fd, upload.handle)

    def sweep(self, root_fd: int, keep: frozenset[str]) -> int:
        """Remove this mount's hidden files that are not in `keep`; returns how many."""
        removed = 0
        for name in self._listed(root_fd):
            handle = handle_of(self.home + b"/" + name)
            if name.startswith(_MARK):
                marked = self._marked_path(root_fd, name)
                if marked is not None and handle_of(marked) in keep:
                    continue
                removed += marked is not None and self._remove(root_fd, handle_of(marked))
                self._unmark(root_fd, name)
            elif handle not in keep:
                removed += self._remove(root_fd, handle)
        return removed

    def sweep_below(self, root_fd: int, old: bytes, new: bytes) -> None:
        """Directory `old` became `new`: hidden files in it have lost the path in their handle.

        Their senders get REDO; here the unreachable bytes are removed.
        """
        for name in self._listed(root_fd):
            marked = self._marked_path(root_fd, name) if name.startswith(_MARK) else None
            if marked is not None and marked.startswith(old + b"/"):
                self._remove(root_fd, handle_of(new + marked[len(old) :]))
                self._unmark(root_fd, name)

    def sweep_dir(self, dir_fd: int) -> None:
        """Remove this mount's hidden files from a directory that is to be removed."""
        for text in os.listdir(dir_fd):
            name = os.fsencode(text)
            if name.startswith(self.beside):
                os.unlink(name, dir_fd=dir_fd)

    def published(self, root_fd: int, handle: str) -> None:
        """The hidden file was renamed to its target: forget where it was."""
        _, name = split(path_of(handle))
        if name.startswith(self.beside):
            self._unmark(root_fd, _MARK + name[len(self.beside) :])

    # -- inside --------------------------------------------------------------------------------

    def create_beside(self, root_fd: int, version: str, directory: bytes, dir_fd: int) -> tuple[int, bytes]:
        """A new hidden file in an open directory: its descriptor and name."""
        os.close(self.open_home(root_fd))
        name = self.beside + version.encode()
        self._mark(root_fd, version, directory + b"/" + name if directory else name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd), name

    def _create(self, root_fd: int, draft: Draft) -> tuple[int, Upload]:
        version = checked_version(draft.version)
        target_dir = draft.path.rpartition(b"/")[0]
        home_fd = self.open_home(root_fd)
        try:
            directory, dir_fd = self._nearest(root_fd, target_dir)
            try:
                if _must_be_beside(home_fd, dir_fd):
                    fd, name = self.create_beside(root_fd, version, directory, dir_fd)
                    path = directory + b"/" + name if directory else name
                else:
                    name = version.encode()
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=home_fd)
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    fd = os.open(name, flags, 0o600, dir_fd=home_fd)
                    path = self.home + b"/" + name
            finally:
                os.close(dir_fd)
        finally:
            os.close(home_fd)
        return fd, Upload(handle_of(path), str(os.fstat(fd).st_ino))

    def open_home(self, root_fd: int) -> int:
        """The directory of hidden files, made when missing."""
        try:
            return os.open(self.home, DIRECTORY, dir_fd=root_fd)
        except FileNotFoundError:
            make_dirs(root_fd, self.home, 0o700)
            return os.open(self.home, DIRECTORY, dir_fd=root_fd)

    @staticmethod
    def _nearest(root_fd: int, target_dir: bytes) -> tuple[bytes, int]:
        """The target directory, or the nearest one above it that exists: what is made below it
        inherits from it."""
        names = components(target_dir)
        while True:
            try:
                return b"/".join(names), open_dir(root_fd, names)
            except OSError as exc:
                if exc.errno not in GONE or not names:
                    raise
            names.pop()

    def _listed(self, root_fd: int) -> list[bytes]:
        try:
            fd = os.open(self.home, DIRECTORY, dir_fd=root_fd)
        except FileNotFoundError:
            return []
        try:
            return [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)

    def _mark(self, root_fd: int, version: str, path: bytes) -> None:
        """Written before the file it names exists, so that none is ever without its mark."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(self.home + b"/" + _MARK + version.encode(), flags, 0o600, dir_fd=root_fd)
        try:
            os.write(fd, path)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _unmark(self, root_fd: int, name: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.home + b"/" + name, dir_fd=root_fd)

    def _marked_path(self, root_fd: int, name: bytes) -> bytes | None:
        try:
            fd = os.open(self.home + b"/" + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
        except FileNotFoundError:
            return None
        try:
            path = os.read(fd, 1 << 16)
        finally:
            os.close(fd)
        return path if split(path)[1].startswith(self.beside) else None

    def _remove(self, root_fd: int, handle: str) -> bool:
        with self.directory(root_fd, handle) as (dir_fd, name):
            removed = dir_fd >= 0
            try:
                if removed:
                    os.unlink(name, dir_fd=dir_fd)
            except FileNotFoundError:
                removed = False
        self.published(root_fd, handle)
        return removed


def _must_be_beside(home_fd: int, dir_fd: int) -> bool:
    target = os.fstat(dir_fd)
    if target.st_mode & stat.S_ISGID or target.st_dev != os.fstat(home_fd).st_dev:
        return True
    try:
        return bool(os.getxattr(dir_fd, "system.posix_acl_default"))
    except OSError:
        return False  # ENODATA: none; EOPNOTSUPP: no ACLs here
