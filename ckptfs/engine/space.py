"""What statfs answers: the tier's capacity, as a worker saw it last."""

from __future__ import annotations

import trio

from ckptfs.engine.hub import READING, Hub
from ckptfs.tiers.base import Space, TierError

REFRESH_S = 10.0
UNKNOWN = 1 << 50
"""Answered as total and free, in bytes, where the tier has no such notion."""


class SpaceInfo:
    """Keeps the tier's capacity at hand, so that statfs never waits for it."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._space = Space(0, 0)

    def answer(self) -> tuple[int, int]:
        """(total, free) bytes. What is staged will need room too, so it is no longer free."""
        if not self._space.total:
            return UNKNOWN, UNKNOWN
        return self._space.total, max(0, self._space.free - self.hub.staging.dirty_ram)

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                self._space = await self.hub.pool.call("space")
                self.hub.health.up(READING)
            except TierError as e:
                self.hub.health.down(READING, e)
            await trio.sleep(REFRESH_S)
