"""The form in which mount(8) and /etc/fstab call a file system: `ckptfs SOURCE MOUNTPOINT -o options`.

SOURCE is a tier URL, the absolute path of a directory that is the tier, or `none` or `ckptfs` for the tier
of the configuration. Own options have the names of the configuration keys; `config=FILE` names the file.
Both ways work in /etc/fstab: type `fuse.ckptfs` (mount.fuse3 then runs `ckptfs`, which it looks for in the
PATH of the system) and, with a link /sbin/mount.ckptfs, type `ckptfs`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import quote

from ..config_keys import KEYS, nearest
from ..errors import CkptfsError, Exit
from .mount import start

PLACEHOLDERS = ("none", "ckptfs")
_PROGRAMS = ("mount.ckptfs", "mount.fuse.ckptfs")

_IGNORED = frozenset(
    {"rw", "dev", "nodev", "suid", "nosuid", "exec", "auto", "noauto", "user", "nouser", "users", "owner"}
    | {"defaults", "default_permissions", "async", "atime", "noatime", "relatime", "norelatime"}
    | {"strictatime", "lazytime", "nolazytime", "diratime", "nodiratime", "nofail", "_netdev", "silent"}
)
"""Options that say what is so anyway, or that are meant for mount(8) and systemd.

`dev` and `suid` come from mount.fuse3 unasked; the mount is nodev and nosuid all the same.
"""

_REFUSED = {
    "ro": "a ckptfs mount is always writable",
    "noexec": "a ckptfs mount cannot be made noexec",
    "sync": "use fsync=tier to have fsync wait for the tier",
    "dirsync": "use fsync=tier to have fsync wait for the tier",
    "remount": "unmount and mount again to change options",
}

_TABLES = ("fsync_rules", "tier_options", "mountpoint", "tier")
"""Keys that can't be written as a mount option, or are given otherwise."""


def is_helper_call(program: str, arguments: Sequence[str]) -> bool:
    """Whether this command line is mount(8)'s form. A misspelt command is not taken for a source."""
    if program in _PROGRAMS:
        return True
    return bool(arguments) and (
        arguments[0] in PLACEHOLDERS or "://" in arguments[0] or arguments[0].startswith("/")
    )


def parse_options(text: str) -> tuple[dict[str, object], str | None]:
    """Configuration values and the configuration file from a comma-separated option list.

    CkptfsError (USAGE) for an option that is unknown or can't be granted.
    """
    flags: dict[str, object] = {}
    file: str | None = None
    own = [name for name in KEYS if name not in _TABLES]
    for option in text.split(","):
        written, has_value, value = option.partition("=")
        name = written.replace("-", "_")
        if not option or written in _IGNORED or written.startswith(("x-", "X-")) or written == "comment":
            continue
        if written in _REFUSED:
            raise CkptfsError(f"the mount option {written} is not supported: {_REFUSED[written]}", Exit.USAGE)
        if name == "config" and value:
            file = value
        elif name in ("no_allow_other", "noallow_other"):
            flags["allow_other"] = False
        elif name in ("no_verify_tls", "noverify_tls"):
            flags["verify_tls"] = False
        elif name in own and (has_value or name in ("allow_other", "allow_tier_down")):
            flags[name] = value
        elif name in own or name == "config":
            raise CkptfsError(f"the mount option {written} needs a value", Exit.USAGE)
        else:
            raise CkptfsError(
                f"unknown mount option {written!r}{nearest(name, [*own, 'config'])}", Exit.USAGE
            )
    return flags, file


def run(arguments: Sequence[str]) -> int:
    """Mount as mount(8) asks; returns the exit code."""
    places: list[str] = []
    options: list[str] = []
    fake = False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-o", "-t"):
            if not rest:
                raise CkptfsError(f"the option {argument} needs a value", Exit.USAGE)
            value = rest.pop(0)
            options += [value] if argument == "-o" else []
        elif argument.startswith("-o"):
            options.append(argument[2:])
        elif argument.startswith("-") and len(argument) > 1 and set(argument[1:]) <= set("sfnvwr"):
            if "r" in argument:
                options.append("ro")
            fake = fake or "f" in argument
        elif argument.startswith("-"):
            raise CkptfsError(f"the option {argument} is not known in the mount(8) form", Exit.USAGE)
        else:
            places.append(argument)
    if len(places) != 2:
        raise CkptfsError(
            "the mount(8) form is: ckptfs SOURCE MOUNTPOINT [-o options], with a tier URL, a directory"
            " or none as SOURCE",
            Exit.USAGE,
        )
    source, mountpoint = places
    flags, file = parse_options(",".join(options))
    flags["mountpoint"] = mountpoint
    if source not in PLACEHOLDERS:
        flags["tier"] = "file://" + quote(os.fsencode(source)) if source.startswith("/") else source
    if fake:
        return Exit.OK
    return start(flags, file, prefix="mount option ")
