"""Content of files: when it is dirty, sealed into a version, interrupted, and resolved (R6, invariant 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptfs.core.model import Entry, EntryKind, Inode, Unsealed, to_ns
from ckptfs.core.order import Order
from ckptfs.core.state import State
from ckptfs.tiers.base import Kind

MAX_CHUNKS = 9_000
"""A version is cut into at most this many chunks (object stores take 10,000 parts)."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Revert:
    """What `discard` left: the content to go back to (0: what the tier has), and its length."""

    data: int
    length: int


class Content:
    """Seals and their preparation. `now` in seconds, sizes in bytes."""

    def __init__(self, state: State, order: Order, *, chunk_bytes: int) -> None:
        self.state = state
        self.order = order
        self.chunk_bytes = chunk_bytes
        self.coalesce = True

    def sealed_length(self, inode: Inode) -> int:
        """Bytes of the current staging file that un-applied versions still need unchanged."""
        return max((e.length for e in inode.puts if e.data == inode.data), default=0)

    def needs_clone(self, inode: Inode, offset: int) -> bool:
        """Whether a write (or truncation) at `offset` would change a sealed version (invariant 5)."""
        return bool(inode.puts) and offset < self.sealed_length(inode)

    def dirty(self, inode: Inode, offset: int, now: float) -> bool:
        """Bytes at `offset` are about to change. True when the journal must hear of it first."""
        level = Unsealed.APPENDED if offset >= inode.size else Unsealed.REWRITTEN
        if level <= inode.unsealed and not inode.close_mark:
            return False
        if inode.unsealed == Unsealed.NO:
            inode.dirty_at = now
        inode.unsealed = max(level, inode.unsealed)
        inode.close_mark = 0
        if inode.dead:
            self.state.touch(inode)
        else:
            self.state.keep(inode)
        return True

    def replace(self, inode: Inode, data: int, now: float, *, size: int = 0) -> None:
        """Give the file other staging: empty (O_TRUNC: resolves an interruption), or a clone."""
        self.state.set_data(inode, data)
        if size == 0:
            self.order.unhold(inode)
        if size == 0 or inode.unsealed == Unsealed.NO:
            inode.dirty_at = now
        inode.size = size
        inode.unsealed = Unsealed.REWRITTEN
        inode.close_mark = 0
        inode.mtime_ns = inode.ctime_ns = to_ns(now)
        if inode.dead:
            self.state.touch(inode)
        else:
            self.state.keep(inode)

    def seal(self, inode: Inode, now: float) -> Entry | None:
        """Make a version of what was written and log its PUT. None when there is nothing to publish."""
        if inode.dead or inode.kind != Kind.FILE or inode.unsealed == Unsealed.NO or inode.held:
            return None
        assert inode.parent is not None
        assert inode.name is not None
        inode.unsealed = Unsealed.NO
        inode.close_mark = 0
        before = inode.puts[-1] if inode.puts else None
        node = self.order.new_node(inode)
        e = self.order.append(EntryKind.PUT, inode, node, inode.parent, inode.name)
        e.data, e.length = inode.data, inode.size
        e.mtime_ns, e.atime_ns = inode.mtime_ns, inode.atime_ns
        e.sealed_at = e.first_at = now
        e.chunk = self.chunk_for(inode.size)
        self.state.ref_data(e.data)
        if (
            self.coalesce
            and before is not None
            and before.untouched
            and now - before.first_at < self.order.settle_s
        ):
            # Replaced within the settle time (R4b). The clock of the first one goes on, so that a
            # file rewritten without end is still published once per settle time.
            e.first_at = before.first_at
            self.order.drop(before)
        self.order.release_held(inode)
        return e

    def chunk_for(self, length: int) -> int:
        """Chunk size for a version: a multiple of 1 MiB that needs at most `MAX_CHUNKS`."""
        least = -(-length // MAX_CHUNKS)
        return max(self.chunk_bytes, -(-least // MIB) * MIB)

    def mark_closed(self, inode: Inode) -> bool:
        """The opener's last descriptor was closed; a crash before the seal must still seal it.

        The seal itself comes with the kernel's RELEASE, since other processes may hold the same
        open file. True when the journal must hear of it before the close returns.
        """
        if inode.unsealed == Unsealed.NO or inode.dead or inode.close_mark:
            return False
        inode.close_mark = self.state.next_id()
        self.state.keep(inode)
        return True

    def interrupt(self, inode: Inode, now: float, reason: str) -> None:
        """Keep unsealed content without publishing it (R6)."""
        if not inode.dead and inode.unsealed != Unsealed.NO:
            inode.close_mark = 0
            self.order.hold(inode, reason, now)

    def publish_held(self, inode: Inode, now: float) -> Entry | None:
        """The owner wants the file as it is."""
        self.order.unhold(inode)
        if inode.unsealed == Unsealed.NO:
            inode.unsealed = Unsealed.REWRITTEN
        if inode.kind == Kind.LINK:
            assert inode.parent is not None
            assert inode.name is not None
            inode.unsealed = Unsealed.NO
            e = self.order.append(EntryKind.LINK, inode, self.order.new_node(inode), inode.parent, inode.name)
            e.sealed_at = e.first_at = now
            return e
        return self.seal(inode, now)

    def discard(self, inode: Inode) -> Revert | None:
        """The owner does not want it: go back to the last version, or to what the tier has.

        None: the name is gone from the mount until the tier is looked at again.
        """
        order = self.order
        order.unhold(inode)
        inode.unsealed = Unsealed.NO
        inode.close_mark = 0
        if inode.puts:
            last = inode.puts[-1]
            self.state.set_data(inode, last.data)
            inode.size, inode.mtime_ns = last.length, last.mtime_ns
            self.state.keep(inode)
            if last.node.dead_pos:
                # Renamed since it was handed to the tier, where the old name may be in use again by the
                # time that a MOVE had its turn: sent again, under the new name.
                inode.unsealed = Unsealed.REWRITTEN
                self.seal(inode, last.sealed_at)
            order.release_held(inode)
            return Revert(last.data, last.length)
        parent, name = inode.parent, inode.name
        assert parent is not None
        assert name is not None
        del parent.children[name]
        inode.parent = inode.name = None
        if inode.node is not None:
            inode.node.inode = None
            self.state.touch_node(inode.node)
            inode.node = None
        held = order.held_graves(inode)
        if (parent.ino, name) not in self.state.targets:
            graves = [n for n in self.state.graves.values() if n.name == name and not n.pending]
            at_name = [n for n in graves if order.dir_now(n.parent) is parent]
            held += [n for n in at_name if n.held_by is None]
        for node in held:
            order.unbury(node)
        inode.holding.clear()
        self.state.touch(inode)
        order.reap(inode)
        return None

    def recover(
        self,
        staged: Callable[[int], tuple[int, int] | None],
        is_stream: Callable[[bytes], bool],
        now: float,
    ) -> tuple[list[Inode], list[Inode]]:
        """After a crash: seal what was closed, interrupt what was open.

        `staged(data)` gives (size, mtime in ns) of a staging file: for dirty inodes these are the
        truth. Returns (sealed, interrupted).
        """
        sealed: list[Inode] = []
        interrupted: list[Inode] = []
        for inode in sorted(self.state.inodes.values(), key=lambda i: i.close_mark):
            inode.opens = inode.writers = 0
            if inode.unsealed == Unsealed.NO or inode.dead:
                continue
            found = staged(inode.data)
            if found is None:
                self.order.hold(inode, "its staged bytes are missing", now)
                continue
            inode.size, inode.mtime_ns = found
            self.state.keep(inode)
            if inode.held:
                continue
            if inode.close_mark or is_stream(inode.name or b""):
                self.seal(inode, now)
                sealed.append(inode)
            else:
                self.interrupt(inode, now, "open when the daemon died")
                interrupted.append(inode)
        for inode in [i for i in self.state.inodes.values() if i.dead]:
            self.order.reap(inode)
        return sealed, interrupted
