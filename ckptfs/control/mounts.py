"""Which mounts there are: from the state files, with or without a living daemon."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass

from .. import mountinfo
from ..errors import CkptfsError, Exit
from ..paths import MountPaths, mount_id, resolve, run_dir
from ..resume import read_values, resume_command
from . import client


@dataclass(frozen=True, slots=True)
class MountState:
    """One `mount.json`, and what else can be seen of that mount from outside."""

    paths: MountPaths
    tier: str = ""
    pid: int = 0
    log_file: str = ""
    started: float = 0.0
    """Unix time."""
    staged: int = 0
    """Files that were staged when the daemon last wrote it down."""
    alive: bool = False
    """A daemon listens on the control socket."""
    mounted: bool = False
    """The kernel has a ckptfs mount there (dead or alive)."""
    resume: str = ""
    """The whole `ckptfs mount` command that goes on with what is staged."""

    @property
    def mountpoint(self) -> str:
        """Absolute real path."""
        return self.paths.mountpoint


def read_state(paths: MountPaths, mounts: list[mountinfo.Mount] | None = None) -> MountState | None:
    """The state of one mount point; None when nothing is known of it."""
    values = read_values(paths)  # without it, the socket and the kernel still tell
    top = mountinfo.top_at(paths.mountpoint, mountinfo.read() if mounts is None else mounts)
    mounted = top is not None and top.ours
    listening = client.alive(paths)
    if not values and not listening and not mounted:
        return None
    return MountState(
        paths,
        tier=str(values.get("tier", "")),
        pid=_number(values.get("pid")),
        log_file=str(values.get("log_file", "")),
        started=float(_number(values.get("started"))),
        staged=_number(values.get("staged")),
        alive=listening,
        mounted=mounted,
        resume=resume_command(paths, values),
    )


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def find_mounts() -> list[MountState]:
    """Every mount of this user on this machine, by mount point."""
    mounts = mountinfo.read()
    base = run_dir()
    try:
        names = sorted(os.listdir(base))
    except OSError:
        names = []
    found: dict[str, MountState] = {}
    for name in names:
        mountpoint = _mountpoint_of(os.path.join(base, name, "mount.json"))
        # The name is derived from the mount point; under another name the directory is not ours.
        if mountpoint is not None and mount_id(mountpoint) == name:
            state = read_state(MountPaths(mountpoint), mounts)
            if state is not None:
                found[mountpoint] = state
    return [found[mountpoint] for mountpoint in sorted(found)]


def _mountpoint_of(state_file: str) -> str | None:
    try:
        with open(state_file, "rb") as file:
            mountpoint = json.load(file)["mountpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mountpoint if isinstance(mountpoint, str) and mountpoint.startswith("/") else None


def find_mount(mountpoint: str) -> MountState:
    """The mount at exactly this mount point (absolute, or relative to the current directory).

    CkptfsError (NOT_MOUNTED) when nothing is known of it.
    """
    paths = MountPaths(mountpoint)
    state = read_state(paths)
    if state is None:
        raise no_mount(paths.mountpoint)
    if state.mounted and not state.alive and not state.pid:
        raise CkptfsError(
            f"{state.mountpoint} is a ckptfs mount without a control socket in {run_dir()}: it belongs to"
            f" another user, who alone (and root, with sudo) may run this, or was made with another"
            " CKPTFS_RUN_DIR; anybody can read the attribute user.ckptfs.state of the files in it",
            Exit.NOT_MOUNTED,
        )
    return state


def no_mount(mountpoint: str) -> CkptfsError:
    """The error for a mount point of which nothing is known: there is nothing to ask, wait for or end."""
    mounts = mountinfo.read()
    top = mountinfo.top_at(mountpoint, mounts)
    around = [mount.path for mount in mounts if mount.ours and mountinfo.inside(mountpoint, mount.path)]
    if top is not None and not top.ours:
        what = f"is not a ckptfs mount: {top.source} ({top.fstype}) is mounted there"
    elif around:
        what = f"is not a mount point; it lies in the ckptfs mount {max(around, key=len)}"
    else:
        what = "is not a ckptfs mount; ckptfs status shows those there are"
    return CkptfsError(f"{mountpoint} {what}", Exit.NOT_MOUNTED)


def _getxattr(path: str) -> str:
    return shlex.join(["getfattr", "-n", "user.ckptfs.state", "--absolute-names", path])


def mount_of(path: str, states: list[MountState]) -> tuple[MountState, str]:
    """The mount that a path lies in, and the path made absolute.

    Goes by names alone and never asks the mount, which may hang. CkptfsError (NOT_MOUNTED) when the path
    lies in none of `states`.
    """
    ours = {mount.path for mount in mountinfo.read() if mount.ours}
    absolute = resolve(path, frozenset(ours | {state.mountpoint for state in states}))
    inside = [state for state in states if mountinfo.inside(absolute, state.mountpoint)]
    if inside:
        return max(inside, key=lambda state: len(state.mountpoint)), absolute
    if any(mountinfo.inside(absolute, mountpoint) for mountpoint in ours):
        raise CkptfsError(
            f"{absolute} lies in a ckptfs mount of another user (or with another CKPTFS_RUN_DIR), who alone"
            f" may run this: ask them, use sudo, or read its state with {_getxattr(absolute)}",
            Exit.NOT_MOUNTED,
        )
    raise CkptfsError(f"{absolute} lies in no ckptfs mount", Exit.NOT_MOUNTED)
