"""The whole command that goes on with what is staged for a mount point, to be copied from a message.

What is staged belongs to one tier and lies in one place: a mount without the flags that named them would be
refused, or would not find it.
"""

from __future__ import annotations

import json
import os
import shlex
from typing import Any
from urllib.parse import quote

from .config import Config
from .paths import MountPaths


def mount_arguments(config: Config, paths: MountPaths) -> list[str]:
    """Arguments of `ckptfs` that mount the same tier again with the same places; what is default is left out.

    Values from a configuration file are given too: the file may be another one by then.
    """
    arguments = ["mount", paths.mountpoint]
    if config.config_file:
        arguments += ["--config", config.config_file]
    if config.tier != default_tier(paths):
        arguments += ["--tier", config.tier]
    if config.cache_dir:
        arguments += ["--cache-dir", config.cache_dir]
    if config.spill_size and config.spill_dir not in ("", paths.spill):
        arguments += ["--spill-dir", config.spill_dir]
    for url in config.options.get("endpoint_url", "").split():
        arguments += ["--endpoint-url", url]
    for key, flag in (("region", "--region"), ("profile", "--profile"), ("ca_bundle", "--ca-bundle")):
        if config.options.get(key):
            arguments += [flag, config.options[key]]
    if config.options.get("verify") == "false":
        arguments.append("--no-verify-tls")
    return arguments


def default_tier(paths: MountPaths) -> str:
    """URL of the tier that a mount has when none is named."""
    return "file://" + quote(os.fsencode(paths.tier))


def read_values(paths: MountPaths) -> dict[str, Any]:
    """What `mount.json` holds; nothing when it is not there or unreadable."""
    try:
        with open(paths.state, "rb") as file:
            values = json.load(file)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def resume_command(paths: MountPaths, values: dict[str, Any] | None = None) -> str:
    """That command, quoted for a shell. `values`: of `mount.json`, read anew when not given."""
    values = read_values(paths) if values is None else values
    arguments = values.get("resume")
    if not isinstance(arguments, list) or not all(isinstance(item, str) for item in arguments):
        # Written by another version, or not at all.
        arguments = ["mount", paths.mountpoint]
        tier = values.get("tier")
        if isinstance(tier, str) and tier and tier != default_tier(paths):
            arguments += ["--tier", tier]
    return shlex.join(["ckptfs", *arguments])
