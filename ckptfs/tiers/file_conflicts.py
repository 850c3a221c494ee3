"""Keeping what other writers put where this mount publishes (rule W3).

Kept objects are `.ckptfs/conflicts/<UTC time>-<n>-<name>`; where that is another file system than
the object's directory, they stay in it as `.ckptfs-conflict-<UTC time>-<n>-<name>`, hidden from
listings.
"""

from __future__ import annotations

import errno
import logging
import os
import time

from ckptfs.tiers.base import RESERVED, Kind
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.file_names import Seen, look
from ckptfs.tiers.file_root import CONFLICTS, DIRECTORY, make_dirs

_log = logging.getLogger(__name__)
_NAME_MAX = 255
_BESIDE = RESERVED + b"-conflict-"
_TRIES = 10_000


def keep_aside(root_fd: int, dir_fd: int, name: bytes, there: Seen, leave: bool) -> None:
    """Keep the object `there` (seen under `name`) under a new name.

    With `leave` its old name stays too, as a hard link, when the file system allows: the caller
    replaces it by rename(2) next, so readers never find the name missing.
    """
    make_dirs(root_fd, CONFLICTS)
    keep_fd = os.open(CONFLICTS, DIRECTORY, dir_fd=root_fd)
    try:
        try:
            kept = _keep_in(keep_fd, b"", dir_fd, name, there, leave)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            kept = _keep_in(dir_fd, _BESIDE, dir_fd, name, there, leave)
            os.fsync(dir_fd)
        else:
            os.fsync(keep_fd)
    finally:
        os.close(keep_fd)
    _log.warning("another writer's %s was kept as %s", show(name), show(kept))


def _keep_in(keep_fd: int, prefix: bytes, dir_fd: int, name: bytes, there: Seen, leave: bool) -> bytes:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()).encode()
    for n in range(1, _TRIES):
        kept = (prefix + b"%s-%d-" % (stamp, n) + name)[:_NAME_MAX]
        if leave and there.kind in (Kind.FILE, Kind.LINK):
            try:
                os.link(name, kept, src_dir_fd=dir_fd, dst_dir_fd=keep_fd, follow_symlinks=False)
            except FileExistsError:
                continue
            except OSError as exc:
                if exc.errno in (errno.EXDEV, errno.ENOENT, errno.ENOSPC, errno.EIO, errno.ESTALE):
                    raise
                leave = False  # no hard links here
            else:
                return kept
        if look(keep_fd, kept) is not None:
            continue
        os.rename(name, kept, src_dir_fd=dir_fd, dst_dir_fd=keep_fd)
        return kept
    raise OSError(errno.EEXIST, "too many conflicts of one name in one second")
