"""`ckptfs wait`: return when what was written is durable on the tier."""

from __future__ import annotations

import time

import click

from ..control import client
from ..control.mounts import MountState, find_mount, find_mounts, mount_of
from ..errors import CkptfsError, Exit
from ..units import format_duration, parse_duration, plural
from .follow import check_durable, follow, left_nothing
from .output import fail, say

_END_TIMEOUT = 15.0
"""Seconds a daemon may take to end after its socket closed."""

_WORST_FIRST = (Exit.FAILED, Exit.STUCK, Exit.INTERRUPTED, Exit.TIMEOUT, Exit.NOT_MOUNTED)


@click.command(short_help="Wait until files, or everything, are durable.")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--timeout", metavar="S", help="Give up after this long, like 30 or 5m. Default: never.")
@click.option("--mount", "mountpoint", metavar="MOUNTPOINT", help="Only this mount.")
def wait(paths: tuple[str, ...], timeout: str | None, mountpoint: str | None) -> int:
    """Wait until each PATH is durable; without one, everything in all mounts.

    Exit codes: 0 durable, 3 the time ran out, 4 an entry is stuck, 5 a file is interrupted, 6 no daemon.
    """
    seconds = parse_timeout(timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    codes: set[Exit] = set()
    for state, inside in _by_mount(paths, mountpoint):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            _wait_for(state, inside, left, "" if seconds is None else f" after {format_duration(seconds)}")
        except CkptfsError as error:
            codes.add(error.code)
            fail(error.message, error.code)
    return next((code for code in _WORST_FIRST if code in codes), max(codes, default=Exit.OK))


def parse_timeout(text: str | None) -> float | None:
    """Seconds of a --timeout. CkptfsError (USAGE) when it is no duration."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except CkptfsError as error:
        raise CkptfsError(f"--timeout: {error.message}", Exit.USAGE) from None


def _by_mount(paths: tuple[str, ...], mountpoint: str | None) -> list[tuple[MountState, list[str]]]:
    """The mounts to ask, each with its paths (empty: everything)."""
    states = find_mounts() if mountpoint is None else [find_mount(mountpoint)]
    if not paths:
        if not states:
            raise CkptfsError("nothing is mounted, so there is nothing to wait for", Exit.NOT_MOUNTED)
        return [(state, []) for state in states]
    grouped: dict[str, tuple[MountState, list[str]]] = {}
    for path in paths:
        state, absolute = mount_of(path, states)
        grouped.setdefault(state.mountpoint, (state, []))[1].append(absolute)
    return list(grouped.values())


def _wait_for(state: MountState, inside: list[str], timeout: float | None, waited: str) -> None:
    if not state.alive:
        staged = f"{plural(state.staged, 'file')} staged, " if state.staged else ""
        raise CkptfsError(
            f"{state.mountpoint}: {staged}no daemon: run {state.resume} to resume",
            Exit.NOT_MOUNTED,
        )
    label = f"waiting for {state.mountpoint}"
    process = client.Watched(state.pid) if state.pid else None
    try:
        event = follow(state.paths, "wait", label, paths=inside, timeout_s=timeout)
    except client.DaemonEnded:
        # After an unmount elsewhere the daemon drains and ends, which is what we wait for.
        if not left_nothing(state.paths, process, _END_TIMEOUT):
            raise
        event = {"durable": True}
    finally:
        if process is not None:
            process.close()
    ending = f"; its daemon ends, and what is left stays staged for the next mount: run {state.resume}"
    kept = ending if event.get("ending") else ""
    check_durable(event, state.mountpoint, "" if kept else waited, kept)
    if not inside:
        say(f"{state.mountpoint}: everything is durable")
    for path in inside:
        say(f"{path}: durable")
