"""Where the staging of a mount lives, so that it outlives the daemon: private tmpfs, or a directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

from ckptfs.errors import CkptfsError, Exit
from ckptfs.paths import MountPaths

MARGIN = 64 << 20
"""The staging tmpfs is this much larger than the budget: a second fence, and the writers' reserve."""

RESERVE = 8 << 20
"""Bytes held back for the journal where it shares its file system with others."""

JOURNAL_SIZE = 1 << 30
"""Bound of the journal's own tmpfs (about a million files in flight)."""

LOCK_PATIENCE_S = 10.0
"""How long the processes of a killed daemon may take to let go of the lock."""


class Area:
    """Directories and lock of one mount's staging.

    `data` holds dirty staging files, `cache` clean ones, `journal` the journal, `spill` what does
    not fit. `durable` says that `data` and `journal` survive the machine. The lock is inherited by
    every process of the mount.
    """

    def __init__(self, paths: MountPaths, cache_bytes: int, cache_dir: str, spill_dir: str) -> None:
        self.paths = paths
        self.cache_bytes = cache_bytes
        self.durable = bool(cache_dir)
        self.tmpfs = not self.durable and os.geteuid() == 0
        if self.durable:
            base = Path(cache_dir) / paths.id
            self._staging: Path
            self._journal: Path
            self._staging, self._journal = base / "staging", base / "journal"
        elif self.tmpfs:
            self._staging, self._journal = Path(paths.staging), Path(paths.journal)
        else:
            base = Path("/dev/shm") / f"ckptfs-{os.geteuid()}" / paths.id
            self._staging, self._journal = base / "staging", base / "journal"
        self.spill = _own_spill(paths, spill_dir) if spill_dir else None
        self.old_spills: list[Path] = []
        """Where earlier mounts of this mount point spilled to."""
        self.data = self._staging / "data"
        self.cache = self._staging / "cache"
        self.journal = self._journal / "journal.sqlite"
        self._reserve = self._journal / "reserve"
        self.lock_fd = -1

    def room(self) -> tuple[int, int] | None:
        """(free, total) bytes of a file system that others fill too; None for our private tmpfs."""
        if self.tmpfs:
            return None
        st = os.statvfs(self._staging)
        return st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize

    def keep_reserve(self) -> None:
        """Where others fill the file system too: hold some room back, so that the journal can still say that
        something was spilled or published when there is no other left."""
        room = self.room()
        if room is None or self._reserve.exists() or room[0] < 3 * RESERVE:
            return
        try:
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, RESERVE)
            finally:
                os.close(fd)
        except OSError:
            self.give_reserve()

    def give_reserve(self) -> bool:
        """Let the journal have it. False when there is none."""
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True

    def lock(self) -> None:
        """Take the mount's lock, waiting for processes of a killed daemon to go."""
        self.paths.create()
        fd = os.open(self.paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise CkptfsError(
                        f"another ckptfs daemon still works for {self.paths.mountpoint} (it may be draining):"
                        f" look at `ckptfs status {self.paths.mountpoint}`",
                        Exit.BUSY,
                    ) from None
                time.sleep(0.05)
        self.lock_fd = fd

    def prepare(self) -> None:
        """Make or find the directories. Call with the lock held."""
        try:
            if self.tmpfs:
                self._tmpfs(self._staging, self.cache_bytes + MARGIN, "huge=within_size")
                self._tmpfs(self._journal, JOURNAL_SIZE, "")
            for d in (self.data, self.cache, self._journal):
                d.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.spill is not None:
                self.spill.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.rmtree(self.cache)
            self.cache.mkdir(mode=0o700)
            self.give_reserve()  # opening the journal may need it
        except OSError as e:
            raise CkptfsError(
                f"the staging directory {e.filename or self._staging} can't be used ({e.strerror}): make it"
                " writable, or choose others with --cache-dir and --spill-dir",
                Exit.USAGE,
            ) from e

    @staticmethod
    def _tmpfs(path: Path, size: int, extra: str) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        options = f"size={size},mode=0700,nr_inodes=0"
        if os.path.ismount(path):
            command = ["mount", "-o", f"remount,{options}", str(path)]
        else:
            options += f",{extra}" if extra else ""
            command = ["mount", "-t", "tmpfs", "-o", options, "ckptfs-staging", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and "huge" in options:
            command[4] = options.rsplit(",", 1)[0]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CkptfsError(
                f"a private tmpfs can't be mounted on {path} ({done.stderr.strip()}): give a directory with"
                " --cache-dir instead",
                Exit.UNSUPPORTED,
            )

    def destroy(self) -> None:
        """Remove everything: nothing is staged any more. The lock goes with the process."""
        if self.tmpfs:
            for path in (self._staging, self._journal):
                subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        else:
            shutil.rmtree(self._staging.parent, ignore_errors=True)
        for spill in (self.spill, *self.old_spills):
            if spill is not None:
                shutil.rmtree(spill, ignore_errors=True)
        # The state file goes last: while it is there, something may still be staged.
        for name in os.listdir(self.paths.run):
            found = os.path.join(self.paths.run, name)
            if found == self.paths.state:
                continue
            if os.path.isdir(found):
                shutil.rmtree(found, ignore_errors=True)
            else:
                os.unlink(found)
        shutil.rmtree(self.paths.run, ignore_errors=True)


def _own_spill(paths: MountPaths, spill_dir: str) -> Path:
    """A directory of this mount alone: the one given may hold other things, and serve other mounts."""
    return Path(spill_dir) if spill_dir == paths.spill else Path(spill_dir) / f"ckptfs-{paths.id}"
