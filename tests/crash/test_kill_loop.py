"""kill -9 of the daemon, a worker, all workers or everything, at random and at chosen moments, under load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.crash.campaign import Campaign

SEED = int(os.environ.get("CKPTFS_SEED", "0")) or int(time.time())
ROUNDS = int(os.environ.get("CKPTFS_ROUNDS", "60"))


def run_rounds(c: Campaign, rounds: int, budget_s: float = 1e9) -> int:
    """Kill and remount `rounds` times (as many as `budget_s` allows), then let everything arrive."""
    deadline = time.monotonic() + budget_s
    c.start()
    done = 0
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        what = c.kill()
        if "worker" not in what:
            c.wait_lost()
            c.remount()
            c.verify_mount()
            c.go()
        c.check()
        done += 1
    c.finish()
    assert done >= 3
    print(
        f"\nseed {c.seed}: {done} kills, {c.steps()} steps, {c.rounds()} looks at the tier, slowest mount"
        f" {c.slowest_mount:.1f} s, {c.reuploaded} bytes sent twice"
    )
    return done


def test_kills_at_any_moment_lose_nothing_and_keep_the_order(campaign: Callable[..., Campaign]) -> None:
    print(f"CKPTFS_SEED={SEED}")
    run_rounds(campaign(SEED), 100, 25.0)


@pytest.mark.long
def test_many_kills(campaign: Callable[..., Campaign]) -> None:
    print(f"CKPTFS_SEED={SEED} CKPTFS_ROUNDS={ROUNDS}")
    run_rounds(campaign(SEED), ROUNDS)
