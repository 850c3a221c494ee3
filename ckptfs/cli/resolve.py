"""`ckptfs publish`, `discard` and `skip`: an operator decides about interrupted files and stuck entries."""

from __future__ import annotations

import click

from ..control import client
from ..control.mounts import find_mounts, mount_of
from .output import say


@click.command(short_help="Publish an interrupted file as it is.")
@click.argument("path")
def publish(path: str) -> int:
    """Publish what is there of the interrupted file PATH."""
    return _send("publish", path, "will be published in its turn")


@click.command(short_help="Drop an interrupted file.")
@click.argument("path")
def discard(path: str) -> int:
    """Drop the interrupted file PATH; what the tier has under that name comes back into view."""
    return _send("discard", path, "is discarded")


@click.command(short_help="Let the log pass a stuck entry.")
@click.argument("path")
def skip(path: str) -> int:
    """Let what follows pass the stuck entry PATH; its bytes are kept in staging."""
    return _send("skip", path, "is skipped; it is not on the tier, its bytes stay staged")


def _send(command: str, path: str, outcome: str) -> int:
    state, absolute = mount_of(path, find_mounts())
    client.request(state.paths, command, path=absolute)
    say(f"{absolute} {outcome}")
    return 0
