"""Every configuration key: what may be written for it, and what that means.

The keys are the names of the fields of `Config`, but `tier_options` and those of `OBJECT_STORE_KEYS`, which
fill `options`. In the TOML file and in mount options `-` may be written for `_`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from .errors import CkptfsError, Exit
from .units import format_duration, format_size, parse_duration, parse_size

_WHOLE = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?|[0-9a-f:.%]+", re.ASCII)

FSYNC_POLICIES = ("cache", "tier")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody wrote it, and where, for the error message."""

    value: object
    origin: str
    """`--cache-size`, or `cache_size in /etc/ckptfs.toml`."""
    base: str
    """Absolute directory that relative paths start from."""
    loose: bool = False
    """A mount option or flag: numbers and booleans may be written as text."""

    def wrong(self, reason: str) -> CkptfsError:
        """The error that says so."""
        return CkptfsError(f"{self.origin}: {reason}", Exit.USAGE)


@dataclass(frozen=True, slots=True)
class Percent:
    """A share (0-100) of something only known later: the memory available, the free space."""

    text: str

    def of(self, base: int) -> int:
        """That share of `base` bytes."""
        return parse_size(self.text, base)


def _text(given: Given) -> str:
    if not isinstance(given.value, str):
        raise given.wrong(f"{_show(given.value)} is not a text in quotes")
    if not given.value:
        raise given.wrong("the text is empty")
    if "\0" in given.value:
        raise given.wrong("the text contains a NUL character")
    return given.value


def _path(given: Given) -> str:
    return os.path.normpath(os.path.join(given.base, os.path.expanduser(_text(given))))


def _path_or_empty(given: Given) -> str:
    return "" if given.value == "" else _path(given)


def _boolean(given: Given) -> bool:
    if isinstance(given.value, bool):
        return given.value
    words = {"": True, "true": True, "yes": True, "on": True, "1": True,
             "false": False, "no": False, "off": False, "0": False}  # fmt: skip
    if given.loose and isinstance(given.value, str) and given.value.lower() in words:
        return words[given.value.lower()]
    raise given.wrong(f"{_show(given.value)} is neither true nor false")


def _whole(low: int, high: int) -> Callable[[Given], int]:
    def convert(given: Given) -> int:
        value = given.value
        if given.loose and isinstance(value, str) and _WHOLE.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise given.wrong(f"{_show(value)} is not a whole number")
        if not low <= value <= high:
            raise given.wrong(f"{_show(value)} is not between {low} and {high}")
        return value

    return convert


def _size(low: int, high: int, percent: bool = False) -> Callable[[Given], int | Percent]:
    def convert(given: Given) -> int | Percent:
        if isinstance(given.value, bool) or not isinstance(given.value, int | str):
            raise given.wrong(
                f"{_show(given.value)} is not a size; write it like 8GiB, in quotes, or as bytes"
            )
        try:
            if percent and isinstance(given.value, str) and given.value.strip().endswith("%"):
                parse_size(given.value, 0)
                return Percent(given.value)
            value = parse_size(given.value) if isinstance(given.value, str) else given.value
        except CkptfsError as error:
            raise given.wrong(error.message) from None
        if not low <= value <= high:
            shown = format_size(value) if 0 <= value < 1 << 80 else _show(value)
            raise given.wrong(f"{shown} is not between {format_size(low)} and {format_size(high)}")
        return value

    return convert


def _duration(low: float, high: float) -> Callable[[Given], float]:
    def convert(given: Given) -> float:
        if isinstance(given.value, bool) or not isinstance(given.value, int | float | str):
            raise given.wrong(
                f"{_show(given.value)} is not a duration; write it like 30s, in quotes, or as seconds"
            )
        try:
            value = parse_duration(given.value) if isinstance(given.value, str) else given.value
        except CkptfsError as error:
            raise given.wrong(error.message) from None
        if not low <= value <= high:  # also refuses nan and inf
            raise given.wrong(
                f"{_show(given.value)} is not between {format_duration(low)} and {format_duration(high)}"
            )
        return float(value)

    return convert


def _share(given: Given) -> float:
    value = given.value
    if isinstance(value, str):
        try:
            value = parse_size(value, 1_000_000) / 1_000_000 if value.strip().endswith("%") else float(value)
        except (CkptfsError, ValueError):
            raise given.wrong(f"{_show(value)} is not a share; write it like 0.1 or 10%") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise given.wrong(f"{_show(value)} is not a share; write it like 0.1 or 10%")
    if not 0 <= value <= 0.9:
        raise given.wrong(f"{_show(given.value)} is not between 0 and 0.9")
    return float(value)


