"""Publishes in log order: one batch at a time, journaled before it is asked for, checked after (R2, R3)."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import trio

from ckptfs.core import Entry, EntryKind, Node
from ckptfs.engine.hub import PUBLISHING, Hub
from ckptfs.engine.uploader import BURST_S, STUCK_RETRY_S, backoff
from ckptfs.tiers.base import INLINE, Applied, Failed, Op, Outcome, Put, Remove, TierError, Trouble

log = logging.getLogger("ckptfs")


class Publisher:
    """The one task that makes names appear on the tier and disappear from it."""

    def __init__(self, hub: Hub, rescue: Callable[[], Awaitable[None]]) -> None:
        self.hub = hub
        self._rescue = rescue
        self._tries = 0
        self.retry_at = 0.0
        self._unpaid = 0
        """Bytes of the last batch that the bandwidth limit has not heard of."""
        self.stuck_removals: dict[int, tuple[Node, str, float]] = {}
        """Removals the tier refuses: node, message, and since when (seconds since the epoch)."""
        self._avoid: dict[int, float] = {}
        self._seen: dict[int, float] = {}
        """When removals (by node) were met first: they settle, since what is unlinked is often made again at
        once, and its writer may be killed before it closes that (R6)."""

    async def run(self) -> None:
        """For ever."""
        while True:
            if self.hub.blind:
                await self.hub.work.wait(1.0)
                continue
            await self.hub.committed()  # nothing is asked for that is not journaled
            busy = await self._entries()
            busy = await self._removals() or busy
            busy = await self._attributes() or busy
            if not busy:
                if self.hub.core.order.settled:
                    self.hub.health.up(PUBLISHING)
                await self.hub.work.wait(1.0)
                await trio.sleep(BURST_S)

    def _with_bytes(self, op: Op, e: Entry | None, pins: contextlib.ExitStack) -> Op:
        """A version that travels with its publishing gets its bytes, pinned meanwhile."""
        if e is None or not isinstance(op, Put) or op.upload != INLINE:
            return op
        staging = self.hub.staging
        blob = staging.blobs[e.data]
        source = staging.pin(blob, 0, e.length)
        pins.callback(staging.unpin, blob)
        return replace(op, source=source)

    async def _apply(self, ops: Sequence[Op]) -> Outcome | None:
        """Hand a batch to the tier; None when the answer is not known."""
        await self._rescue()
        try:
            outcome: Outcome = await self.hub.pool.call("apply", ops)
        except TierError as e:
            self.hub.health.down(PUBLISHING, e)
            await self._pause(backoff(self._tries))
            return None
        if outcome.failed is None:
            self._tries = 0
            self.hub.health.up(PUBLISHING)
        return outcome

    async def _pause(self, seconds: float) -> None:
        self._tries += 1
        await trio.sleep(seconds)

    async def _entries(self) -> bool:
        hub, order = self.hub, self.hub.core.order
        if time.monotonic() < self.retry_at:
            return False
        if self._unpaid:  # not between the decision and its application
            await hub.limiter.take(self._unpaid)
            self._unpaid = 0
        batch = order.next_batch()
        hub.commit()
        if batch is None or hub.behind:
            return False
        entries, ops = batch
        self._unpaid = sum(op.size for op in ops if isinstance(op, Put) and op.upload == INLINE)
        with contextlib.ExitStack() as pins:
            outcome = await self._apply(
                [self._with_bytes(op, e, pins) for op, e in zip_longest(ops, entries)]
            )
        if outcome is None:
            return True
        if not entries:
            for op, answer in zip(ops, outcome.applied, strict=False):
                assert isinstance(op, Remove)
                order.in_the_way_removed(op.path, answer)
            hub.commit()
            await self._refused(None, outcome.failed)
            return True
        for e, answer in zip(entries, outcome.applied, strict=False):
            order.unstick(e)
            order.applied(e, answer)
            if answer.conflict:
                log.warning(
                    "%s on the tier was somebody else's: theirs is kept under .ckptfs/conflicts/",
                    os.fsdecode(e.path()),
                )
            if e.kind == EntryKind.PUT:
                hub.counters.last_durable_path = os.fsdecode(e.path())
                hub.counters.last_durable_time = time.time()
        hub.commit()
        for e in entries[: len(outcome.applied)]:
            self._settle_data(e)
        hub.changed.beat()
        hub.room.beat()
        if outcome.failed is not None:
            await self._refused(entries[len(outcome.applied)], outcome.failed)
        return True

    def _settle_data(self, e: Entry) -> None:
        """The tier has the file's present content: its staging is clean cache now (B3)."""
        inode = e.inode
        if inode.data and inode.published and not inode.dead:
            blob = self.hub.staging.blobs.get(inode.data)
            if blob is not None:
                self.hub.staging.make_clean(blob)

    async def _refused(self, e: Entry | None, failed: Failed | None) -> None:
        if failed is None:
            return
        hub = self.hub
        if e is not None:
            if failed.trouble == Trouble.REFUSED and not e.stuck:
                log.error(
                    "%s is stuck: %s; what follows waits, `ckptfs skip` lets it pass",
                    os.fsdecode(e.path()), failed.message,
                )  # fmt: skip
            if failed.trouble == Trouble.REDO:
                hub.counters.reuploaded_bytes += e.sent_bytes
                log.warning("sending again: %s", failed.message)
            hub.core.order.refused(e, failed, time.time())
            hub.commit()
            hub.changed.beat()
        if failed.trouble == Trouble.REFUSED:
            # The pause is for this entry only: removals and attributes go on meanwhile.
            self.retry_at = time.monotonic() + random.uniform(STUCK_RETRY_S / 2, STUCK_RETRY_S)
        elif failed.trouble == Trouble.DOWN:
            hub.health.down(PUBLISHING, TierError(failed.trouble, failed.message, failed.errno))
            await self._pause(backoff(self._tries))

    async def _removals(self) -> bool:
        hub, order = self.hub, self.hub.core.order
        now = time.monotonic()
        nodes, ops = order.next_removals(avoid=_Unsettled(self, now))
        if not nodes or hub.behind:
            return False
        outcome = await self._apply(ops)
        if outcome is None:
            return True
        for node, answer in zip(nodes, outcome.applied, strict=False):
            order.removed(node, answer)
            self.forget_removal(node)
        if outcome.failed is not None:
            node = nodes[len(outcome.applied)]
            if outcome.failed.trouble == Trouble.REFUSED:
                self._avoid[node.id] = now + random.uniform(STUCK_RETRY_S / 2, STUCK_RETRY_S)
                if node.id not in self.stuck_removals:
                    log.error(
                        "the removal of %s is stuck: %s; `ckptfs skip` lets it stay on the tier",
                        os.fsdecode(node.path()), outcome.failed.message,
                    )  # fmt: skip
                    self.stuck_removals[node.id] = (node, outcome.failed.message, time.time())
        hub.commit()
        hub.changed.beat()
        if outcome.failed is not None and outcome.failed.trouble != Trouble.REFUSED:
            await self._refused(None, outcome.failed)
        return True

    def forget_removal(self, node: Node) -> None:
        """It is not stuck (any more)."""
        self._avoid.pop(node.id, None)
        self._seen.pop(node.id, None)
        self.stuck_removals.pop(node.id, None)

    async def _attributes(self) -> bool:
        hub, order = self.hub, self.hub.core.order
        chosen, ops = order.next_attrs()
        hub.commit()
        if not chosen or hub.behind:
            return False
        outcome = await self._apply(ops)
        if outcome is None:
            return True
        for (inode, generation), answer in zip(chosen, outcome.applied, strict=False):
            order.attrs_done(inode, generation, answer)
        if outcome.failed is not None:
            inode, generation = chosen[len(outcome.applied)]
            if outcome.failed.trouble == Trouble.REFUSED:
                log.warning(
                    "attributes of %s stay as they are on the tier: %s",
                    os.fsdecode(inode.path()), outcome.failed.message,
                )  # fmt: skip
                order.attrs_done(inode, generation, Applied())
        hub.commit()
        hub.changed.beat()
        if outcome.failed is not None and outcome.failed.trouble != Trouble.REFUSED:
            await self._refused(None, outcome.failed)
        return True


class _Unsettled:
    """The removals that must wait: refused a while ago, or not settled yet."""

    def __init__(self, publisher: Publisher, now: float) -> None:
        self._publisher = publisher
        self._now = now
        self._settle = 0.0 if publisher.hub.hurry() else publisher.hub.config.settle_time

    def __contains__(self, node: object) -> bool:
        assert isinstance(node, int)
        p = self._publisher
        if p._avoid.get(node, 0.0) > self._now:
            return True
        return self._now - p._seen.setdefault(node, self._now) < self._settle
