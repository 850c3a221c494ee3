"""Following a `wait` or `umount` with a progress bar, and the sentence for what is not durable at its end."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..control import client
from ..control.mounts import read_state
from ..errors import CkptfsError, Exit
from ..paths import MountPaths
from ..units import format_duration, format_size, plural
from .output import full_path, listing

_IDLE_TIMEOUT = 60.0
"""Progress comes twice a second; the daemon is allowed long pauses all the same."""


def follow(paths: MountPaths, command: str, label: str, /, **arguments: object) -> client.Event:
    """Send `command`, show its progress on stderr when that is a terminal; returns the last event."""
    last: client.Event = {}
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal or sys.stderr.closed,
    )
    with progress:
        task = progress.add_task(label, total=None, left="")
        most = 0.0
        for last in client.events(paths, command, _IDLE_TIMEOUT, **arguments):
            pending = _pending(last)
            # What was written meanwhile makes the whole larger, it does not turn the bar back.
            done = progress.tasks[0].completed
            most = max(most, done + pending["bytes"])
            progress.update(task, total=most or None, completed=most - pending["bytes"], left=_left(last))
    return last


def check_durable(event: client.Event, mountpoint: str, waited: str, kept: str = "") -> None:
    """CkptfsError (TIMEOUT, STUCK, INTERRUPTED or LEFT_OVER) naming what remains, unless all is durable.

    `waited` is how the end came about (` after 5 s`), for a time-out; `kept` what becomes of the rest, in
    place of the commands that a living daemon would take.
    """
    if event.get("durable") is True:
        return
    code = client.exit_code(event.get("code"))
    remaining = [full_path(mountpoint, str(path)) for path in event.get("remaining") or []]
    what = {
        Exit.STUCK: "the tier refuses an entry, which is tried again and again, and what follows it waits"
        + (kept or "; see ckptfs status, and ckptfs skip to let the rest pass"),
        Exit.INTERRUPTED: "interrupted or skipped files are not published"
        + (kept or "; use ckptfs publish or ckptfs discard"),
    }.get(code, f"not everything is durable{waited}: {_amount(event)} left{_why(event)}{kept}")
    if code in (Exit.OK, Exit.FAILED):
        code = Exit.LEFT_OVER
    lines = [f"{mountpoint}: {what}", *([listing(remaining)] if remaining else [])]
    raise CkptfsError("\n".join(lines), code)


def _why(event: client.Event) -> str:
    """What the tier suffers from, where that is why it takes so long."""
    tier = event.get("tier")
    if not isinstance(tier, dict) or tier.get("state") != "down":
        return ""
    return f"; the tier is down ({tier.get('error') or 'no reason known'})"


def left_nothing(paths: MountPaths, process: client.Watched | None, timeout: float) -> bool:
    """Whether a daemon that ended without a last answer ended well: its state is gone with it.

    Waits at most `timeout` seconds for the process, since the state is the last thing it removes.
    """
    if process is not None:
        process.wait(timeout)
    return read_state(paths) is None


def _pending(event: client.Event) -> dict[str, float]:
    given = event.get("pending")
    table: dict[str, Any] = given if isinstance(given, dict) else {}
    return {name: float(table.get(name) or 0) for name in ("bytes", "files", "entries")}


def _amount(event: client.Event) -> str:
    pending = _pending(event)
    if pending["files"] or not pending["entries"]:
        return f"{plural(int(pending['files']), 'file')}, {format_size(pending['bytes'])}"
    return plural(int(pending["entries"]), "log entry")


def _left(event: client.Event) -> str:
    if event.get("done"):
        return ""
    eta = event.get("eta_s")
    known = f", about {format_duration(float(eta))}" if eta is not None else ""
    return f"{_amount(event)} left{known}{_why(event)}"
