"""`ckptfs status`: what each mount is doing, once or continuously, for people or as JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ..control import client
from ..control.mounts import MountState, find_mount, find_mounts
from ..errors import CkptfsError, Exit
from ..units import plural
from .output import fail, printable, say
from .render import Renderer

_INTERVAL = 0.5
"""Seconds between two looks with --watch on a terminal."""
_INTERVAL_PLAIN = 2.0
"""The same when the output goes to a file or pipe."""
_PLAIN_WIDTH = 10_000
"""Whoever reads the output from a pipe wants whole paths."""


@dataclass(frozen=True, slots=True)
class View:
    """One mount as it is now: the daemon's answer, or why there is none."""

    state: MountState
    status: dict[str, Any] | None
    error: CkptfsError | None = None

    def to_json(self) -> dict[str, Any]:
        """The daemon's answer with `daemon: true`; without one, what the state file tells."""
        if self.status is not None:
            return {"daemon": True, **self.status}
        return {
            "daemon": False,
            "mountpoint": self.state.mountpoint,
            "pid": None,
            "log_file": self.state.log_file,
            "tier": {"url": self.state.tier, "state": "unknown", "error": None, "since": None},
            "staged": self.state.staged,
            "mounted": self.state.mounted,
            "error": self.error.message if self.error else None,
        }

    def code(self) -> Exit:
        """4 stuck entries, 5 interrupted or skipped files, 8 the tier is down, 6 no daemon, else 0."""
        if self.status is not None:
            if self.status.get("stuck"):
                return Exit.STUCK
            kept_back = self.status.get("interrupted") or self.status.get("skipped")
            if kept_back:
                return Exit.INTERRUPTED
            tier = self.status.get("tier")
            down = isinstance(tier, dict) and tier.get("state") == "down"
            return Exit.TIER_DOWN if down else Exit.OK
        return self.error.code if self.error else Exit.NOT_MOUNTED

    def absence(self) -> str:
        """The sentence for a mount without an answering daemon."""
        if self.error is not None:
            return self.error.message
        if self.state.staged:
            staged = plural(self.state.staged, "file")
            return f"{staged} staged, no daemon: run {self.state.resume} to resume"
        gone = f"its daemon (pid {self.state.pid}) ended" if self.state.pid else "no daemon"
        return f"{gone}: run {self.state.resume} to recover what was staged"


@click.command(short_help="Show what mounts are doing.")
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="One object with MOUNTPOINT given, else a list.")
@click.option("--watch", is_flag=True, help="Refresh until the daemon ends or Ctrl-C.")
def status(mountpoint: str | None, as_json: bool, watch: bool) -> int:
    """Show the mount at MOUNTPOINT, or all mounts.

    Exit codes: 0 all well, or no mounts; 4 an entry is stuck, 5 a file is interrupted or skipped, 6 no
    daemon, or MOUNTPOINT is no mount, 8 the tier is down.
    """
    if watch:
        return _watch(mountpoint, as_json)
    views = collect(mountpoint)
    if as_json:
        _print_json(views, mountpoint is not None)
    elif not views:
        say("no ckptfs mounts")
    else:
        _print(views)
    return exit_code(views)


def collect(mountpoint: str | None) -> list[View]:
    """Ask the daemon of one mount point, or of all. CkptfsError (NOT_MOUNTED) for an unknown one."""
    states = find_mounts() if mountpoint is None else [find_mount(mountpoint)]
    return [_look(state) for state in states]


def _look(state: MountState) -> View:
    if not state.alive:
        return View(state, None)
    try:
        answer = client.request(state.paths, "status")
    except CkptfsError as error:
        # Ended between the look at the socket and the question: the same as not there.
        return View(state, None, None if error.code is Exit.NOT_MOUNTED else error)
    answer.pop("done", None)
    return View(state, answer)


def exit_code(views: list[View]) -> Exit:
    """The worst of all. Where nothing is mounted nothing is wrong; who expects a mount names it."""
    codes = {view.code() for view in views}
    for code in (Exit.STUCK, Exit.INTERRUPTED, Exit.FAILED, Exit.NOT_MOUNTED, Exit.TIER_DOWN):
        if code in codes:
            return code
    return Exit.NOT_MOUNTED if codes - {Exit.OK} else Exit.OK


def _print_json(views: list[View], single: bool) -> None:
    objects = [view.to_json() for view in views]
    print(json.dumps(objects[0] if single else objects), flush=True)


def _print(views: list[View]) -> None:
    console = Console()
    if console.is_terminal:
        console.print(_picture(views, console))
        return
    say(_plain(views))


def _plain(views: list[View]) -> str:
    renderer = Renderer(_PLAIN_WIDTH, _has_blocks())
    now = time.time()
    blocks = []
    for view in views:
        if view.status is None:
            blocks.append(f"{printable(view.state.mountpoint)}  {view.absence()}")
        else:
            lines = renderer.lines(view.status, now)
            blocks.append("\n  ".join(line.plain.rstrip() for line in [renderer.title(view.status), *lines]))
    return "\n\n".join(blocks)


def _picture(views: list[View], console: Console) -> RenderableType:
    renderer = Renderer(console.width - 4, _has_blocks())
    now = time.time()
    panels: list[RenderableType] = []
    for view in views:
        if view.status is None:
            title = Text(printable(view.state.mountpoint), "bold")
            panels.append(Panel(Text(printable(view.absence()), "yellow"), title=title, title_align="left"))
        else:
            body = Group(*renderer.lines(view.status, now))
            panels.append(Panel(body, title=renderer.title(view.status), title_align="left"))
    return Group(*panels)


def _has_blocks() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _watch(mountpoint: str | None, as_json: bool) -> int:
    """Show the mounts until no daemon is left."""
    views = collect(mountpoint)
    if not any(view.status is not None for view in views):
        if as_json:
            _print_json(views, mountpoint is not None)
        elif views:
            _print(views)
        else:
            say("no ckptfs mounts")
        return exit_code(views)
    try:
        console = Console()
        if as_json or not console.is_terminal:
            views = _watch_plain(views, mountpoint, as_json)
        else:
            views = _watch_live(views, mountpoint, console)
    except KeyboardInterrupt:
        return exit_code(views)  # the ordinary way to leave
    left = [view for view in views if view.status is None]
    for view in left:
        fail(f"{view.state.mountpoint}: {view.absence()}", Exit.NOT_MOUNTED)
    if not left and not as_json:
        say("the daemon ended; everything is durable")
    return Exit.NOT_MOUNTED if left else Exit.OK


def _again(mountpoint: str | None) -> list[View]:
    """As `collect`, with nothing for a mount that ended and left nothing behind."""
    try:
        return collect(mountpoint)
    except CkptfsError as error:
        if error.code is Exit.NOT_MOUNTED:
            return []
        raise


def _watch_live(views: list[View], mountpoint: str | None, console: Console) -> list[View]:
    with Live(_picture(views, console), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(_INTERVAL)
            views = _again(mountpoint)
            if not any(view.status is not None for view in views):
                return views
            live.update(_picture(views, console), refresh=True)


def _watch_plain(views: list[View], mountpoint: str | None, as_json: bool) -> list[View]:
    """One block, or with --json one line, per look."""
    while any(view.status is not None for view in views):
        if as_json:
            _print_json(views, mountpoint is not None)
        else:
            say(_plain(views) + "\n")
        time.sleep(_INTERVAL if as_json else _INTERVAL_PLAIN)
        views = _again(mountpoint)
    return views
