"""A limit of the flush's bandwidth, so that checkpoints leave room on the network for others."""

from __future__ import annotations

import trio


class Limiter:
    """Lets bytes pass at a steady rate. `rate` in bytes per second, 0: no limit.

    What goes is paid for afterwards: a piece starts when those before it are paid, so pieces of any size
    pass, and the rate holds over a few of them.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._paid_at = 0.0

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may start."""
        if not self.rate:
            return
        now = trio.current_time()
        start = max(now, self._paid_at)
        self._paid_at = start + count / self.rate
        if start > now:
            await trio.sleep_until(start)
