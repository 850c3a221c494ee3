"""kill -9 of the daemon, a worker, all workers or everything, at random and at chosen moments, under load."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign
from tests.mounted.harness import Mount

SEED = int(os.environ.get("CKPTFS_SEED", "0")) or int(time.time())
ROUNDS = int(os.environ.get("CKPTFS_ROUNDS", "60"))


def run_rounds(c: Campaign, rounds: int, budget_s: float = 1e9, *, outages: bool = False) -> int:
    """Kill and remount `rounds` times (as many as `budget_s` allows), then let everything arrive.

    With `outages` the tier is away during half of the kills, and for a while before and after.
    """
    deadline = time.monotonic() + budget_s
    c.start()
    done = 0
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        away = c.tier_away() if outages and c.rng.random() < 0.5 else contextlib.nullcontext()
        with away:
            what = c.kill()
            if "worker" not in what:
                c.wait_lost()
                c.remount()
        if "worker" not in what:
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
    run_rounds(campaign(SEED), 100, 18.0)


VARIANTS = {
    "quick": ([], "settle_time = 0.3\n"),
    "as shipped": ([], ""),
    "spilling": (["--cache-size", "64MiB"], "settle_time = 0.1\n"),
    "fsync waits for the tier": (["--fsync", "tier"], "settle_time = 0.3\n"),
    "staging on disk": (["--cache-dir"], "settle_time = 0.3\n"),
    "small chunks": ([], 'settle_time = 0.1\nchunk_size = "1MiB"\nworkers = 4\n'),
    "with outages": (["--allow-tier-down"], "settle_time = 0.3\n"),
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_kills(
    variant: str, campaign: Callable[..., Campaign], new_mount: Callable[..., Mount], disk: Path
) -> None:
    print(f"{variant}: CKPTFS_SEED={SEED} CKPTFS_ROUNDS={ROUNDS}")
    options, config = VARIANTS[variant]
    if "--cache-dir" in options:
        (disk / "cache").mkdir()
        options = [*options, str(disk / "cache")]
    mount = new_mount()
    mount.start(*options, config=config)
    run_rounds(campaign(SEED, mount), ROUNDS, outages=variant == "with outages")
