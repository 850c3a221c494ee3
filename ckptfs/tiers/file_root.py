"""The tier's root directory: its identity, and how paths below it are walked.

The root is opened by path for every call and never kept open: a held descriptor would keep the
file system from being unmounted, and would go on working in a directory that was renamed away.
Paths are walked one name at a time without following symbolic links, so nothing another writer
plants in the tier can lead a daemon that runs as root out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Iterator, Sequence

from ckptfs.tiers.base import RESERVED, TierError, Trouble
from ckptfs.tiers.file_errors import advice, show

TIER_ID = RESERVED + b"/tier-id"
UPLOADS = RESERVED + b"/uploads"
CONFLICTS = RESERVED + b"/conflicts"
MANIFESTS = RESERVED + b"/manifests"

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_dir(root_fd: int, names: Sequence[bytes], flags: int = DIRECTORY) -> int:
    """Open the directory `names` below the root. ENOENT or ENOTDIR (also for a link) when it is none."""
    fd = os.open(b".", flags if not names else _STEP, dir_fd=root_fd)
    for index, name in enumerate(names):
        last = index == len(names) - 1
        try:
            step = os.open(name, flags if last else _STEP, dir_fd=fd)
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from exc
            raise
        finally:
            os.close(fd)
        fd = step
    return fd


def make_dirs(root_fd: int, path: bytes, mode: int | None = None) -> None:
    """mkdir -p of one of ckptfs's own directories.

    They get the permissions of the tier's root unless `mode` says otherwise: whoever may write
    in the tier may have a mount on it.
    """
    at = b""
    for name in path.split(b"/"):
        at = at + b"/" + name if at else name
        try:
            os.mkdir(at, 0o700, dir_fd=root_fd)
        except FileExistsError:
            continue
        wanted = os.fstat(root_fd).st_mode & 0o7777
        if mode is not None and at == path:
            wanted = mode
        try:
            os.chmod(at, wanted, dir_fd=root_fd)
        except PermissionError:
            pass  # file systems without modes; the default is then theirs


class Root:
    """One tier directory. `opened()` gives a descriptor of it after checking that it is still it.

    Attributes: `path` (bytes, absolute); `tier_id`, empty until it is known. An instance may be
    used from several threads.
    """

    def __init__(self, path: bytes, tier_id: str = "") -> None:
        self.path = path
        self.tier_id = tier_id
        self._known: tuple[int, ...] = ()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opened(self, create_id: bool = False) -> Iterator[int]:
        """A descriptor of the root; `TierError(DOWN)` when the tier is not there.

        `create_id` lets a directory that is no tier yet become one (at the first probe).
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise TierError(
                Trouble.DOWN,
                f"tier directory {show(self.path)} cannot be opened: {exc.strerror};"
                f" {advice(exc.errno or errno.EIO, bool(self.tier_id))}",
                exc.errno or errno.EIO,
            ) from exc
        try:
            self._check(fd, create_id)
            yield fd
        finally:
            os.close(fd)

    def _check(self, fd: int, create_id: bool) -> None:
        """Compare the identity file with what is known; one stat(2) when nothing changed."""
        try:
            st = os.stat(TIER_ID, dir_fd=fd, follow_symlinks=False)
            key: tuple[int, ...] = (st.st_dev, st.st_ino, st.st_mtime_ns)
            with self._lock:
                if key == self._known:
                    return
            found = self._read_id(fd)
        except FileNotFoundError as exc:
            if not create_id or self.tier_id:
                raise TierError(
                    Trouble.DOWN,
                    f"{show(self.path)} does not hold the tier (no {show(TIER_ID)}): is it mounted?",
                    errno.ENODEV,
                ) from exc
            found, key = self._create_id(fd)
        except OSError as exc:
            raise TierError(
                Trouble.DOWN,
                f"{show(self.path)}/{show(TIER_ID)} cannot be read: {exc.strerror}",
                exc.errno or errno.EIO,
            ) from exc
        with self._lock:
            if self.tier_id and found != self.tier_id:
                raise TierError(
                    Trouble.DOWN,
                    f"{show(self.path)} is tier {found or '(empty id)'}, not {self.tier_id}: "
                    "something else is mounted there",
                    errno.ENODEV,
                )
            self.tier_id = found
            self._known = key

    @staticmethod
    def _read_id(fd: int) -> str:
        id_fd = os.open(TIER_ID, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            return os.read(id_fd, 256).decode("ascii", "replace").strip()
        finally:
            os.close(id_fd)

    def _create_id(self, fd: int) -> tuple[str, tuple[int, ...]]:
        """Make the identity file complete and atomically: another mount may be doing the same."""
        try:
            make_dirs(fd, RESERVED)
            temporary = TIER_ID + b"." + secrets.token_hex(8).encode()
            id_fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=fd)
            try:
                os.write(id_fd, secrets.token_hex(16).encode() + b"\n")
                os.fchmod(id_fd, 0o644)
                os.fsync(id_fd)
            finally:
                os.close(id_fd)
            try:
                os.link(temporary, TIER_ID, src_dir_fd=fd, dst_dir_fd=fd)
            except FileExistsError:
                os.unlink(temporary, dir_fd=fd)
            except OSError:  # a file system without hard links
                os.rename(temporary, TIER_ID, src_dir_fd=fd, dst_dir_fd=fd)
            else:
                os.unlink(temporary, dir_fd=fd)
            for name in ((), (RESERVED,)):
                dir_fd = open_dir(fd, name)
                try:
                    os.fsync(dir_fd)
                finally:
                    os.close(dir_fd)
            st = os.stat(TIER_ID, dir_fd=fd, follow_symlinks=False)
            return self._read_id(fd), (st.st_dev, st.st_ino, st.st_mtime_ns)
        except OSError as exc:
            raise TierError(
                Trouble.DOWN,
                f"{show(self.path)} cannot be made a tier: {exc.strerror}; {advice(exc.errno or errno.EIO)}",
                exc.errno or errno.EIO,
            ) from exc
