"""The op log: in which order names become visible on the tier, and what may be removed when.

R2: PUT, LINK, MKDIR and MOVE are applied one after the other in log order. R3: removals (dead
nodes, "graves") are late. R4: the only two rewrites are `retarget` (rename before publish) and
`drop` (temporary file). A grave that a moved or dropped PUT passes moves with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterator
from typing import TypeVar

from ckptfs.core.model import ROOT, Entry, EntryKind, Inode, Node, Unsealed
from ckptfs.core.state import State
from ckptfs.tiers.base import (
    Applied,
    Attrs,
    Failed,
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Put,
    Remove,
    SetAttrs,
    Trouble,
)

SKIPPED = "skipped"


class Order:
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
        self.moved: dict[int, int] = {}
        """Epoch at which a directory (node) was last on its way to another path."""
        self.last_applied: Entry | None = None
        self._graves: list[tuple[int, int]] = [(n.dead_pos, n.id) for n in state.graves.values()]
        """(position, node) of the graves in order, and some that are no more."""
        self._removing: set[int] = set()
        """Nodes whose removal was handed to the tier last."""
        self._setting: dict[int, Node] = {}
        """Node that the attributes of an inode were sent to last."""

    # -- building the log --------------------------------------------------------------------

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

    def moving(self) -> Node | None:
        """The object whose MOVE is in the tier's hands: it is under the one path or the other.

        At most one, and at the head: a MOVE is a batch of its own.
        """
        head = next(iter(self.state.log.values()), None)
        return head.node if head is not None and head.kind == EntryKind.MOVE and head.frozen else None

    def in_motion(self, node: Node) -> bool:
        """Whether its path on the tier is not known now, see `moving`."""
        moving = self.moving()
        n: Node | None = node if moving is not None else None
        while n is not None:
            if n is moving:
                return True
            n = n.parent
        return False

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
        self._aim(e, -1)
        e.inode.pending -= 1
        e.node.pending -= 1
        if e in e.inode.puts:
            e.inode.puts.remove(e)
        s.drop_entry_row(e)
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

    # -- publishing --------------------------------------------------------------------------

    def next_batch(self, limit: int = 64) -> tuple[list[Entry], list[Op]] | None:
        """The entries at the head of the log that may be applied now, and how.

        They are frozen. None when the head is not ready. A batch of removals that must come first
        (an object of another kind is in the way) is returned with no entries.
        """
        self._clear_head()
        entries: list[Entry] = []
        ops: list[Op] = []
        made: dict[int, bytes] = {}
        places: set[tuple[int, bytes]] = set()
        for e in self.state.log.values():
            place = (e.dir.ino, e.name)
            if len(entries) >= limit or place in places or not e.complete or (e.stuck and entries):
                break
            dir_path = self._dir_path(e.dir, made)
            if dir_path is None:
                break
            occupant = self._occupant(e)
            if occupant is not None and occupant.setting is not None:
                break  # `next_attrs` finds out what it is now
            if occupant is not None and self._in_the_way(e, occupant):
                if entries:
                    break
                tree = list(self._tree(occupant))
                self._removing = {n.id for n in tree}
                return [], [self._removal(n) for n in tree]
            if e.kind == EntryKind.MOVE and entries:
                break
            path = dir_path + b"/" + e.name if dir_path else e.name
            expected = occupant.token if occupant is not None and self._replaceable(e, occupant) else None
            ops.append(self._op(e, path, expected))
            entries.append(e)
            places.add(place)
            if e.kind == EntryKind.MKDIR:
                made[e.node.id] = path
            if e.kind == EntryKind.MOVE or (e.kind == EntryKind.MKDIR and occupant is not None):
                break  # what follows may be inside, where we know more when it is done
        if not entries:
            return None
        for e in entries:
            self._freeze(e)
        return entries, ops

    def _clear_head(self) -> None:
        """Deal with entries at the head that can't be applied as they are.

        A MOVE of something that never reached the tier (skipped, or renamed when refused) is done.
        A directory that others removed is made again by whatever is put into it.
        """
        log = self.state.log
        while log:
            e = next(iter(log.values()))
            if e.kind == EntryKind.MOVE and not e.node.present:
                self._finish(e)
                self._reap_both(e)
            elif e.dir.node is not None and e.dir.node.present:
                return
            elif e.dir.dead:
                self._homeless(e)
            else:
                self._place(e.dir)

    def _homeless(self, e: Entry) -> None:
        """The head of the log would go into a removed directory that others removed on the tier too."""
        s, node = self.state, e.node
        moves = [m for m in s.log.values() if m.node is node and m.kind == EntryKind.MOVE and m is not e]
        if moves and e.kind in (EntryKind.PUT, EntryKind.LINK):
            self._aim(e, -1)
            e.dir, e.name, e.frozen = moves[-1].dir, moves[-1].name, False
            self._aim(e, 1)
            s.touch_entry(e)
            self._void_moves(node, node.pending - 1)
            return
        self._finish(e)
        if not moves and not node.present:
            s.abandon(e)
            s.drop_node(node)
        self._reap_both(e)

    def _place(self, dir: Inode) -> None:
        """Count a directory that the tier lost as present: tiers make missing parents."""
        assert dir.parent is not None
        assert dir.name is not None
        s, up = self.state, dir.parent
        if up.node is None or not up.node.present:
            self._place(up)
        assert up.node is not None
        node = dir.node
        if node is None or node.dead_pos:
            node = dir.node = self.new_node(dir)
        self._replace(up.node, dir.name, node)
        s.touch(dir)
        self.attrs_changed(dir)

    def _replace(self, parent: Node, name: bytes, node: Node) -> None:
        """The tier has `node` at a place; a directory takes over what is in the one it replaces."""
        s = self.state
        old = parent.children.get(name)
        if old is not None and old is not node:
            if node.kind == old.kind == Kind.DIR and not node.children:
                node.children, old.children = old.children, {}
                for child in node.children.values():
                    child.parent = node
                    s.touch_node(child)
            self._vanish(old)
        node.parent, node.name, node.present = parent, name, True
        parent.children[name] = node
        s.keep_node(node)

    def _freeze(self, e: Entry) -> None:
        self._mark(e.dir.node, e.name)
        if e.kind == EntryKind.MOVE and e.node.parent is not None:
            self._mark(e.node.parent, e.node.name)
            self._mark_moved(e.node)
        if not e.frozen:
            e.frozen = True
            self.state.touch_entry(e)

    def _mark(self, parent: Node | None, name: bytes) -> None:
        self.epoch += 1
        if parent is not None and self.watching:
            self.touched[(parent.id, name)] = self.epoch

    def _mark_moved(self, node: Node) -> None:
        if node.kind == Kind.DIR and self.watching:
            self.moved[node.id] = self.epoch

    def _dir_path(self, dir: Inode, made: dict[int, bytes]) -> bytes | None:
        """Tier path of a directory as it will be when the batch gets there."""
        node = dir.node
        if node is None:
            return None
        if node.id in made:
            return made[node.id]
        return node.path() if node.present else None

    def _occupant(self, e: Entry) -> Node | None:
        node = e.dir.node
        found = node.children.get(e.name) if node is not None else None
        return None if found is e.node else found

    @staticmethod
    def _in_the_way(e: Entry, occupant: Node) -> bool:
        """Whether the tier can't simply replace the (dead) occupant."""
        if e.kind == EntryKind.MKDIR:
            return occupant.kind != Kind.DIR
        if e.kind == EntryKind.MOVE and e.node.kind == Kind.DIR:
            return occupant.kind != Kind.DIR or bool(occupant.children)
        return occupant.kind == Kind.DIR

    @staticmethod
    def _replaceable(e: Entry, occupant: Node) -> bool:
        """Whether the mount has given the occupant up. It has not when the MOVE that was to take it
        away was skipped (R9): the tier then keeps it like somebody else's (W3)."""
        other = occupant.inode
        return other is None or other is e.inode or occupant.kind == Kind.DIR

    @staticmethod
    def _tree(node: Node) -> Iterator[Node]:
        for child in list(node.children.values()):
            yield from Order._tree(child)
        yield node

    def _op(self, e: Entry, path: bytes, expected: str | None) -> Op:
        if e.kind == EntryKind.PUT:
            assert e.upload is not None
            digests = tuple(e.sent[o] for o in sorted(e.sent))
            return Put(path, e.upload, e.length, e.attrs(), digests, expected, e.version)
        if e.kind == EntryKind.LINK:
            return Link(path, e.inode.target, e.attrs(), expected)
        if e.kind == EntryKind.MKDIR:
            return Mkdir(path, e.attrs())
        return Move(e.node.path(), path, e.node.kind, e.node.ident, expected)

    def applied(self, e: Entry, answer: Applied) -> None:
        """The tier has applied this entry, checked."""
        s = self.state
        parent = e.dir.node
        assert parent is not None
        node = e.node
        if e.kind == EntryKind.MOVE and not answer.ident and not answer.token:
            self._source_gone(e, answer)
            return
        self._mark(parent, e.name)
        if node.parent is not None and node.present:
            self._mark(node.parent, node.name)
            self._mark_moved(node)
            if node.parent.children.get(node.name) is node:
                del node.parent.children[node.name]
            self._dirty_dir(node.parent)
        self._replace(parent, e.name, node)
        node.token, node.ident = answer.token or node.token, answer.ident or node.ident
        if answer.token:
            self._not_doubtful(node)
        s.conflicts += answer.conflict
        inode = e.inode
        self._finish(e)
        if node.dead_pos == 0 and node.kind != Kind.DIR and not inode.dead:
            before, inode.node = inode.node, node
            node.inode = inode
            if before is not None and before is not node and before.present:
                self.bury(before)  # its MOVE was skipped
        s.touch(inode)
        self._dirty_dir(parent)
        self.last_applied = e
        self._reap_both(e)

    def _source_gone(self, e: Entry, answer: Applied) -> None:
        """Somebody else removed or replaced what a MOVE was to take; what is there now is theirs."""
        self.state.conflicts += answer.conflict
        node = e.node
        if node.parent is not None:
            self._mark(node.parent, node.name)
        self._finish(e)
        self._vanish(node)
        self.last_applied = e
        self._reap_both(e)

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
        node.dead_pos = 0
        self._void_moves(node, node.pending)
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

    def refused(self, e: Entry, failed: Failed, now: float) -> None:
        """The tier did not apply this entry."""
        e.retries += 1
        if failed.trouble == Trouble.REDO:
            e.frozen = False
            self.state.forget_sent(e)
        elif failed.trouble == Trouble.REFUSED:
            e.frozen = False
            if not e.stuck:
                e.stuck_at = now
            e.stuck = failed.message
            self.state.touch_entry(e)

    def unstick(self, e: Entry) -> None:
        """It goes on."""
        if e.stuck:
            e.stuck = ""
            self.state.touch_entry(e)

    def skip(self, e: Entry, now: float) -> None:
        """R9: let the log pass a stuck entry. The bytes of a PUT stay staged."""
        s = self.state
        inode = e.inode
        self._finish(e)
        if e.kind in (EntryKind.PUT, EntryKind.LINK):
            if not inode.dead and not inode.puts and not inode.unsealed:
                self.hold(inode, SKIPPED, now)
            self._void_moves(e.node, e.node.pending)
            s.abandon(e)
            s.drop_node(e.node)
        elif e.kind == EntryKind.MKDIR:
            for inner in [x for x in s.log.values() if x.dir is inode]:
                if inner.id in s.log:
                    self.skip(inner, now)
        self._reap_both(e)

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

    # -- removals and attributes -------------------------------------------------------------

    def next_removals(self, limit: int = 128, avoid: Container[int] = ()) -> tuple[list[Node], list[Op]]:
        """Graves that may be emptied now (R3), children before their directory.

        `avoid`: ids of nodes whose removal the tier refuses for now.
        """
        s = self.state
        horizon = next(iter(s.log.values())).pos if s.log else s.last_id + 1
        nodes: list[Node] = []
        chosen: set[int] = set()
        for node in s.graves.values():
            if node.dead_pos >= horizon or len(nodes) >= limit:
                break
            if not node.present or node.id in avoid or node.held_by is not None or self._name_wanted(node):
                continue
            if node.setting is not None:
                continue  # `next_attrs` finds out what it is now
            if any(c.id not in chosen for c in node.children.values()):
                continue
            nodes.append(node)
            chosen.add(node.id)
        ops: list[Op] = []
        self._removing = chosen
        for node in nodes:
            if node.parent is not None:
                self._mark(node.parent, node.name)
            ops.append(self._removal(node))
        return nodes, ops

    def _removal(self, node: Node) -> Op:
        return Remove(node.path(), node.kind, node.token)

    def _name_wanted(self, node: Node) -> bool:
        """Whether a later file will overwrite the name anyway, or may: then it stays till then."""
        dir = node.parent.inode if node.parent is not None else None
        if dir is None:
            return False
        if (dir.ino, node.name) in self.state.targets:
            return True
        holder = dir.children.get(node.name)
        return holder is not None and holder.kind != Kind.DIR and holder.local

    def removed(self, node: Node, answer: Applied) -> None:
        """The tier does not have the object any more (or keeps somebody else's, W3, W4)."""
        self.state.conflicts += answer.conflict
        parent = node.parent
        if parent is not None:
            self._mark(parent, node.name)
            self._dirty_dir(parent)
        self._vanish(node)

    def give_up_removal(self, node: Node) -> None:
        """R9: the owner lets an object stay on the tier that the tier does not let us remove."""
        self._vanish(node)

    def in_the_way_removed(self, path: bytes, answer: Applied) -> None:
        """A forced removal (see `next_batch`) is done."""
        node = self.state.root_node
        for part in path.split(b"/"):
            child = node.children.get(part)
            if child is None:
                return
            node = child
        self.removed(node, answer)

    def attrs_changed(self, inode: Inode) -> None:
        """Attributes changed after publishing: send them when convenient (R1)."""
        inode.attr_dirty += 1
        self.state.attr_queue[inode.ino] = inode
        self.state.keep(inode)

    def next_attrs(self, limit: int = 64) -> tuple[list[tuple[Inode, int]], list[Op]]:
        """Published inodes whose attributes differ, where nothing else is on its way.

        Returned with the generation being sent, for `attrs_done`. Attributes that were sent before
        without an answer come first, in the name of a nameless inode: only the answer tells the
        object's token, without which our own change would look like somebody else's (W3).
        """
        s = self.state
        chosen: list[tuple[Inode, int]] = []
        ops: list[Op] = []
        self._setting = {}
        for doubtful in s.doubtful.values():
            if len(chosen) < limit and not self.in_motion(doubtful):
                assert doubtful.setting is not None
                nameless = Inode(doubtful.id, doubtful.kind, doubtful.setting)
                chosen.append((nameless, 0))
                ops.append(self._send_attrs(nameless, doubtful, doubtful.setting))
        for inode in list(s.attr_queue.values()):
            node = inode.node
            absent = node is None or not node.present
            if inode.dead or (absent and inode.pending == 0 and not inode.local):
                self._attrs_clean(inode)
                continue
            if node is None or not node.present or inode.pending or node.pending or inode.ino in s.busy_dirs:
                continue
            if node.setting is not None:
                continue
            if len(chosen) >= limit:
                break
            chosen.append((inode, inode.attr_dirty))
            ops.append(self._send_attrs(inode, node, inode.attrs()))
        return chosen, ops

    def _send_attrs(self, inode: Inode, node: Node, attrs: Attrs) -> Op:
        self._setting[inode.ino] = node
        if node.parent is not None:
            self._mark(node.parent, node.name)
        if node.kind == Kind.DIR:
            return SetAttrs(node.path(), node.kind, attrs, None)
        if node.setting is None:
            node.setting = attrs
            self.state.doubtful[node.id] = node
            self.state.touch_node(node)
        return SetAttrs(node.path(), node.kind, attrs, node.token)

    def _not_doubtful(self, node: Node) -> None:
        if node.setting is not None:
            node.setting = None
            self.state.doubtful.pop(node.id, None)
            self.state.touch_node(node)

    def attrs_done(self, inode: Inode, generation: int, answer: Applied) -> None:
        """The tier has the attributes of that generation; newer ones stay queued."""
        self.state.conflicts += answer.conflict
        node = self._setting.pop(inode.ino, inode.node)
        if node is not None:
            self._not_doubtful(node)
            if answer.token:
                node.token = answer.token
                self.state.touch_node(node)
            if node.parent is not None:
                self._mark(node.parent, node.name)
        if inode.attr_dirty == generation:
            self._attrs_clean(inode)
            self.reap(inode)

    def _attrs_clean(self, inode: Inode) -> None:
        self.state.attr_queue.pop(inode.ino, None)
        inode.attr_dirty = 0
        self.state.touch(inode)

    # -- what is left ------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """The tier has everything it will get without anybody's help, removals included."""
        s = self.state
        return not (
            s.log
            or s.doubtful
            or any(i.node is not None and i.node.present and not i.dead for i in s.attr_queue.values())
            or any(self._goes(n) for n in s.graves.values())
        )

    def _goes(self, node: Node) -> bool:
        """Whether a grave will be emptied without anybody's help, now that the log is empty."""
        if not node.dead_pos or node.held_by is not None or self._name_wanted(node):
            return False
        return all(self._goes(c) for c in node.children.values())

    def unsealed(self) -> Iterator[Inode]:
        """Files with content that was never sealed."""
        return (i for i in self.state.inodes.values() if i.unsealed != Unsealed.NO and not i.dead)


K = TypeVar("K")


def _count(table: dict[K, int], key: K, delta: int) -> None:
    left = table.get(key, 0) + delta
    if left:
        table[key] = left
    else:
        del table[key]
