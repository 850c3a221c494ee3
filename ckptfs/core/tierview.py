"""What the tier shows, merged into the mount: other writers' files appear, local changes win (W2)."""

from __future__ import annotations

from dataclasses import replace

from ckptfs.core.model import Inode, Node
from ckptfs.core.order import Order
from ckptfs.core.state import State
from ckptfs.tiers.base import RESERVED, UNASKED, Familiar, Found, Kind


class TierView:
    """Merges listings. A listing is only believed where we changed nothing since it was asked for."""

    def __init__(self, state: State, order: Order) -> None:
        self.state = state
        self.order = order
        self._asked: set[int] = set()
        self._listed: dict[int, int] = {}
        """The latest question whose answer, a whole listing, was merged into a directory (node)."""

    def ask(self) -> int:
        """Call before asking the tier; give the result back to `merge_*` or `give_up`."""
        self.order.epoch += 1
        self._asked.add(self.order.epoch)
        self.order.watching = len(self._asked)
        return self.order.epoch

    def give_up(self, asked: int) -> None:
        """The question got no answer."""
        self._asked.remove(asked)
        self.order.watching = len(self._asked)
        if not self._asked:
            self.order.touched.clear()
            self.order.filled.clear()
            self.order.moved.clear()
            self._listed.clear()

    def tier_path(self, inode: Inode) -> bytes | None:
        """Where the tier has this inode's published content; None when it has none."""
        node = inode.node
        return node.path() if node is not None and node.present else None

    def familiar(self, dir: Inode) -> Familiar:
        """What a listing need not say about the names in a directory: see `Tier.listdir`."""
        known: dict[bytes, tuple[str, Kind] | None] = {}
        node = dir.node
        for name, child in node.children.items() if node is not None else ():
            if child.dead_pos or child.pending:
                known[name] = None
            elif child.inode is not None and child.token:
                known[name] = child.token, child.kind
        known.update((name, None) for name in dir.children if (dir.ino, name) in self.state.targets)
        return known

    def _complete(self, node: Node, found: Found) -> Found | None:
        """An answer that was not asked in full, with what is known; None when that is another object by
        now: then it says nothing."""
        known = node.children.get(found.name)
        if known is None or known.inode is None or known.token != found.token:
            return None
        inode = known.inode
        return replace(
            found,
            kind=known.kind,
            size=inode.size,
            attrs=inode.attrs(),
            target=inode.target,
            ident=known.ident,
        )

    def merge_listing(self, dir: Inode, asked: int, listing: list[Found]) -> list[Inode]:
        """A complete listing of a directory. Returns inodes that lost their name (kept if open)."""
        lost: list[Inode] = []
        seen = set()
        node = dir.node
        if node is not None and self._same_place(dir, node, asked):
            for found in listing:
                if not found.name.startswith(RESERVED):
                    seen.add(found.name)
                    whole = self._complete(node, found) if found.attrs == UNASKED else found
                    if whole is not None:
                        lost += self._merge(dir, node, found.name, whole, asked)
            for name in [n for n in node.children if n not in seen]:
                lost += self._merge(dir, node, name, None, asked)
            self._listed[node.id] = asked
        self.give_up(asked)
        return lost

    def merge_one(self, dir: Inode, name: bytes, asked: int, found: Found | None) -> list[Inode]:
        """The answer about a single name."""
        node = dir.node
        lost: list[Inode] = []
        if node is not None and self._same_place(dir, node, asked) and not name.startswith(RESERVED):
            lost = self._merge_name(dir, node, name, found, asked)
        self.give_up(asked)
        return lost

    def dir_vanished(self, dir: Inode, asked: int) -> None:
        """The tier says that there is no such directory (others removed it)."""
        node = dir.node
        up = node.parent if node is not None and self._same_place(dir, node, asked) else None
        if node is not None and up is not None:
            parent = up.inode
            if parent is not None and self._same_place(parent, up, asked):
                self._merge_name(parent, up, node.name, None, asked)
        self.give_up(asked)

    def same_place(self, dir: Inode, asked: int) -> bool:
        """Whether an answer about this directory would be believed now."""
        return dir.node is not None and self._same_place(dir, dir.node, asked)

    def _same_place(self, dir: Inode, node: Node, asked: int) -> bool:
        """Whether the path that was asked about is still that of the directory, which is in use, and
        no later answer was merged before."""
        if dir.dead or not node.present or self.order.in_motion(node):
            return False
        if self._listed.get(node.id, -1) > asked:
            return False
        n: Node | None = node
        while n is not None:
            if self.order.moved.get(n.id, -1) > asked:
                return False
            n = n.parent
        return True

    def _merge_name(
        self, dir: Inode, node: Node, name: bytes, found: Found | None, asked: int
    ) -> list[Inode]:
        """Merge the answer about a single name, after which no older one is believed."""
        lost = self._merge(dir, node, name, found, asked)
        self.order.touched[(node.id, name)] = max(asked, self.order.touched.get((node.id, name), 0))
        return lost

    def _merge(self, dir: Inode, node: Node, name: bytes, found: Found | None, asked: int) -> list[Inode]:
        if self.order.touched.get((node.id, name), -1) > asked:
            return []
        known = node.children.get(name)
        child = dir.children.get(name)
        free = child is None and (dir.ino, name) not in self.state.targets
        if known is None:
            if found is not None and free:
                self._adopt(dir, node, name, found)
            elif found is not None and found.kind == Kind.DIR and child is not None:
                self._join(dir, node, child, found)
            return []
        if known.dead_pos or known.pending:
            return []
        inode = known.inode
        if found is not None and found.kind == known.kind == Kind.DIR and found.token != known.token:
            known.token, known.ident = found.token, found.ident  # made again
            self.state.touch_node(known)
        if found is not None and found.kind == known.kind and found.token == known.token:
            if inode is None and free:
                self._adopt(dir, node, name, found, known)
            elif inode is not None and not inode.local and not inode.attr_dirty:
                self._refresh(inode, found)
            return []
        # Somebody else changed or removed what we knew.
        if inode is not None and (inode.local or inode.pending or inode is not child):
            return []
        if self._busy(known, asked) or known.setting is not None:
            return []
        if inode is not None and found is not None and inode.attr_dirty:
            return []
        lost = []
        if inode is not None:
            self._unname(inode)
            lost.append(inode)
        self._forget(known)
        if found is not None and dir.children.get(name) is None and (dir.ino, name) not in self.state.targets:
            self._adopt(dir, node, name, found)
        return lost

    def _busy(self, node: Node, asked: int) -> bool:
        """Whether something local hangs below a directory, or was published there since `asked`."""
        if self.order.filled.get(node.id, -1) > asked:
            return True
        inode = node.inode
        if inode is not None and (
            inode.ino in self.state.busy_dirs
            or any(c.local or c.pending or c.node is None for c in inode.children.values())
        ):
            return True
        return any(c.pending or c.held_by is not None or self._busy(c, asked) for c in node.children.values())

    def _unname(self, inode: Inode) -> None:
        for child in list(inode.children.values()):
            self._unname(child)
        self.order.unname(inode)

    def _forget(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._forget(child)
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        node.present = False
        node.dead_pos = 0
        self.state.drop_node(node)
        inode = node.inode
        if inode is not None and inode.node is node and node.kind != Kind.DIR:
            inode.node = None
            if not inode.dead and not inode.local:
                self.order.unname(inode)  # elsewhere in the mount, since its MOVE was skipped (R9)

    def _join(self, dir: Inode, parent: Node, child: Inode, found: Found) -> None:
        """The tier has a directory under the name of one of ours that it did not have (skipped, or lost)."""
        s = self.state
        if child.kind != Kind.DIR or child.node is not None or (dir.ino, found.name) in s.targets:
            return
        node = Node(s.next_id(), Kind.DIR)
        node.parent, node.name, node.present = parent, found.name, True
        node.token, node.ident, node.inode = found.token, found.ident, child
        parent.children[found.name] = node
        s.nodes[node.id] = node
        child.node = node
        s.touch(child)
        if child.kept:
            s.keep_node(node)
        if not child.attr_dirty:
            self._refresh(child, found)

    def _adopt(self, dir: Inode, parent: Node, name: bytes, found: Found, known: Node | None = None) -> Inode:
        s = self.state
        inode = Inode(s.next_id(), found.kind, found.attrs)
        node = known or Node(s.next_id(), found.kind)
        node.parent, node.name, node.present = parent, name, True
        node.token, node.ident, node.inode = found.token, found.ident, inode
        parent.children[name] = node
        s.nodes[node.id] = node
        inode.node = node
        inode.parent, inode.name = dir, name
        dir.children[name] = inode
        s.inodes[inode.ino] = inode
        self._refresh(inode, found)
        if node.kept and node.kind == Kind.DIR:
            s.keep(inode)
            s.touch_node(node)
        elif node.kept:
            s.unkeep(inode)
        return inode

    def _refresh(self, inode: Inode, found: Found) -> None:
        a = found.attrs
        size = found.size if inode.kind != Kind.DIR else inode.size
        if inode.kind == Kind.DIR and inode.ino in self.state.busy_dirs:
            return
        if inode.attrs() != a or (inode.size, inode.target) != (size, found.target):
            inode.size, inode.target = size, found.target
            inode.mode, inode.uid, inode.gid = a.mode, a.uid, a.gid
            inode.atime_ns, inode.mtime_ns = a.atime_ns, a.mtime_ns
            self.state.touch(inode)
