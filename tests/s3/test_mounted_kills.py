"""kill -9 of the daemon, a worker, all workers or everything, under load, on an object store that ranks
uploads as AWS does; what strangers see there is watched all along (R3, R6, R7)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.crash.test_kill_loop import run_rounds
from tests.mounted.harness import wait_for
from tests.s3.mounts import S3Campaign
from tests.s3.proxy import Proxy

SEED = int(os.environ.get("CKPTFS_SEED", "0")) or int(time.time())
ROUNDS = int(os.environ.get("CKPTFS_ROUNDS", "60"))


def test_the_order_holds_while_a_trainer_runs(campaign: Callable[..., S3Campaign], proxy: Proxy) -> None:
    print(f"CKPTFS_SEED={SEED}")
    c = campaign(SEED, big=8 << 20)
    c.start()
    wait_for(lambda: c.check() or c.steps() >= 80, "the trainer", 60)
    c.sampled()
    c.finish()
    assert proxy.counts["CompleteMultipartUpload"] > 3
    print(f"{c.steps()} steps, {c.rounds()} looks at the tier, requests: {dict(proxy.counts)}")


def test_kills_lose_nothing_and_keep_the_order(campaign: Callable[..., S3Campaign]) -> None:
    print(f"CKPTFS_SEED={SEED}")
    run_rounds(campaign(SEED, big=8 << 20), 100, 8.0)


VARIANTS = {
    "quick": ([], "settle_time = 0.3\n"),
    "as shipped": ([], ""),
    "spilling": (["--cache-size", "64MiB"], "settle_time = 0.1\n"),
    "fsync waits for the tier": (["--fsync", "tier"], "settle_time = 0.3\n"),
    "small chunks": ([], 'settle_time = 0.1\nchunk_size = "5MiB"\nworkers = 4\n'),
    "with outages": (["--allow-tier-down"], "settle_time = 0.3\n"),
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_kills(variant: str, campaign: Callable[..., S3Campaign]) -> None:
    print(f"{variant}: CKPTFS_SEED={SEED} CKPTFS_ROUNDS={ROUNDS}")
    options, config = VARIANTS[variant]
    c = campaign(SEED, *options, config=config, runs=2)
    run_rounds(c, ROUNDS, outages=variant == "with outages")
