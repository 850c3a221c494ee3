"""May this directory be mounted on? Checks it, and clears away what a dead daemon left there.

A dead FUSE mount answers stat() from the kernel's cache; only a call that reaches the daemon
(statvfs, listdir) shows ENOTCONN. A hung one answers nothing, so such calls run in a thread of their own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import shutil
import stat
import subprocess
import threading
from dataclasses import dataclass

from . import mountinfo
from .errors import CkptfsError, Exit
from .mountinfo import Mount

PROBE_TIMEOUT = 5.0
"""Seconds a mount may take to answer statvfs before it counts as hung."""

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_CAP_SYS_ADMIN = 21
_FUSE_CONF = "/etc/fuse.conf"


@dataclass(frozen=True, slots=True)
class Answer:
    """How a mounted file system reacted to statvfs."""

    alive: bool
    """It answered, or at least took the question."""
    dead: bool
    """Its daemon is gone (ENOTCONN)."""
    error: str = ""


def probe(path: str, timeout: float = PROBE_TIMEOUT) -> Answer:
    """Ask the file system mounted at `path`; waits at most `timeout` seconds."""
    result: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(path)
            result.append(0)
        except OSError as error:
            result.append(error.errno or errno.EIO)

    thread = threading.Thread(target=ask, name="ckptfs-probe", daemon=True)
    thread.start()
    thread.join(timeout)
    if not result:
        return Answer(alive=True, dead=False, error=f"it did not answer within {timeout:g} seconds")
    # ECONNABORTED: the connection was cut by `umount -f` and the daemon has not noticed yet.
    dead = result[0] in (errno.ENOTCONN, errno.ECONNABORTED)
    return Answer(alive=not dead, dead=dead, error=os.strerror(result[0]) if result[0] else "")


def clean_stale(path: str) -> int:
    """Lazily unmount every dead ckptfs mount stacked at `path`; returns how many there were.

    Anything else is left alone. CkptfsError (UNSUPPORTED) when unmounting is refused.
    """
    cleaned = 0
    while True:
        top = mountinfo.top_at(path, mountinfo.read())
        if top is None or not top.ours or not probe(path).dead:
            return cleaned
        lazy_unmount(path)
        cleaned += 1


def lazy_unmount(path: str) -> None:
    """Take the topmost mount at `path` out of the tree; open files keep it until they are closed."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
            return
        reason = os.strerror(ctypes.get_errno())
    else:
        helper = _require_fusermount()
        done = subprocess.run(
            [helper, "-u", "-z", "--", path],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
        reason = " ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}"
    raise CkptfsError(f"cannot unmount {path}: {reason}", Exit.UNSUPPORTED)


def prepare(path: str, pid: int | None = None) -> None:
    """Make sure that ckptfs can be mounted on `path`, an absolute real path.

    A dead ckptfs mount there is left in place: as long as it is, whoever goes on writing gets an error
    instead of writing into the bare directory. `take_over` clears it when the new mount is ready. `pid`: the
    live daemon of this mount point as far as known, named when the mount is in use. CkptfsError with the
    reason when mounting is refused: BUSY when it is mounted already, USAGE when it is no usable directory.
    """
    mounts = mountinfo.read()
    top = mountinfo.top_at(path, mounts)
    if top is not None:
        if top.ours and probe(path).dead:
            return
        raise _mounted(path, top, pid)
    for mount in mounts:
        if mount.ours and mountinfo.inside(path, mount.path):
            raise CkptfsError(f"{path} lies inside the ckptfs mount {mount.path}", Exit.USAGE)
    _check_directory(path)


def take_over(path: str) -> list[str]:
    """Clear dead ckptfs mounts away just before the new one is made; returns sentences about it.

    What got into the bare directory (by then, or before the dead mount was made) does not hinder: a
    daemon that can't come back is worse than a file that is covered, and said.
    """
    if not clean_stale(path):
        return []
    lines = [f"unmounted what an ended daemon had left at {path}"]
    try:
        names = sorted(os.listdir(path))
    except OSError:
        names = []
    if names:
        lines.append(
            f"the directory beneath the mount {path} is not empty (it has {names[0]!r}): it was written"
            " to while nothing was mounted, and is covered now; look at it after umount"
        )
    return lines


def _mounted(path: str, top: Mount, pid: int | None) -> CkptfsError:
    if not top.ours:
        return CkptfsError(f"{path} is in use: {top.source} ({top.fstype}) is mounted there", Exit.BUSY)
    answer = probe(path)
    who = f"daemon pid {pid}" if pid else "the daemon of another user or container"
    trouble = f" and {answer.error}" if answer.error else ""
    shown = shlex.quote(path)
    then = f"see ckptfs status {shown}; ckptfs umount {shown} ends it" if pid else "unmount that first"
    return CkptfsError(f"{path} is already a ckptfs mount ({who}){trouble}: {then}", Exit.BUSY)


def _check_directory(path: str) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise CkptfsError(
            f"the mount point {path} does not exist; make it with mkdir -p", Exit.USAGE
        ) from None
    except OSError as error:
        raise CkptfsError(f"the mount point {path} cannot be used: {error.strerror}", Exit.USAGE) from None
    if not stat.S_ISDIR(status.st_mode):
        raise CkptfsError(f"the mount point {path} is not a directory", Exit.USAGE)
    try:
        with os.scandir(path) as entries:
            entry = next(entries, None)
    except OSError as error:
        raise CkptfsError(f"the mount point {path} cannot be read: {error.strerror}", Exit.USAGE) from None
    if entry is not None:
        raise CkptfsError(
            f"the mount point {path} is not empty (it has {entry.name!r}); use an empty directory", Exit.USAGE
        )
    if os.geteuid() != 0 and not os.access(path, os.W_OK):
        raise CkptfsError(f"the mount point {path} cannot be written to by this user", Exit.USAGE)


def check_machine(allow_other: bool, device: str = "/dev/fuse") -> None:
    """What every mount needs from the machine; CkptfsError (UNSUPPORTED) naming what is missing."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise CkptfsError(
            f"{device} does not exist; run modprobe fuse, or give the container --device {device}",
            Exit.UNSUPPORTED,
        ) from None
    except PermissionError as error:
        # What keeps root out is the container's list of devices.
        advice = f"give the container --device {device}" if os.geteuid() == 0 else (
            f"have root run chmod 666 {device} (as it is on most systems), join the group it belongs to, or"
            " mount as root"
        )  # fmt: skip
        raise CkptfsError(
            f"{device} cannot be opened: {error.strerror}; {advice}", Exit.UNSUPPORTED
        ) from None
    except OSError as error:
        raise CkptfsError(
            f"{device} cannot be opened: {error.strerror}; run modprobe fuse", Exit.UNSUPPORTED
        ) from None
    if os.geteuid() == 0:
        if not _has_capability(_CAP_SYS_ADMIN):
            raise CkptfsError(
                "mounting needs the capability CAP_SYS_ADMIN; give it to the container", Exit.UNSUPPORTED
            )
        return
    _require_fusermount()
    if allow_other and not _user_allow_other(_FUSE_CONF):
        raise CkptfsError(
            f"--allow-other needs the line user_allow_other in {_FUSE_CONF} (or mount as root)",
            Exit.UNSUPPORTED,
        )


def _require_fusermount() -> str:
    helper = shutil.which("fusermount3")
    if helper is None:
        raise CkptfsError("fusermount3 is not installed; it comes with the package fuse3", Exit.UNSUPPORTED)
    return helper


def _user_allow_other(file: str) -> bool:
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            return any(line.strip() == "user_allow_other" for line in lines)
    except OSError:
        return False


def _has_capability(number: int) -> bool:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("CapEff:"):
                    return bool(int(line.split()[1], 16) >> number & 1)
    except (OSError, ValueError, IndexError):
        pass
    return True  # unknown: the mount itself will tell
