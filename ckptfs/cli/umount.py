"""`ckptfs umount`: unmount, and drain before the daemon ends."""

from __future__ import annotations

import shlex

import click

from .. import mountinfo
from .. import mountpoint as mountpoints
from ..control import client
from ..control.mounts import MountState, find_mount, no_mount
from ..errors import CkptfsError, Exit
from ..units import format_duration, plural
from .follow import check_durable, follow, left_nothing
from .output import fail, say
from .wait import parse_timeout

_END_TIMEOUT = 15.0
"""Seconds the daemon may take to end after its last answer."""


@click.command(short_help="Unmount and wait until everything is durable.")
@click.argument("mountpoint")
@click.option("--timeout", metavar="S", help="Drain at most this long, like 30 or 5m. Default: for ever.")
@click.option("--no-drain", is_flag=True, help="Do not wait: what is not durable stays staged.")
def umount(mountpoint: str, timeout: str | None, no_drain: bool) -> int:
    """Unmount MOUNTPOINT; what is not durable at the end stays staged for its next mount.

    Exit codes: 0 everything is durable, 3 the time ran out, 4 an entry is stuck, 5 a file is interrupted,
    6 not mounted, 9 left over without a daemon, 10 in use. Ctrl-C leaves the daemon draining.
    """
    seconds = parse_timeout(timeout)
    state = find_mount(mountpoint)
    if not state.alive:
        return _without_daemon(state)
    process = client.Watched(state.pid) if state.pid else None
    try:
        label = f"draining {state.mountpoint}"
        try:
            event = follow(state.paths, "umount", label, drain=not no_drain, timeout_s=seconds)
        except client.DaemonEnded:
            if not left_nothing(state.paths, process, _END_TIMEOUT):
                raise
            event = {"durable": True}
        # The next mount needs the staging that the daemon holds until its very end. With a stuck entry it
        # goes on, so that whoever lifts the reason, or skips the entry, need not mount again.
        goes_on = event.get("code") == Exit.STUCK and not event.get("ending")
        if process is not None and not goes_on and not process.wait(_END_TIMEOUT):
            raise CkptfsError(
                f"{state.mountpoint} is unmounted, but its daemon (pid {state.pid}) has not ended", Exit.BUSY
            )
    except KeyboardInterrupt:
        return fail(_interrupted(state), 130)
    finally:
        if process is not None:
            process.close()
    waited = "" if no_drain or seconds is None else f" after {format_duration(seconds)}"
    check_durable(event, state.mountpoint, waited, _kept(event, state, goes_on))
    say(f"{state.mountpoint}: unmounted, everything is durable")
    return Exit.OK


def _kept(event: client.Event, state: MountState, goes_on: bool) -> str:
    """What becomes of what is not durable, and how to go on: the commands for a mount need a daemon."""
    if goes_on:
        return (
            "; it is unmounted, and its daemon goes on trying: see ckptfs status, lift the reason, or let the"
            " rest pass with ckptfs skip"
        )
    then = {
        Exit.INTERRUPTED: ", then ckptfs publish or ckptfs discard",
        Exit.STUCK: ", then ckptfs skip or lift the reason",
    }.get(client.exit_code(event.get("code")), "")
    what = "they stay" if event.get("code") == Exit.INTERRUPTED else "it stays"
    return f"; {what} staged for the next mount: it is unmounted now, to go on run {state.resume}{then}"


def _interrupted(state: MountState) -> str:
    """What Ctrl-C leaves: the daemon goes on with what it was asked for."""
    top = mountinfo.top_at(state.mountpoint, mountinfo.read())
    done = "is being unmounted" if top is not None and top.ours else "is unmounted"
    follow_it = shlex.join(["ckptfs", "wait", "--mount", state.mountpoint])
    return f"{state.mountpoint} {done}, and its daemon goes on draining; follow it with {follow_it}"


def _without_daemon(state: MountState) -> int:
    """Clear away a dead mount; what its daemon left can only be published by a new one."""
    cleaned = mountpoints.clean_stale(state.mountpoint)
    if state.pid or state.staged:
        staged = plural(state.staged, "file") + " may be" if state.staged else "what was not durable is"
        raise CkptfsError(
            f"{state.mountpoint}: its daemon had ended, and {staged} still staged; "
            f"run {state.resume} to publish",
            Exit.LEFT_OVER,
        )
    if not cleaned:
        raise no_mount(state.mountpoint)
    say(f"{state.mountpoint}: unmounted what an ended daemon had left")
    return Exit.OK
