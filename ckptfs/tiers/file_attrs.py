"""Owner, mode and times of published objects."""

from __future__ import annotations

import errno
import os
import stat

from ckptfs.tiers.base import Attrs

_NO_OWNERS = frozenset({errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def set_owner(target: int | bytes | str, attrs: Attrs, dir_fd: int | None = None) -> bool:
    """chown(2), not following links; False where the daemon may not.

    A daemon without CAP_CHOWN, a root-squashed NFS export, a user namespace and file systems
    without owners all refuse; the object then belongs to the daemon, which is no reason to hold
    back a checkpoint.
    """
    try:
        if isinstance(target, int):
            os.fchown(target, attrs.uid, attrs.gid)
        else:
            os.chown(target, attrs.uid, attrs.gid, dir_fd=dir_fd, follow_symlinks=dir_fd is None)
    except OSError as exc:
        if exc.errno not in _NO_OWNERS:
            raise
        return False
    return True


def mode_for(attrs: Attrs, owned: bool, now: os.stat_result, made: bool = False) -> int:
    """The mode to set: without set-id bits when the owner is not the wanted one, and with the
    setgid bit that a directory `made` just now inherited, or one whose owner is not the wanted one
    (it belongs to the tier's own set-up)."""
    mode = attrs.mode & 0o7777
    if not owned and (now.st_uid, now.st_gid) != (attrs.uid, attrs.gid):
        mode &= 0o1777
    if stat.S_ISDIR(now.st_mode) and (made or not owned):
        mode |= now.st_mode & stat.S_ISGID
    return mode


def set_mode(target: int | str, mode: int) -> None:
    """chmod(2). File systems without modes refuse every mode but their own: not an error."""
    try:
        os.chmod(target, mode)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        if os.stat(target).st_uid == os.geteuid():
            raise


def set_link_attrs(dir_fd: int, name: bytes, attrs: Attrs) -> None:
    """Owner and times of a symbolic link itself (links have no mode on Linux)."""
    set_owner(name, attrs, dir_fd)
    try:
        os.utime(name, ns=(attrs.atime_ns, attrs.mtime_ns), dir_fd=dir_fd, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in _NO_OWNERS:
            raise


def pinned(dir_fd: int, name: bytes) -> int:
    """An O_PATH descriptor of the object itself, whatever its mode; a link is not followed."""
    return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def by_descriptor(fd: int) -> str:
    """A path for calls that take no O_PATH descriptor; it leads to exactly the pinned object."""
    return f"/proc/self/fd/{fd}"
