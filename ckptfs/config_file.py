"""Builds the `Config` of a mount: flags win over the TOML file, the file over the defaults."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from . import memory, mountinfo
from .config import Config
from .config_keys import KEYS, OBJECT_STORE_KEYS, Given, Percent, nearest
from .errors import CkptfsError, Exit
from .mountinfo import inside
from .paths import MountPaths, data_dir, resolve, run_dir, working_dir
from .resume import default_tier
from .tiers.url import parse_tier_url
from .units import format_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_MOUNTPOINT = "/ckpt"
DEFAULT_CACHE_LEAST = 64 << 20
CACHE_LEAST = 16 << 20
"""Below this not even the chunks in flight fit."""
_SPILL_LEAST = 16 << 20
"""A default spill smaller than this is no help: it is switched off instead."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration and where it came from."""

    config: Config
    file: str
    """The TOML file read; empty: none."""
    given: frozenset[str]
    """Keys that were written by somebody, in the file or as flags; all others are defaults."""


def default_file() -> str:
    """The configuration file looked for when none is named (it need not exist)."""
    if os.geteuid() == 0:
        return "/etc/ckptfs.toml"
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if base.startswith("/") else os.path.expanduser("~/.config"), "ckptfs.toml")


def load(flags: Mapping[str, object], file: str | None = None, prefix: str = "--") -> Loaded:
    """Combine `flags` (by field name; None means not given) with the file and the defaults.

    `file` None: the default file if there is one. `prefix` is how flags are shown in errors.
    CkptfsError (USAGE), one sentence with the key and where it stands, for anything that can't be used.
    """
    given: dict[str, Given] = {}
    named = file is not None
    if file is not None:
        file = os.path.join(working_dir(), os.path.expanduser(file))
    else:
        file = default_file() if os.path.exists(default_file()) else ""
    if file:
        given = _read(file)
    cwd = "" if all(value is None for value in flags.values()) else working_dir()
    for name, value in flags.items():
        if value is not None:
            origin = "MOUNTPOINT" if name == "mountpoint" else prefix + name.replace("_", "-")
            given[name] = Given(value, origin, cwd, loose=True)
    values = {name: KEYS[name](entry) for name, entry in given.items()}
    config = dataclasses.replace(_complete(values, given), config_file=file if named else "")
    return Loaded(config, file, frozenset(given))


def _read(file: str) -> dict[str, Given]:
    """The keys of a TOML file, unconverted."""
    try:
        with open(file, "rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise CkptfsError(
            f"cannot read the configuration file {file}: {error.strerror}", Exit.USAGE
        ) from None
    except ValueError as error:  # undecodable, no TOML, or a number of thousands of digits
        raise CkptfsError(f"{file} is not valid TOML: {' '.join(str(error).split())}", Exit.USAGE) from None
    given: dict[str, Given] = {}
    for written, value in tables.items():
        name = written.replace("-", "_")
        if name not in KEYS:
            raise CkptfsError(f"unknown key {written!r} in {file}{nearest(name, KEYS)}", Exit.USAGE)
        if name in given:
            raise CkptfsError(f"the key {name} stands twice in {file}, with - and with _", Exit.USAGE)
        given[name] = Given(value, f"{written} in {file}", os.path.dirname(file))
    return given


def _complete(values: dict[str, object], given: Mapping[str, Given]) -> Config:
    """Fill in the defaults that depend on the machine and on other keys, and check what must fit together."""
    mountpoint = resolve(cast(str, values.pop("mountpoint", DEFAULT_MOUNTPOINT)))
    paths = MountPaths(mountpoint)
    if "tier" in given:
        tier = check_tier(cast(str, values.pop("tier")), given["tier"])
    else:
        tier = default_tier(paths)
    cache_dir = _real(values.pop("cache_dir", ""))
    spill_dir = _real(values.pop("spill_dir", "")) or paths.spill
    cache_size = _cache_size(values.pop("cache_size", None), cache_dir, given)
    spill_size = _spill_size(values.pop("spill_size", None), spill_dir, cache_size, cache_dir)
    values["options"] = _options(values, given, tier)
    values.setdefault("allow_other", os.geteuid() == 0)
    config = Config(
        mountpoint=mountpoint, tier=tier, cache_size=cache_size, cache_dir=cache_dir,
        spill_dir=spill_dir, spill_size=spill_size,
    )  # fmt: skip
    # Every remaining value was converted by the KEYS entry of its own field.
    config = dataclasses.replace(config, **cast(dict[str, Any], values))
    _check_places(config, given)
    return config


def _options(values: dict[str, object], given: Mapping[str, Given], tier: str) -> dict[str, str]:
    """`Config.options`: the table `tier_options` and the keys that are for object stores only."""
    options = dict(cast("dict[str, str]", values.pop("tier_options", {})))
    for key, name in OBJECT_STORE_KEYS.items():
        if key not in values:
            continue
        value = values.pop(key)
        if not tier.startswith("s3:"):
            if "tier" in given and given["tier"].loose and not given[key].loose:
                continue  # the file is about another tier than the one named for this time
            raise given[key].wrong(f"this is for s3:// tiers, and the tier is {tier}")
        if key == "ca_bundle" and not os.path.isfile(cast(str, value)):
            raise given[key].wrong(f"there is no file {value}")
        options[name] = str(value).lower() if isinstance(value, bool) else cast(str, value)
    return options


