"""The endpoints of an object store: which one takes the next request, how many each gets at a time.

Requests go round robin. An endpoint that does not answer is left out for a while, then one request tries
it. One that says SlowDown gets a pause with full jitter and half the requests in flight, which grow again
by one for every round of good answers (as TCP does).
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptfs.tiers.s3_errors import never_sent, reason_of, throttled, unreachable

_log = logging.getLogger(__name__)

MOST = 64
"""Requests in flight at one endpoint, for one process."""
FIRST_OUT, LAST_OUT = 1.0, 30.0
"""Seconds that an endpoint is left out, at its first failure and at most."""
FIRST_PAUSE, LAST_PAUSE = 0.25, 20.0
"""Bounds in seconds of the pause after SlowDown: uniform between 0 and a bound that doubles."""
THROTTLED_TRIES = 6
"""How often one request is sent again after SlowDown before its caller hears of it."""


@dataclass
class Lane:
    """One endpoint; empty url: the one that botocore chooses for the region."""

    url: str
    allowed: float = MOST
    """Requests it may have in flight."""
    in_flight: int = 0
    failures: int = 0
    """Times in a row that it did not answer."""
    out_until: float = 0.0
    throttles: int = 0
    """Times in a row that it asked for fewer requests."""
    throttled_at: float = 0.0
    paused_until: float = 0.0

    def throttle(self, started: float, now: float) -> None:
        """It said SlowDown to a request sent at `started`; one from before the last reduction is no news."""
        if started < self.throttled_at:
            return
        self.throttles += 1
        self.throttled_at = now
        self.allowed = max(1.0, min(self.allowed, self.in_flight) / 2)
        bound = min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.throttles - 1, 20))
        self.paused_until = now + random.uniform(0, bound)

    def fail(self, now: float) -> None:
        """It did not answer."""
        if now < self.out_until:
            return  # known; one of those that were under way
        self.failures += 1
        bound = min(LAST_OUT, FIRST_OUT * 2.0 ** min(self.failures - 1, 20))
        self.out_until = now + bound * random.uniform(0.5, 1.0)

    def succeed(self, started: float) -> None:
        """It answered a request sent at `started`, whatever the answer was."""
        self.failures = 0
        self.out_until = 0.0
        if started >= self.throttled_at:
            self.throttles = 0
            if self.in_flight >= int(self.allowed):
                self.allowed = min(float(MOST), self.allowed + 1 / self.allowed)


class Lanes:
    """All endpoints. For any number of threads."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Lane(url) for url in urls]
        # Worker processes start at different endpoints.
        self._next = os.getpid() % len(self.all)
        self._changed = threading.Condition()
        self._mine = threading.local()

    @contextmanager
    def use(self) -> Generator[Turn, None, None]:
        """A place at some endpoint, waiting for one. Within another turn of the same thread it costs none."""
        nested = getattr(self._mine, "busy", False)
        turn = Turn(self, counted=not nested)
        self._mine.busy = True
        try:
            yield turn
        finally:
            self._mine.busy = nested
            turn.end()

    def take(self, counted: bool) -> Lane:
        """The next endpoint, once it has room."""
        with self._changed:
            while True:
                now = time.monotonic()
                lane, wait = self._pick(now, counted)
                if lane is not None:
                    lane.in_flight += counted
                    return lane
                self._changed.wait(wait)

    def give(self, lane: Lane, counted: bool) -> None:
        """A request is over."""
        with self._changed:
            lane.in_flight -= counted
            self._changed.notify()

    def note(self, lane: Lane, exc: Exception | None) -> None:
        """How a request outside of any turn went."""
        now = time.monotonic()
        with self._changed:
            if exc is not None and unreachable(exc):
                lane.fail(now)
            elif exc is None or not throttled(exc):
                lane.succeed(now)

    def _pick(self, now: float, counted: bool) -> tuple[Lane | None, float | None]:
        """An endpoint with room, or how many seconds to wait for one at most (None: until one is given)."""
        lanes = self.all[self._next :] + self.all[: self._next]
        usable = [lane for lane in lanes if now >= lane.out_until and not (lane.failures and lane.in_flight)]
        if not usable:
            # All are out: the one that comes back first is as good as any, and the caller has its own pause.
            usable = [min(lanes, key=lambda lane: lane.out_until)]
        soonest: float | None = None
        for lane in usable:
            if not counted or (lane.in_flight < int(lane.allowed) and now >= lane.paused_until):
                self._next = (self.all.index(lane) + 1) % len(self.all)
                return lane, None
            if now < lane.paused_until:
                left = lane.paused_until - now
                soonest = left if soonest is None else min(soonest, left)
        return None, soonest

    def lock(self) -> threading.Condition:
        """Held while a lane is changed."""
        return self._changed


class Turn:
    """One request and its repetitions."""

    def __init__(self, lanes: Lanes, counted: bool) -> None:
        self._lanes = lanes
        self._counted = counted
        self._tries = 0
        self._refused: set[str] = set()
        self._done: set[str] = set()
        self.lane = lanes.take(counted)
        self._started = time.monotonic()

    def end(self) -> None:
        """Leave the place to others."""
        self._lanes.give(self.lane, self._counted)

    def once(self, what: str) -> bool:
        """True the first time."""
        new = what not in self._done
        self._done.add(what)
        return new

    def succeeded(self) -> None:
        """The endpoint answered."""
        with self._lanes.lock():
            if self.lane.failures:
                _log.warning("endpoint %s answers again", _shown(self.lane))
            self.lane.succeed(self._started)

    def failed(self, exc: Exception) -> bool:
        """Note what went wrong; True: it is to be tried again now, at `lane`."""
        lane, now = self.lane, time.monotonic()
        if throttled(exc):
            with self._lanes.lock():
                lane.throttle(self._started, now)
            self._tries += 1
            return self._tries <= THROTTLED_TRIES and self._move()
        if unreachable(exc):
            with self._lanes.lock():
                if not lane.failures and len(self._lanes.all) > 1:
                    _log.warning(
                        "endpoint %s does not answer and is left out for a while: %s",
                        _shown(lane),
                        reason_of(exc),
                    )
                lane.fail(now)
            self._refused.add(lane.url)
            others = {one.url for one in self._lanes.all} - self._refused
            return bool(never_sent(exc) and others) and self._move()
        self.succeeded()
        return False

    def _move(self) -> bool:
        self._lanes.give(self.lane, self._counted)
        self.lane = self._lanes.take(self._counted)
        self._started = time.monotonic()
        return True


def _shown(lane: Lane) -> str:
    return lane.url or "of the region"
