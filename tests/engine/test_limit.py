"""The flush's bandwidth limit."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from ckptfs.engine.limit import Limiter

MIB = 1 << 20


def test_the_rate_holds_whatever_the_pieces() -> None:
    starts: list[tuple[float, int]] = []

    async def piece(limiter: Limiter, size: int) -> None:
        await limiter.take(size)
        starts.append((trio.current_time(), size))

    async def main() -> None:
        began = trio.current_time()
        limiter = Limiter(10 * MIB)
        async with trio.open_nursery() as nursery:
            for size in (16 * MIB, MIB, 4 * MIB, 16 * MIB, MIB) * 4:
                nursery.start_soon(piece, limiter, size)
        passed = 0
        for at, size in sorted(starts):
            assert passed <= (at - began) * 10 * MIB + 1
            passed += size
        assert trio.current_time() - began == pytest.approx((passed - sorted(starts)[-1][1]) / (10 * MIB))

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_no_limit_no_wait() -> None:
    async def main() -> None:
        began = trio.current_time()
        for _ in range(100):
            await Limiter(0).take(1 << 40)
        assert trio.current_time() == began

    trio.run(main, clock=MockClock(autojump_threshold=0))
