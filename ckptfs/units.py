"""Sizes and durations as people write them, and numbers as people read them.

Sizes: `KiB`, `MiB`, `GiB`, `TiB` and the bare letters `K`, `M`, `G`, `T` are powers of 1024 (as in
`mount -o size=`); `KB`, `MB`, `GB`, `TB` are powers of 1000. A plain number is bytes. Case does not
matter. Durations: `ms`, `s`, `m`, `h`, `d`; a plain number is seconds.
"""

from __future__ import annotations

import math
import re

from .errors import CkptfsError, Exit

_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE_UNITS[_letter] = _SIZE_UNITS[_letter + "ib"] = 1024**_power
    _SIZE_UNITS[_letter + "b"] = 1000**_power

_DURATION_UNITS = {
    "ms": 0.001,
    "": 1.0, "s": 1.0, "sec": 1.0,
    "m": 60.0, "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}  # fmt: skip

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)\s*", re.ASCII)

_MAX_SIZE = 1 << 62
"""Beyond this, off_t arithmetic in the kernel is near its end; nobody means it."""


def _split(text: str) -> tuple[float, str] | None:
    match = _NUMBER.fullmatch(text)
    return (float(match[1]), match[2].lower()) if match else None


def parse_size(text: str, base: int | None = None) -> int:
    """Bytes meant by `text`; `50%` means that share of `base` bytes (refused when `base` is None).

    Raises CkptfsError (USAGE) when it is no size.
    """
    parts = _split(text)
    if parts is None or (parts[1] not in _SIZE_UNITS and parts[1] != "%"):
        raise CkptfsError(f"{text!r} is not a size; write it like 8GiB, 500M or 50%", Exit.USAGE)
    number, unit = parts
    if unit == "%":
        if base is None:
            raise CkptfsError(
                f"{text!r}: a percentage makes no sense here; write it like 8GiB or 500M", Exit.USAGE
            )
        if number > 100:
            raise CkptfsError(f"{text!r} is more than 100%", Exit.USAGE)
        return int(base * number / 100)
    value = number * _SIZE_UNITS[unit]
    if not math.isfinite(value) or value > _MAX_SIZE:
        raise CkptfsError(f"{text!r} is larger than any size possible here", Exit.USAGE)
    # Integers stay exact: a float would round above 2**53.
    whole = _NUMBER.fullmatch(text)
    if whole is not None and whole[1].isdigit():
        return int(whole[1]) * _SIZE_UNITS[unit]
    return int(value)


def parse_duration(text: str) -> float:
    """Seconds meant by `text`. Raises CkptfsError (USAGE) when it is no duration."""
    parts = _split(text)
    if parts is None or parts[1] not in _DURATION_UNITS:
        raise CkptfsError(f"{text!r} is not a duration; write it like 30s, 2m or 500ms", Exit.USAGE)
    value = parts[0] * _DURATION_UNITS[parts[1]]
    if value > 1e9:
        raise CkptfsError(f"{text!r} is longer than 30 years", Exit.USAGE)
    return value


def format_size(size: float) -> str:
    """`1536` -> `1.5 KiB`: three digits at most before the unit changes."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5:
            break
        if unit != "PiB":
            value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.1f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second."""
    return format_size(bytes_per_s) + "/s"


def format_duration(seconds: float) -> str:
    """`0.25` -> `250 ms`, `4.2` -> `4.2 s`, `75` -> `1m 15s`, `90000` -> `1d 1h`."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    for size, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{name}" + (f" {rest}{below_name}" if rest else "")
    raise AssertionError("unreachable")


def plural(count: int, noun: str) -> str:
    """`3 files`, `1 file`; `entry` becomes `entries`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"
