"""The clock that file times come from."""

from __future__ import annotations

import time

_REALTIME_COARSE = 5
"""CLOCK_REALTIME_COARSE of clock_gettime(2). The kernel takes the times it makes itself (`touch`) from
it; any finer clock would make such a time older than one taken a moment before."""


def now_ns() -> int:
    """Nanoseconds since the epoch, in whole microseconds (what a float of seconds can hold)."""
    return time.clock_gettime_ns(_REALTIME_COARSE) // 1000 * 1000


def now() -> float:
    """The same in seconds."""
    return now_ns() / 1e9
