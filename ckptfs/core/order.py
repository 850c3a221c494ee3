"""The order in which names become visible on the tier, and disappear from it.

In three layers: `oplog` (entries and graves), `publishing` (R2: PUT, LINK, MKDIR and MOVE are applied
one after the other in log order), and here what is late: removals (R3) and attributes (R1).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from ckptfs.core.model import Inode, Node, Unsealed
from ckptfs.core.publishing import SKIPPED, Publishing
from ckptfs.tiers.base import Applied, Attrs, Kind, Op, SetAttrs

__all__ = ["SKIPPED", "Order"]


class Order(Publishing):
    """Log, graves and late attributes of one mount: the whole of the order."""

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
            if self.in_motion(node):
                continue  # nothing is found under the wrong one of two paths, and would count as removed
            if any(c.id not in chosen and not self._unseen(c) for c in node.children.values()):
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

    def _name_wanted(self, node: Node) -> bool:
        """Whether a later file will overwrite the name anyway, or may: then it stays till then."""
        dir = self.dir_now(node.parent)
        if dir is None:
            return False
        if (dir.ino, node.name) in self.state.targets:
            return True
        holder = dir.children.get(node.name)
        return holder is not None and holder.kind != Kind.DIR and holder.local

    def dir_now(self, node: Node | None) -> Inode | None:
        """The mount's directory at this place: also one made again, which takes over what is left in it."""
        if node is None or node.inode is not None:
            return node.inode if node is not None else None
        up = self.dir_now(node.parent)
        there = up.children.get(node.name) if up is not None else None
        return there if there is not None and there.kind == Kind.DIR else None

    def removed(self, node: Node, answer: Applied) -> None:
        """The tier does not have the object any more (or keeps somebody else's, W3, W4)."""
        self.state.conflicts += answer.conflict
        if node.id not in self.state.nodes:
            return  # given up meanwhile, or seen to be gone with its directory
        parent = node.parent
        if parent is not None:
            self._mark(parent, node.name)
            self._dirty_dir(parent)
        self._vanish(node)

    def give_up_removal(self, node: Node) -> None:
        """R9: the owner lets an object stay on the tier that the tier does not let us remove."""
        if not any(n.pending for n in self._tree(node)):  # else it was not asked for yet
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
            if node.setting is not None or self.in_motion(node):
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
        return all(self._goes(c) or self._unseen(c) for c in node.children.values())

    def _unseen(self, node: Node) -> bool:
        """Nothing of the mount, nor anything in it: it does not keep its directory, the tier will (W4)
        if it is there."""
        if node.inode is not None or node.dead_pos or node.pending:
            return False
        return all(self._unseen(c) for c in node.children.values())

    def unsealed(self) -> Iterator[Inode]:
        """Files with content that was never sealed."""
        return (i for i in self.state.inodes.values() if i.unsealed != Unsealed.NO and not i.dead)
