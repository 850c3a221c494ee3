"""Where everything of a mount lives on this machine: run directory, data directory, per-mount files.

See docs/CONTROL.md. Nothing here touches the mount itself, which may be dead or hung.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

import xxhash

from . import mountinfo
from .errors import CkptfsError, Exit

_SUN_PATH = 107
"""Longest path a Unix socket address holds."""

_MAX_LINKS = 40
"""As the kernel: more symbolic links than this in one path is ELOOP."""


def _base(variable: str, for_root: str, xdg: str, xdg_default: str) -> str:
    given = os.environ.get(variable)
    if given:
        return os.path.abspath(given)
    if os.geteuid() == 0:
        return for_root
    base = os.environ.get(xdg, "")
    # The XDG specification says that relative values are to be ignored.
    return os.path.join(base, "ckptfs") if base.startswith("/") else xdg_default


def run_dir() -> str:
    """Directory of sockets, locks, staging and journals (not kept over a reboot)."""
    return _base("CKPTFS_RUN_DIR", "/run/ckptfs", "XDG_RUNTIME_DIR", f"/tmp/ckptfs-{os.geteuid()}")


def data_dir() -> str:
    """Directory of logs, mount identities, spill and the embedded default tier (kept)."""
    fallback = os.path.join(os.path.expanduser("~"), ".local/share/ckptfs")
    return _base("CKPTFS_DATA_DIR", "/var/lib/ckptfs", "XDG_DATA_HOME", fallback)


def working_dir() -> str:
    """The current directory; CkptfsError (USAGE) when it has been removed."""
    try:
        return os.getcwd()
    except OSError as error:
        raise CkptfsError(
            f"the current directory cannot be named ({error.strerror}); give absolute paths",
            Exit.USAGE,
        ) from None


def resolve(path: str, opaque: frozenset[str] | None = None) -> str:
    """The absolute real path, without asking any ckptfs mount.

    Symbolic links are followed up to the first directory in `opaque` (default: the ckptfs mounts); at
    and below it names are taken as they are, since a dead or hung daemon would make lstat() fail or
    block. CkptfsError (USAGE) for a path that is no path.
    """
    if not path:
        raise CkptfsError("the path is empty", Exit.USAGE)
    if "\0" in path:
        raise CkptfsError(f"the path {path!r} contains a NUL character", Exit.USAGE)
    if opaque is None:
        opaque = frozenset(mount.path for mount in mountinfo.read() if mount.ours)
    todo = _components(path if path.startswith("/") else os.path.join(working_dir(), path))
    done = "/"
    links = 0
    while todo:
        name = todo.pop()
        if name == "..":
            done = os.path.dirname(done)
            continue
        step = os.path.join(done, name)
        if not any(mountinfo.inside(step, directory) for directory in opaque):
            try:
                target = os.readlink(step)
            except OSError:
                target = ""  # no link, or not there yet: the checks of whoever uses it will say so
            if target:
                links += 1
                if links > _MAX_LINKS:
                    raise CkptfsError(f"the path {path!r} has too many symbolic links", Exit.USAGE)
                if target.startswith("/"):
                    done = "/"
                todo += _components(target)
                continue
        done = step
    return done


def _components(path: str) -> list[str]:
    """Names of a path, the first one last, without the empty ones and `.`."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def mount_id(mountpoint: str) -> str:
    """16 hex digits that stand for an absolute real path."""
    return xxhash.xxh3_64_hexdigest(os.fsencode(mountpoint))


class MountPaths:
    """The files and directories of one mount point. Creates nothing until `create()`."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = resolve(mountpoint)
        self.id = mount_id(self.mountpoint)
        self.run = os.path.join(run_dir(), self.id)
        self.control = os.path.join(self.run, "control.sock")
        self.lock = os.path.join(self.run, "lock")
        self.state = os.path.join(self.run, "mount.json")
        self.staging = os.path.join(self.run, "staging")
        self.journal = os.path.join(self.run, "journal")
        self.data = data_dir()
        self.log = os.path.join(self.data, "logs", f"{self.id}.log")
        self.uuid = os.path.join(self.data, "mounts", self.id, "uuid")
        self.spill = os.path.join(self.data, "spill", self.id)
        self.tier = os.path.join(self.data, "tier")

    def __repr__(self) -> str:
        return f"MountPaths({self.mountpoint!r}, id={self.id})"

    def create(self) -> None:
        """Make the run directory and the parents of the files; CkptfsError (USAGE) when that is refused."""
        private_dir(os.path.dirname(self.run))
        private_dir(self.run)
        make_dir(self.data)
        for path in (self.log, self.uuid):
            make_dir(os.path.dirname(path), mode=0o700)


def make_dir(path: str, mode: int = 0o755) -> None:
    """mkdir -p; CkptfsError (USAGE) when it can't be made or is no directory."""
    try:
        os.makedirs(path, mode=mode, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if error.errno == errno.EEXIST else error.strerror
        raise CkptfsError(f"cannot make the directory {path}: {reason}", Exit.USAGE) from None


def private_dir(path: str) -> None:
    """A directory that is ours alone, made if missing.

    The fallback run directory is in /tmp, where anybody may have put a directory or link of that name:
    one that is not ours, or that others may write to, is refused (USAGE).
    """
    make_dir(path, mode=0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise CkptfsError(f"{path} is not a directory; remove it or set CKPTFS_RUN_DIR", Exit.USAGE)
    if status.st_uid != os.geteuid():
        raise CkptfsError(
            f"{path} belongs to uid {status.st_uid}; remove it or set CKPTFS_RUN_DIR", Exit.USAGE
        )
    if status.st_mode & 0o022:
        raise CkptfsError(
            f"{path} can be written to by others; run chmod 700 on it or set CKPTFS_RUN_DIR", Exit.USAGE
        )


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """An address to bind or connect a Unix socket at `path`, also when the path is longer than the 107
    bytes an address holds: then it goes through /proc/self/fd. OSError when the directory can't be opened.
    """
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
