"""The merged view of names: what the core knows, refreshed from the tier in time (W2)."""

from __future__ import annotations

import errno
import logging
import random
import time

import trio

from ckptfs.core import Inode
from ckptfs.engine.hub import Hub
from ckptfs.tiers.base import Kind, TierError, Trouble

log = logging.getLogger("ckptfs")

LIST_AT_MOST = 2_000
"""A directory with more known names than this is asked about single names instead of listed again."""


class View:
    """Looks names up. Local state answers at once; the tier is asked through a worker."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.timeout = hub.config.attr_timeout
        self._listed: dict[int, float] = {}
        self._checked: dict[tuple[int, bytes], float] = {}
        self._listing: dict[int, trio.Event] = {}

    def _on_tier(self, dir: Inode) -> bool:
        return dir.node is not None and dir.node.present and not dir.dead

    def _fresh(self, dir: Inode) -> bool:
        return time.monotonic() - self._listed.get(dir.ino, -1e9) < self.timeout

    async def lookup(self, dir: Inode, name: bytes) -> Inode | None:
        """The inode under a name, or None. Waits for the tier only when nothing is known."""
        child = dir.children.get(name)
        if child is not None and (child.local or child.pending or child.node is None):
            return child
        if not self._on_tier(dir) or self._fresh(dir):
            return child
        if (dir.ino, name) in self.hub.core.state.targets:
            return child
        if len(dir.children) <= LIST_AT_MOST or dir.ino not in self._listed:
            await self.refresh(dir)
        else:
            await self._check_name(dir, name)
        return dir.children.get(name)

    async def _check_name(self, dir: Inode, name: bytes) -> None:
        now = time.monotonic()
        if now - self._checked.get((dir.ino, name), -1e9) < self.timeout:
            return
        if len(self._checked) > 10_000:
            self._checked.clear()
        tier = self.hub.core.tier
        asked = tier.ask()
        path = tier.tier_path(dir)
        if path is None:
            tier.give_up(asked)
            return
        try:
            found = await self.hub.pool.call("stat", path + b"/" + name if path else name)
        except TierError as e:
            tier.give_up(asked)
            self.hub.health.down(e)
            return
        except BaseException:
            tier.give_up(asked)
            raise
        tier.merge_one(dir, name, asked, found)
        self.hub.commit()
        self._checked[(dir.ino, name)] = now

    async def refresh(self, dir: Inode, *, force: bool = False) -> None:
        """Make the known children of a directory those of the tier, unless that was done just now."""
        if not self._on_tier(dir) or (self._fresh(dir) and not force):
            return
        running = self._listing.get(dir.ino)
        if running is not None:
            await running.wait()
            return
        self._listing[dir.ino] = trio.Event()
        try:
            await self._list(dir)
        finally:
            self._listing.pop(dir.ino).set()

    async def _list(self, dir: Inode) -> None:
        tier = self.hub.core.tier
        tries = 0
        while self._on_tier(dir):
            asked = tier.ask()
            path = tier.tier_path(dir)
            assert path is not None
            started = time.monotonic()
            try:
                listing = await self.hub.pool.call("listdir", path)
            except TierError as e:
                if e.trouble == Trouble.CHANGED and e.errno in (errno.ENOENT, errno.ENOTDIR):
                    if tries == 0 and dir.node is not None and dir.node.pending:
                        tier.give_up(asked)  # a rename of ours is on its way: ask under the other name
                        tries += 1
                        continue
                    tier.dir_vanished(dir, asked)
                    self.hub.commit()
                    return
                tier.give_up(asked)
                self.hub.health.down(e)
                if dir.ino in self._listed:
                    return  # the tier is down: what was known last must do
                await trio.sleep(random.uniform(0, min(2.0, 0.05 * 2 ** min(tries, 6))))
                tries += 1
                continue
            except BaseException:
                tier.give_up(asked)
                raise
            self.hub.health.up()
            tier.merge_listing(dir, asked, listing)
            self._listed[dir.ino] = started
            if self.hub.core.state.changed:
                self.hub.commit()
            return

    def expire(self, dir: Inode) -> None:
        """Ask the tier again at the next look into this directory."""
        if dir.ino in self._listed:
            self._listed[dir.ino] = -1e9

    async def refresh_above(self, inode: Inode) -> None:
        """Before a directory is judged empty."""
        if inode.kind == Kind.DIR:
            await self.refresh(inode, force=True)
