"""The op log itself: entries, graves, and the only two rewrites (R1, R3, R4).

R4: `retarget` (rename before publish) and `drop` (temporary file) are the only ways in which an
entry changes its place or is never applied. A grave that a moved or dropped PUT passes moves with it.
"""

from __future__ import annotations

import bisect
from typing import TypeVar

from ckptfs.core.model import ROOT, Entry, EntryKind, Inode, Node
from ckptfs.core.state import State
from ckptfs.tiers.base import Kind


class OpLog:
    """Log and graves of one mount. `settle_s` in seconds."""

    def __init__(self, state: State, *, settle_s: float) -> None:
        self.state = state
        self.settle_s = settle_s
        self.epoch = 0
        """Counts changes of the tier made or begun by us."""
        self.watching = 0
        """Questions to the tier without an answer yet; while there are any, changes are noted."""
        self.touched: dict[tuple[int, bytes], int] = {}
        """Epoch of our last change under (directory node, name)."""
        self.filled: dict[int, int] = {}
        """Epoch of our last change directly in a directory (node)."""
        self.moved: dict[int, int] = {}
        """Epoch at which a directory (node) was last on its way to another path."""
        self.last_applied: Entry | None = None
        self._graves: list[tuple[int, int]] = [(n.dead_pos, n.id) for n in state.graves.values()]
        """(position, node) of the graves in order, and some that are no more."""
        self.skipping: dict[int, float] = {}
        """Frozen entries that are to be skipped if the tier refuses them, and when that was asked for."""
        self._removing: set[int] = set()
        """Nodes whose removal was handed to the tier last."""
        self._setting: dict[int, Node] = {}
        """Node that the attributes of an inode were sent to last."""

    def append(self, kind: EntryKind, inode: Inode, node: Node, dir: Inode, name: bytes) -> Entry:
        """Log a step at the end. A directory that the tier lost, or never got, is made again first."""
        s = self.state
        if dir.node is None or (not dir.node.present and dir.node.pending == 0):
            self.append_mkdir(dir)
        e = Entry(s.next_id(), kind, inode, node, dir, name)
        e.pos = s.next_id()
        s.log[e.id] = e
        s.keep(inode)
        if not dir.kept:
            s.keep(dir)
        s.keep_node(node)
        self._aim(e, 1)
        inode.pending += 1
        node.pending += 1
        s.touch_entry(e)
        if kind in (EntryKind.PUT, EntryKind.LINK):
            inode.puts.append(e)
        return e

    def append_mkdir(self, dir: Inode) -> None:
        """Log the making of a directory under its present name."""
        assert dir.parent is not None
        assert dir.name is not None
        if dir.node is None or dir.node.dead_pos:
            dir.node = self.new_node(dir)
        self.append(EntryKind.MKDIR, dir, dir.node, dir.parent, dir.name)

    def new_node(self, inode: Inode) -> Node:
        """A tier object to be, not present yet."""
        node = Node(self.state.next_id(), inode.kind)
        node.inode = inode
        self.state.nodes[node.id] = node
        return node

    def _aim(self, e: Entry, delta: int) -> None:
        _count(self.state.targets, (e.dir.ino, e.name), delta)
        _count(self.state.busy_dirs, e.dir.ino, delta)

    def retarget(self, entries: list[Entry], dir: Inode | None = None, name: bytes = b"") -> None:
        """R4a: move un-applied entries to the end, in their order, under a new name if one is given."""
        if not entries:
            return
        s = self.state
        first = entries[0].pos
        s.shift_to_end(entries)
        for e in entries:
            if dir is not None:
                self._aim(e, -1)
                e.dir, e.name = dir, name
                self._aim(e, 1)
                if not dir.kept:
                    s.keep(dir)
                s.touch_entry(e)
                e.stuck = ""
                self._void_moves(e.node, e.node.pending - 1)
            elif e.stuck:
                self.unstick(e)
        self._pass_graves(first)

    def _pass_graves(self, pos: int) -> None:
        """Graves behind `pos` move behind the whole log with the PUT that left `pos`."""
        s = self.state
        if not s.graves or not s.log:
            return
        end = next(reversed(s.log.values())).pos
        low = bisect.bisect_left(self._graves, (pos, 0))  # at `pos` itself: it waits for that PUT
        high = bisect.bisect_left(self._graves, (end, 0))
        passed = self._graves[low:high]
        del self._graves[low:high]
        for was, id in passed:
            node = s.graves.get(id)
            if node is not None and node.dead_pos == was:
                self._dig(node)

    def _dig(self, node: Node) -> None:
        """Put a grave at the end."""
        s = self.state
        node.dead_pos = s.next_id()
        s.graves[node.id] = node
        s.graves.move_to_end(node.id)
        s.keep_node(node)
        if len(self._graves) > 2 * len(s.graves) + 64:
            self._graves = [(n.dead_pos, n.id) for n in s.graves.values()]
        else:
            self._graves.append((node.dead_pos, node.id))

    def live_puts(self, inode: Inode) -> list[Entry]:
        """Un-applied PUTs that may still be rewritten."""
        return [e for e in inode.puts if not e.frozen]

    def entries_under(self, dir: Inode) -> list[Entry]:
        """Un-applied, unfrozen PUTs of live names anywhere under a directory, in log order.

        Not those with a MOVE behind them (refused after the rename was logged): they pass through.
        """
        inside: dict[int, bool] = {dir.ino: True, ROOT: False}

        def look(d: Inode) -> bool:
            trail: list[Inode] = []
            cur: Inode | None = d
            while cur is not None and cur.ino not in inside:
                trail.append(cur)
                cur = cur.parent
            answer = inside[cur.ino] if cur is not None else False
            for t in trail:
                inside[t.ino] = answer
            return answer

        return [
            e
            for e in self.state.log.values()
            if (inside[e.dir.ino] if e.dir.ino in inside else look(e.dir))
            and not e.frozen
            and e.inode.parent is not None
            and e.node.pending == 1
            and (e.kind == EntryKind.PUT or e.kind == EntryKind.LINK)
        ]

    def drop_temporary(self, inode: Inode, now: float) -> None:
        """R4b: forget unsent PUTs of a name that was unlinked or replaced within the settle time."""
        for e in list(inode.puts):
            if e.untouched and now - e.sealed_at < self.settle_s:
                self.drop(e)

    def drop(self, e: Entry) -> None:
        """Take an entry out of the log that will never be applied."""
        self._finish(e)
        self._void_moves(e.node, e.node.pending)
        self.state.drop_node(e.node)
        self._pass_graves(e.pos)
        self._reap_both(e)

    def _void_moves(self, node: Node, count: int) -> None:
        """Forget the MOVEs of a node that will not appear where they would take it from."""
        if count <= 0:
            return
        for m in [m for m in self.state.log.values() if m.node is node and m.kind == EntryKind.MOVE]:
            self._finish(m)
            self._reap_both(m)

    def _reap_both(self, e: Entry) -> None:
        self.reap(e.inode)
        if e.dir.dead:
            self.reap(e.dir)

    def bury(self, node: Node, held_by: Inode | None = None) -> None:
        """The mount has no use for this tier object any more: remove it, late (R3)."""
        s = self.state
        inode = node.inode
        if inode is not None and inode.node is node and node.kind != Kind.DIR:
            inode.node = None
            s.touch(inode)
        node.inode = None
        node.held_by = held_by
        if held_by is not None:
            held_by.holding.append(node)
        self._dig(node)

    def release_held(self, inode: Inode) -> None:
        """Graves that waited for this inode's seal take their place behind it."""
        for node in self.held_graves(inode):
            self.bury(node)
        inode.holding.clear()

    def held_graves(self, inode: Inode) -> list[Node]:
        """Graves that wait for this inode's seal."""
        return [n for n in inode.holding if n.held_by is inode and n.id in self.state.graves]

    def unbury(self, node: Node) -> None:
        """Let a dead object be again, and the dead directories it is in: it comes back into view when
        the tier is looked at. Too late for one whose removal is on its way."""
        n: Node | None = node
        while n is not None and n.dead_pos and n.id not in self._removing:
            del self.state.graves[n.id]
            n.dead_pos, n.held_by = 0, None
            self.state.touch_node(n)
            n = n.parent

    def _finish(self, e: Entry) -> None:
        s = self.state
        del s.log[e.id]
        self.skipping.pop(e.id, None)
        self._aim(e, -1)
        e.inode.pending -= 1
        e.node.pending -= 1
        if e in e.inode.puts:
            e.inode.puts.remove(e)
        s.drop_entry_row(e)
        s.touch(e.inode)
        s.unref_data(e.data)
        node = e.node
        if not node.present and not node.pending:  # now never made
            s.drop_node(node)
            if node.inode is not None and node.inode.node is node:
                node.inode.node = None
                s.touch(node.inode)

    def reap(self, inode: Inode) -> None:
        """Forget a dead inode that nothing needs; drop the journal row of one the tier has."""
        s = self.state
        if inode.dead:
            if inode.opens == 0 and inode.pending == 0 and inode.ino not in s.busy_dirs:
                s.set_data(inode, 0)
                s.drop_inode(inode)
        elif (
            inode.published
            and inode.kept
            and inode.kind != Kind.DIR
            and not inode.xattrs
            and not inode.attr_dirty
            and inode.pending == 0
            and inode.node is not None
            and inode.node.pending == 0
        ):
            s.unkeep(inode)

    def _mark(self, parent: Node | None, name: bytes) -> None:
        self.epoch += 1
        if parent is not None and self.watching:
            self.touched[(parent.id, name)] = self.epoch
            self.filled[parent.id] = self.epoch

    def _mark_moved(self, node: Node) -> None:
        if node.kind == Kind.DIR and self.watching:
            self.moved[node.id] = self.epoch

    def _vanish(self, node: Node) -> None:
        """The tier does not have this object any more, nor what was in it."""
        s = self.state
        for child in list(node.children.values()):
            self._vanish(child)
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        node.present = False
        inode = node.inode
        node.inode = None
        self._void_moves(node, node.pending)
        if node.pending:  # its own MKDIR comes yet: something was put into it before
            node.inode, node.parent, node.name = inode, None, b""
            s.touch_node(node)
            return
        node.dead_pos = 0
        s.drop_node(node)
        if inode is not None and inode.node is node:
            inode.node = None
            s.touch(inode)
            if inode.parent is None or inode.local:
                return
            if node.kind != Kind.DIR or not (inode.children or inode.pending or inode.ino in s.busy_dirs):
                self.unname(inode)

    def unname(self, inode: Inode) -> None:
        """Take a name out of the mount whose content the tier had, and has no more. Kept while open."""
        assert inode.parent is not None
        assert inode.name is not None
        del inode.parent.children[inode.name]
        inode.parent = inode.name = None
        self.state.touch(inode)
        self.reap(inode)

    def _dirty_dir(self, node: Node) -> None:
        """Publishing changed the directory's time on the tier: set ours again when it is quiet."""
        if node.inode is not None:
            self.attrs_changed(node.inode)

    def _not_doubtful(self, node: Node) -> None:
        if node.setting is not None:
            node.setting = None
            self.state.doubtful.pop(node.id, None)
            self.state.touch_node(node)

    def attrs_changed(self, inode: Inode) -> None:
        """Attributes changed after publishing: send them when convenient (R1)."""
        inode.attr_dirty += 1
        self.state.attr_queue[inode.ino] = inode
        self.state.keep(inode)

    def unstick(self, e: Entry) -> None:
        """It goes on."""
        if e.stuck:
            e.stuck = ""
            self.state.touch_entry(e)

    def hold(self, inode: Inode, reason: str, now: float) -> None:
        """Keep a file in the mount without publishing it, until its owner decides (R6, R9)."""
        inode.held, inode.held_at = reason, now
        self.state.held_inodes[inode.ino] = inode
        self.state.keep(inode)

    def unhold(self, inode: Inode) -> None:
        """The owner has decided, or the file was replaced."""
        if inode.held:
            inode.held = ""
            self.state.held_inodes.pop(inode.ino, None)
            self.state.touch(inode)


K = TypeVar("K")


def _count(table: dict[K, int], key: K, delta: int) -> None:
    left = table.get(key, 0) + delta
    if left:
        table[key] = left
    else:
        del table[key]
