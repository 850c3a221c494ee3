"""Where a mount point's staging lies, remembered beyond the mount: another `--cache-dir` must not hide what
is staged, and later put old files over new ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckptfs.core.state import load
from ckptfs.errors import CkptfsError, Exit
from ckptfs.journal.journal import Journal
from ckptfs.paths import MountPaths
from ckptfs.staging import Area
from ckptfs.tiers.base import Attrs


def _record(paths: MountPaths) -> Path:
    return Path(paths.uuid).with_name("staging.json")


def remember(paths: MountPaths, cache_dir: str) -> None:
    """Said before anything is staged."""
    path = _record(paths)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"cache_dir": cache_dir}) + "\n")
    os.replace(part, path)


def forget(paths: MountPaths) -> None:
    """Nothing is staged any more."""
    _record(paths).unlink(missing_ok=True)


def check(paths: MountPaths, cache_dir: str) -> None:
    """`CkptfsError` (USAGE) when files are, or may be, staged elsewhere for this mount point."""
    record = _record(paths)
    try:
        before = str(json.loads(record.read_text())["cache_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if before == cache_dir:
        return
    if before and not os.path.isdir(before):
        raise CkptfsError(
            f"files of {paths.mountpoint} may be staged in {before}, which is not there: mount that disk, or"
            f" remove {record} if it is gone for good",
            Exit.USAGE,
        )
    count = _staged(Area(paths, 0, before, "").journal)
    if count:
        how = f"with --cache-dir {before}" if before else "without --cache-dir"
        where = f"in {before}" if before else "in memory"
        raise CkptfsError(
            f"files of {paths.mountpoint} are still staged {where} ({count} of them): mount it {how} first"
            " and let it drain",
            Exit.USAGE,
        )


def _staged(journal_path: Path) -> int:
    """How many files a journal holds that are not on the tier, or are there and must go. It is not there
    after a reboot, if it was in memory."""
    if not journal_path.exists():
        return 0
    journal = Journal(journal_path)
    try:
        state = load(journal.load(), Attrs(0, 0, 0, 0, 0))
    finally:
        journal.close()
    unsealed = {i.ino for i in state.inodes.values() if i.unsealed or i.held}
    return len({e.inode.ino for e in state.log.values()} | unsealed) + len(state.graves)