def _real(path: object) -> str:
    return resolve(cast(str, path)) if path else ""


def _cache_size(value: object, cache_dir: str, given: Mapping[str, Given]) -> int:
    if isinstance(value, Percent) or value is None:
        room = free_space(cache_dir) if cache_dir else memory.available()
        size = value.of(room) if value is not None else max(room // 2, DEFAULT_CACHE_LEAST)
    else:
        size = cast(int, value)
    if size < CACHE_LEAST:
        origin = given["cache_size"].origin if "cache_size" in given else "cache_size"
        raise CkptfsError(
            f"{origin}: a cache of {format_size(size)} is too small; {format_size(CACHE_LEAST)} is the least",
            Exit.USAGE,
        )
    return size


def _spill_size(value: object, spill_dir: str, cache_size: int, cache_dir: str) -> int:
    if isinstance(value, int):
        return value
    free = free_space(spill_dir)
    if isinstance(value, Percent):
        return value.of(free)
    if cache_dir and _device(cache_dir) == _device(spill_dir):
        free = max(0, free - cache_size)  # the cache will fill the same file system
    size = min(4 * cache_size, free // 2)
    return size if size >= _SPILL_LEAST else 0


def check_tier(url: str, given: Given) -> str:
    """A tier URL that can be used, normalised; CkptfsError (USAGE) with the reason otherwise."""
    if url.startswith(("/", ".")):
        suggestion = quote(os.path.normpath(os.path.join(given.base, url)))
        raise given.wrong(f"{url!r} is a path, not a URL; write file://{suggestion}")
    try:
        scheme, root = parse_tier_url(url)
    except CkptfsError as error:
        raise given.wrong(error.message.rstrip(".")) from None
    # Symbolic links are left as they are: only the workers touch the tier, a hung NFS mount would stop us.
    return f"{scheme}://{quote(root)}"


def tier_directory(url: str) -> str | None:
    """The directory of a file tier; None for every other kind."""
    scheme, root = parse_tier_url(url)
    return os.fsdecode(root) if scheme == "file" else None


def _check_places(config: Config, given: Mapping[str, Given]) -> None:
    """Nothing the mount needs may lie in a ckptfs mount, which would wait for itself, nor in the tier, whose
    files it would become."""
    used = {
        "tier": tier_directory(config.tier), "cache_dir": config.cache_dir,
        "spill_dir": config.spill_dir if config.spill_size else "", "log_file": config.log_file,
        "mountpoint": config.mountpoint, "CKPTFS_RUN_DIR": run_dir(), "CKPTFS_DATA_DIR": data_dir(),
    }  # fmt: skip
    mounts = mountinfo.read()
    tier = _followed(used["tier"], mounts) if used["tier"] else None
    for key, path in used.items():
        origin = given[key].origin if key in given else key
        if path and key != "mountpoint":
            _check_outside_mounts(key, path, origin, config.mountpoint, mounts)
        if path and key != "tier" and tier and inside(_followed(path, mounts), tier):
            what = "the mount point " if key == "mountpoint" else ""
            raise CkptfsError(
                f"{origin}: {what}{path} lies inside the tier's directory {tier}; choose another place",
                Exit.USAGE,
            )


def _check_outside_mounts(
    key: str, path: str, origin: str, mountpoint: str, mounts: Sequence[mountinfo.Mount]
) -> None:
    followed = _followed(path, mounts)
    if inside(followed, mountpoint):
        raise CkptfsError(f"{origin}: {path} lies inside the mount point {mountpoint}", Exit.USAGE)
    for mount in mounts:
        if mount.ours and inside(followed, mount.path):
            better = "name its directory on that mount's tier" if key == "tier" else "choose another"
            where = f"{path} lies inside the ckptfs mount {mount.path}"
            raise CkptfsError(f"{origin}: {where}; {better}", Exit.USAGE)


_REMOTE = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "fuse", "autofs")
"""Beginnings of the types of file systems that may hang."""


def _followed(path: str, mounts: Sequence[mountinfo.Mount]) -> str:
    """`path` with symbolic links followed, as far as that asks no file system that may hang."""
    return resolve(path, frozenset(mount.path for mount in mounts if mount.fstype.startswith(_REMOTE)))


def free_space(directory: str) -> int:
    """Bytes free for this user where `directory` is, or will be made."""
    status = os.statvfs(_existing(directory))
    return status.f_bavail * status.f_frsize


def _device(directory: str) -> int:
    return os.stat(_existing(directory)).st_dev


def _existing(directory: str) -> str:
    """The nearest directory above that is there already."""
    while not os.path.isdir(directory) and directory != "/":
        directory = os.path.dirname(directory)
    return directory
