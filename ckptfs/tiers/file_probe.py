"""Finding out whether a directory can be a tier."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

from ckptfs.tiers.base import LARGEST, RESERVED, TierError, Trouble
from ckptfs.tiers.file_root import CONFLICTS, UPLOADS, make_dirs, open_dir
from ckptfs.tiers.file_upload import Uploads

_VOLATILE = ("tmpfs", "ramfs", "rootfs")
_PROBE = b"ckptfs probe\n"
_SMALL = 1 << 40
"""A tier whose largest file is smaller than this many bytes may surprise."""


def probe(root_fd: int, uploads: Uploads) -> tuple[bool, tuple[str, ...], int]:
    """Write, fsync, rename, read back and remove a file. Returns (durable, notes, largest).

    OSErrors are the directory's answer; nothing is left behind but `.ckptfs/` itself, and the root's
    times stay as they are.
    """
    root = os.fstat(root_fd)
    for path in (UPLOADS, CONFLICTS):
        make_dirs(root_fd, path)
    notes = []
    hidden = b"probe-" + secrets.token_hex(8).encode()
    target = RESERVED + b"-" + hidden
    home_fd = uploads.open_home(root_fd)
    try:
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=home_fd)
        try:
            os.pwrite(fd, _PROBE, 0)
            notes += _abilities(fd)
            largest = largest_file(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.rename(hidden, target, src_dir_fd=home_fd, dst_dir_fd=root_fd)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            notes.append("uploads are on another file system than the root: published by copying")
        else:
            os.rename(target, hidden, src_dir_fd=root_fd, dst_dir_fd=home_fd)
        fd = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC, dir_fd=home_fd)
        try:
            if os.read(fd, 2 * len(_PROBE)) != _PROBE:
                raise TierError(Trouble.DOWN, "the tier does not give back what was written", errno.EIO)
        finally:
            os.close(fd)
        for names in ((), (RESERVED,)):
            dir_fd = open_dir(root_fd, names)
            try:
                os.fsync(dir_fd)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
            finally:
                os.close(dir_fd)
    finally:
        for name, dir_fd in ((hidden, home_fd), (target, root_fd)):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
        os.close(home_fd)
        with contextlib.suppress(OSError):
            os.utime(root_fd, ns=(root.st_atime_ns, root.st_mtime_ns))
    kind, options = _mounted_as(root_fd)
    if kind in _VOLATILE:
        notes.append(f"the tier is on {kind}: its content does not survive a restart of the machine")
    if kind.startswith("nfs") and "soft" in options:
        notes.append("the tier is a soft NFS mount: time-outs show up as I/O errors; prefer hard")
    if largest < _SMALL:
        notes.append(
            f"files of more than {largest >> 20} MiB are refused: the tier's file system has no larger"
        )
    return kind not in _VOLATILE, tuple(notes), largest


def largest_file(fd: int) -> int:
    """Bytes of the largest file the file system of `fd` can hold: the last offset that lseek(2) accepts.

    Seeking goes by the limit that truncate(2) and write(2) go by (16 TiB less a block on ext4; over NFS
    what the server says), but changes nothing, and asks no server.
    """

    def fits(offset: int) -> bool:
        try:
            os.lseek(fd, offset, os.SEEK_SET)
        except OSError:
            return False
        return True

    if fits(LARGEST):
        return LARGEST
    low, high = 0, LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _abilities(fd: int) -> list[str]:
    notes = []
    try:
        os.setxattr(fd, "user.ckptfs", b"probe")
    except OSError:
        notes.append("no user extended attributes: digests are kept in .ckptfs/manifests")
    try:
        os.fchown(fd, os.geteuid(), os.getegid())
        if os.geteuid() == 0:
            os.fchown(fd, 1, 1)
    except OSError:
        notes.append("owners cannot be set: published files belong to the daemon")
    return notes


def _mounted_as(root_fd: int) -> tuple[str, list[str]]:
    """File system type and options of the mount the root is on; ("", []) when not to be found.

    From /proc/self/mountinfo, see proc(5): field 3 is the device, type and super options follow
    the separator `-`.
    """
    device = os.fstat(root_fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.split()
                if fields[2] == wanted:
                    mark = fields.index("-")
                    return fields[mark + 1], fields[mark + 3].split(",")
    except (OSError, ValueError, IndexError):
        return "", []
    return "", []
