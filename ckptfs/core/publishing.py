"""Publishing: what may be applied to the tier next, and what its answers mean (R2, R5, R9)."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfs.core.model import Entry, EntryKind, Inode, Node
from ckptfs.core.oplog import OpLog
from ckptfs.tiers.base import Applied, Failed, Kind, Link, Mkdir, Move, Op, Put, Remove, Trouble

SKIPPED = "skipped"


class Publishing(OpLog):
    """PUT, LINK, MKDIR and MOVE, one after the other in log order."""

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
            if len(entries) >= limit or place in places or not e.complete:
                break
            if entries and (e.stuck or self._superseded(e)):
                break
            dir_path = self._dir_path(e.dir, made)
            if dir_path is None:
                break
            occupant = self._occupant(e)
            if occupant is not None and occupant.setting is not None:
                break  # `next_attrs` finds out what it is now
            if occupant is not None and self._in_the_way(e, occupant) and self._given_up(occupant):
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
        A directory that others removed is made again by whatever is put into it, maybe before one that
        had its name earlier: that one, removed in the mount, is not made any more.
        """
        log = self.state.log
        while log:
            e = next(iter(log.values()))
            if (e.kind == EntryKind.MOVE and not e.node.present) or self._superseded(e):
                self._finish(e)
                self._reap_both(e)
            elif e.dir.node is not None and e.dir.node.present:
                return
            elif e.dir.dead:
                self._homeless(e)
            elif self._holds(e.inode, e.dir):
                self._go_home(e)
            else:
                self._place(e.dir)

    @staticmethod
    def _holds(dir: Inode, inner: Inode) -> bool:
        """Whether a directory of the mount is, or is above, another one."""
        i: Inode | None = inner
        while i is not None and i is not dir:
            i = i.parent
        return i is not None

    def _go_home(self, e: Entry) -> None:
        """The head of the log would make, or move, a directory inside one that the tier lost and that is
        now inside of it: right to its present place."""
        inode = e.inode
        assert inode.parent is not None
        assert inode.name is not None
        self._aim(e, -1)
        e.dir, e.name, e.frozen = inode.parent, inode.name, False
        self._aim(e, 1)
        self.state.touch_entry(e)
        for m in [m for m in self.state.log.values() if m.node is e.node and m is not e]:
            self._finish(m)
            self._reap_both(m)

    def _superseded(self, e: Entry) -> bool:
        """Whether it would make a directory that was made already by what was put into it, or a removed
        one where the tier has one that is in use."""
        if e.kind != EntryKind.MKDIR:
            return False
        there = self._occupant(e) if e.node.dead_pos else None
        in_use = there is not None and there.kind == Kind.DIR and there.inode is not None
        return e.node.present or in_use

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
        self._mark(up.node, dir.name)
        self._mark_moved(node)  # the directory was asked about under another node, if at all
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
    def _given_up(node: Node) -> bool:
        """Whether the mount has no use for an object nor for anything in it. Else it is not removed: the
        tier keeps it aside, whole, like somebody else's (W3)."""
        return all(n.dead_pos for n in Publishing._tree(node))

    @staticmethod
    def _tree(node: Node) -> Iterator[Node]:
        for child in list(node.children.values()):
            yield from Publishing._tree(child)
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

    def _removal(self, node: Node) -> Op:
        return Remove(node.path(), node.kind, node.token)

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
        self._mark_moved(node)
        if node.parent is not None and node.present:
            self._mark(node.parent, node.name)
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
        if not self._made_again(e):
            self._vanish(node)
        self.last_applied = e
        self._reap_both(e)

    def _made_again(self, e: Entry) -> bool:
        """Whether a directory that the tier lost before its MOVE is to be made at its new place, by what
        is put into it (as in `_place`). What was in it is gone."""
        s, node, inode = self.state, e.node, e.inode
        if node.kind != Kind.DIR or inode.dead or inode.node is not node or e.dir.node is None:
            return False
        for child in list(node.children.values()):
            self._vanish(child)
        if not (inode.children or inode.pending or inode.ino in s.busy_dirs):
            return False
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        self._mark(e.dir.node, e.name)
        self._mark_moved(node)
        self._replace(e.dir.node, e.name, node)
        self.attrs_changed(inode)
        return True

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
        if not e.frozen and e.id in self.skipping:
            self.skip(e, self.skipping.pop(e.id))

    def skip(self, e: Entry, now: float) -> None:
        """R9: let the log pass a stuck entry. The bytes of a PUT stay staged.

        One that the tier is at, or may have applied: when it is refused again.
        """
        if e.frozen:
            self.skipping[e.id] = now
            return
        s = self.state
        inode = e.inode
        self._finish(e)
        if e.kind in (EntryKind.PUT, EntryKind.LINK):
            newest = not inode.puts or inode.puts[-1].pos < e.pos
            if not inode.dead and newest and not inode.unsealed:
                self.hold(inode, SKIPPED, now)
            self._void_moves(e.node, e.node.pending)
            s.abandon(e)
            s.drop_node(e.node)
        elif e.kind == EntryKind.MKDIR:
            for inner in [x for x in s.log.values() if x.dir is inode]:
                if inner.id in s.log:
                    self.skip(inner, now)
        self._reap_both(e)
