"""`ckptfs mount`: check what can be checked beforehand, start the daemon, say what it said."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping

import click

from .. import memory
from .. import mountpoint as mountpoints
from ..config import Config
from ..config_file import Loaded, load, tier_directory
from ..control.mounts import MountState, read_state
from ..errors import CkptfsError, Exit
from ..paths import MountPaths, make_dir
from ..units import format_size
from . import daemon_process
from .object_store import object_store_options
from .output import say


@click.command(short_help="Mount a checkpoint file system.")
@click.argument("mountpoint", required=False)
@click.option(
    "--tier",
    metavar="URL",
    help="Where checkpoints live: file:///path or s3://bucket/prefix. Default: a local directory.",
)
@object_store_options
@click.option(
    "--cache-size", metavar="SIZE", help="Memory budget, like 8GiB or 50% of what is available (default)."
)
@click.option("--cache-dir", metavar="DIR", help="Stage in this directory on local disk instead of memory.")
@click.option("--spill-dir", metavar="DIR", help="Where staged bytes go that exceed the budget.")
@click.option("--spill-size", metavar="SIZE", help="Bound of the spill; 0 switches it off.")
@click.option("--flush-limit", metavar="SIZE", help="Bytes per second sent to the tier at most, like 500MiB.")
@click.option(
    "--fsync", metavar="cache|tier", help="What fsync waits for: safe from process death, or durable."
)
@click.option("--config", "config_file", metavar="FILE", help="TOML file; flags win over it.")
@click.option("--allow-other/--no-allow-other", default=None, help="Let other users in (default for root).")
@click.option(
    "--allow-tier-down", is_flag=True, default=None, help="Mount even when the tier can't be reached."
)
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
@click.option("--foreground", is_flag=True, default=None, help="Stay, log to stderr, end with the daemon.")
def mount(config_file: str | None, **flags: object) -> int:
    """Mount at MOUNTPOINT (default: the key mountpoint of the configuration file, else /ckpt).

    Returns when the mount is usable. What an earlier daemon left staged for this mount point is
    recovered and published first.
    """
    return start(flags, config_file)


def start(flags: Mapping[str, object], config_file: str | None, prefix: str = "--") -> int:
    """Mount with the values of `flags` (by field name); returns the exit code."""
    loaded = load(flags, config_file, prefix)
    paths = MountPaths(loaded.config.mountpoint)
    mountpoints.check_machine(loaded.config.allow_other)
    state = read_state(paths)
    _refuse_second(state)
    mountpoints.prepare(paths.mountpoint, state.pid if state and state.alive else None)
    paths.create()
    for line in _directories(loaded, paths):
        say(line)
    config = loaded.config
    if config.foreground:
        return daemon_process.run_foreground(config)
    log = config.log_file or paths.log
    for line in daemon_process.start_background(dataclasses.replace(config, log_file=log), log):
        say(line)
    return Exit.OK


def _refuse_second(state: MountState | None) -> None:
    """Only one daemon may own the staging of a mount point."""
    if state is None or not state.alive:
        return
    if state.mounted:
        shown = shlex.quote(state.mountpoint)
        raise CkptfsError(
            f"{state.mountpoint} is already a ckptfs mount (daemon pid {state.pid}): see"
            f" ckptfs status {shown}; ckptfs umount {shown} ends it",
            Exit.BUSY,
        )
    raise CkptfsError(
        f"the daemon of an earlier mount of {state.mountpoint} (pid {state.pid}) is still draining; "
        f"wait for it with ckptfs wait --mount {shlex.quote(state.mountpoint)}",
        Exit.BUSY,
    )


def _directories(loaded: Loaded, paths: MountPaths) -> list[str]:
    """Make our own default directories and check those that somebody named; returns what to say."""
    config, lines = loaded.config, []
    if loaded.file:
        lines.append(f"configuration: {loaded.file}")
    if "tier" not in loaded.given:
        _make_embedded_tier(paths.tier, shared=config.allow_other)
        lines.append(f"no tier given: checkpoints go to the directory {tier_directory(config.tier)}")
    if config.cache_dir:
        _check_directory("cache_dir", config.cache_dir)
    if config.spill_size:
        if config.spill_dir == paths.spill:
            make_dir(paths.spill, mode=0o700)
        _check_directory("spill_dir", config.spill_dir)
    _check_log(config)
    if not config.cache_dir and config.cache_size > memory.total():
        lines.append(
            f"warning: the cache of {format_size(config.cache_size)} is larger than the memory there is"
            f" ({format_size(memory.total())}); writers are slowed when memory runs short, whatever its size"
        )
    return lines


def _make_embedded_tier(path: str, *, shared: bool) -> None:
    """The default tier; where other users may enter the mount, each may make files there, as in /tmp."""
    new = not os.path.isdir(path)
    make_dir(path)
    if new and shared:
        os.chmod(path, 0o1777)


def _check_directory(key: str, path: str) -> None:
    """A directory that must be there, since a missing one may be a disk that is not mounted."""
    if not os.path.isdir(path):
        kind = "is not a directory; name one"
        if not os.path.exists(path):
            kind = "does not exist; mount the disk it lies on, or make it with mkdir -p"
        raise CkptfsError(f"{key}: {path} {kind}", Exit.USAGE)
    if not os.access(path, os.W_OK | os.X_OK):
        raise CkptfsError(f"{key}: {path} cannot be written to by this user", Exit.USAGE)


def _check_log(config: Config) -> None:
    directory = os.path.dirname(config.log_file)
    if config.log_file and not os.path.isdir(directory):
        raise CkptfsError(
            f"log_file: the directory {directory} does not exist; make it with mkdir -p", Exit.USAGE
        )
