"""A defect in one of the mount's own tasks does not take the mount away."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from ckptfs.engine.hub import Counters, Hub
from ckptfs.engine.supervise import attempted, supervised


def fake_hub() -> Hub:
    return cast(Hub, SimpleNamespace(counters=Counters()))


def run(task: Any, *args: Any) -> None:
    trio.run(task, *args, clock=MockClock(autojump_threshold=0))


def test_a_failing_task_begins_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    hub, began = fake_hub(), []

    async def task() -> None:
        began.append(trio.current_time())
        if len(began) < 4:
            raise ZeroDivisionError("a defect")

    with caplog.at_level(logging.ERROR, "ckptfs"):
        run(supervised, hub, task, "the test")
    assert len(began) == 4
    assert hub.counters.errors == 3
    assert [r.getMessage() for r in caplog.records] == [
        "internal error in the task the test; it is begun again"
    ] * 3
    assert began == sorted(set(began))


def test_a_failing_part_of_a_task_counts_too() -> None:
    hub, began = fake_hub(), []

    async def part() -> None:
        raise KeyError("a defect")

    async def task() -> None:
        began.append(1)
        if len(began) == 1:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(part)
                await trio.sleep_forever()

    run(supervised, hub, task, "the test")
    assert len(began) == 2


def test_the_end_of_the_mount_ends_it() -> None:
    async def main() -> None:
        with trio.move_on_after(5) as scope:
            await supervised(fake_hub(), trio.sleep_forever, "the test")
        assert scope.cancelled_caught

    run(main)


def test_a_job_nobody_waits_for_fails_alone() -> None:
    hub = fake_hub()

    async def job() -> None:
        raise ValueError("a defect")

    run(attempted, hub, job, "the test")
    assert hub.counters.errors == 1
