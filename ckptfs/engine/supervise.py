"""Keeps the mount's own tasks going: a defect in one of them must not take the mount away."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable

import trio

from ckptfs.engine.hub import Hub

log = logging.getLogger("ckptfs")

PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
GOOD_S = 60.0
"""A task that went on for so long has got over what made it fail."""


async def supervised(hub: Hub, task: Callable[[], Awaitable[None]], name: str) -> None:
    """Run a task; log what it fails with, count it, and begin the task anew.

    Tasks keep what matters in the core and the journal, so beginning anew is what the next mount would
    do after a crash, without the crash.
    """
    pause = PAUSE_S
    while True:
        began = trio.current_time()
        try:
            await task()
        except Exception:
            hub.counters.errors += 1
            log.exception("internal error in the task %s; it is begun again", name)
        else:
            return
        pause = PAUSE_S if trio.current_time() - began > GOOD_S else min(LONGEST_PAUSE_S, 2 * pause)
        await trio.sleep(random.uniform(pause / 2, pause))


async def attempted(hub: Hub, job: Callable[[], Awaitable[None]], name: str) -> None:
    """Run a job that nobody waits for, once; what it fails with is logged and counted."""
    try:
        await job()
    except Exception:
        hub.counters.errors += 1
        log.exception("internal error in %s", name)