def _choice(choices: tuple[str, ...]) -> Callable[[Given], str]:
    def convert(given: Given) -> str:
        if given.value not in choices:
            raise given.wrong(f"{_show(given.value)} is not one of {', '.join(choices)}")
        return str(given.value)

    return convert


def _globs(given: Given) -> tuple[str, ...]:
    value = given.value
    if given.loose and isinstance(value, str):
        value = [part for part in value.split(":") if part]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise given.wrong(f"{_show(value)} is not a list of patterns like ['*.log', '*.out']")
    return tuple(value)


def _rules(given: Given) -> tuple[tuple[str, str], ...]:
    if not isinstance(given.value, dict):
        raise given.wrong(f"{_show(given.value)} is not a table of pattern = policy")
    for pattern, policy in given.value.items():
        if policy not in FSYNC_POLICIES:
            raise given.wrong(f"{_show(policy)} for {pattern!r} is not one of {', '.join(FSYNC_POLICIES)}")
    return tuple(given.value.items())


def _endpoints(given: Given) -> str:
    """Endpoints, separated by spaces, as in `Config.options`."""
    value = given.value.split() if isinstance(given.value, str) else given.value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(url, str) for url in value):
        raise given.wrong(f"{_show(given.value)} is not a URL, or a list of them")
    found: dict[str, None] = {}
    for url in value:
        try:
            parts = urlsplit(url)
            host, user = parts.hostname, parts.username is not None
            port = parts.port
        except ValueError:
            host, user, port = None, False, None
        if user:
            raise given.wrong("a URL with a user in it is not taken; credentials go to ~/.aws/credentials")
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host or "") or port == 0:
            raise given.wrong(f"{_show(url)} is not a URL like https://10.1.2.3 or http://host:9000")
        if parts.query or parts.fragment or any(not "!" <= char <= "~" for char in url):
            raise given.wrong(f"{_show(url)} has more in it than an address")
        found[url.rstrip("/")] = None
    return " ".join(found)


def _options(given: Given) -> dict[str, str]:
    if not isinstance(given.value, dict):
        raise given.wrong(f"{_show(given.value)} is not a table of name = value")
    options = {}
    for name, value in given.value.items():
        if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) >> 64):
            raise given.wrong(f"{_show(value)} for {name!r} is not a text, boolean, or number of 64 bits")
        options[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return options


_KIB, _TIB = 1 << 10, 1 << 40

KEYS: dict[str, Callable[[Given], object]] = {
    "mountpoint": _path,
    "tier": _text,
    "cache_size": _size(0, 1024 * _TIB, percent=True),
    "cache_dir": _path_or_empty,
    "spill_dir": _path_or_empty,
    "spill_size": _size(0, 1024 * _TIB, percent=True),
    "fsync": _choice(FSYNC_POLICIES),
    "fsync_rules": _rules,
    "allow_other": _boolean,
    "allow_tier_down": _boolean,
    "foreground": _boolean,
    "workers": _whole(1, 64),
    "worker_threads": _whole(1, 256),
    "niceness": _whole(-20, 19),
    "chunk_size": _size(64 * _KIB, 1 << 30),
    "flush_limit": _size(0, 1024 * _TIB),
    "settle_time": _duration(0, 3600),
    "stream_globs": _globs,
    "stream_interval": _duration(0.1, 86400),
    "attr_timeout": _duration(0, 3600),
    "drain_timeout": _duration(0, 7 * 86400),
    "memory_floor": _share,
    "log_level": _choice(LOG_LEVELS),
    "log_file": _path_or_empty,
    "endpoint_url": _endpoints,
    "region": _text,
    "profile": _text,
    "ca_bundle": _path,
    "verify_tls": _boolean,
    "tier_options": _options,
}

OBJECT_STORE_KEYS = {
    "endpoint_url": "endpoint_url",
    "region": "region",
    "profile": "profile",
    "ca_bundle": "ca_bundle",
    "verify_tls": "verify",
}
"""Keys that are for s3:// tiers only, with the names under which they are in `Config.options`."""


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint like `; did you mean 'cache_size'?`: the closest name, whatever the distance."""
    by_likeness = sorted(names, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    return f"; did you mean {by_likeness[0]!r}?" if by_likeness else ""


def _show(value: object) -> str:
    """A value as it may have been written, short enough for one sentence."""
    try:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return shown if len(shown) <= 60 else shown[:57] + "..."
