"""The tables of the core, and the collection of what changed in them for the journal."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ckptfs.core.model import ROOT, Entry, EntryKind, Inode, Node, Unsealed
from ckptfs.tiers.base import INLINE, Attrs, Digest, Kind, Upload

Row = tuple[Any, ...]
ID_STEP = 10_000
"""Ids are journaled in steps of this many, so that none is ever used twice."""

MANY = 256
"""From this many entries on a common move is journaled as one statement."""


@dataclass
class Rows:
    """Everything the journal holds, as loaded."""

    inodes: list[Row] = field(default_factory=list)
    nodes: list[Row] = field(default_factory=list)
    entries: list[Row] = field(default_factory=list)
    sent: list[Row] = field(default_factory=list)
    last_id: int = 0


@dataclass
class Changes:
    """One transaction for the journal: rows to write, ids to delete."""

    inodes: list[Row]
    nodes: list[Row]
    entries: list[Row]
    sent: list[Row]
    shifted: list[tuple[int, str]]
    """(pos, JSON list of ids): these entries have moved to this position and those after it, before anything
    else in this transaction."""
    moved: list[tuple[int, int]]
    """(pos, entry id) of entries that only moved."""
    gone_inodes: list[int]
    gone_nodes: list[int]
    gone_entries: list[int]
    unsent: list[int]
    """Entries whose sent chunks are forgotten."""
    last_id: int
    """New high-water mark of ids, 0 when it did not move."""


class State:
    """Inodes, nodes and the log, and which of them have changed since `take_changes`.

    `log` is ordered by position. `graves` are the dead nodes (late removals), ordered by
    `dead_pos`, `doubtful` the nodes with a `setting`. `targets` counts un-applied entries by
    (directory inode, name) and `busy_dirs` by directory inode. `freed` lists data ids nobody needs
    any more and `abandoned` uploads that will not be published, for the owner to take.
    """

    def __init__(self, attrs: Attrs) -> None:
        self.inodes: dict[int, Inode] = {}
        self.nodes: dict[int, Node] = {}
        self.log: OrderedDict[int, Entry] = OrderedDict()
        self.graves: OrderedDict[int, Node] = OrderedDict()
        self.targets: dict[tuple[int, bytes], int] = {}
        self.busy_dirs: dict[int, int] = {}
        self.attr_queue: dict[int, Inode] = {}
        self.held_inodes: dict[int, Inode] = {}
        self.doubtful: dict[int, Node] = {}
        self.data_refs: dict[int, int] = {}
        self.freed: list[int] = []
        self.abandoned: list[tuple[int, Upload]] = []
        self.conflicts = 0
        self.last_id = ROOT
        self._saved_id = ROOT
        self._inodes: dict[int, Inode] = {}
        self._nodes: dict[int, Node] = {}
        self._entries: dict[int, Entry] = {}
        self._sent: list[Row] = []
        self._moved: dict[int, Entry] = {}
        self._shifted: list[tuple[int, str]] = []
        self._gone_inodes: set[int] = set()
        self._gone_nodes: set[int] = set()
        self._gone_entries: set[int] = set()
        self._unsent: set[int] = set()
        self.root = Inode(ROOT, Kind.DIR, attrs)
        self.root.kept = True
        self.root_node = Node(ROOT, Kind.DIR)
        self.root_node.present = True
        self.root_node.kept = True
        self.root_node.inode = self.root
        self.root.node = self.root_node
        self.inodes[ROOT] = self.root
        self.nodes[ROOT] = self.root_node

    # -- ids ---------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A number never used before, for inodes, nodes, entries, data and log positions alike."""
        self.last_id += 1
        return self.last_id

    # -- rows to write -----------------------------------------------------------------------

    def keep(self, inode: Inode) -> None:
        """Journal this inode from now on, with all it hangs from."""
        i: Inode | None = inode
        while i is not None and not i.kept:
            i.kept = True
            self._gone_inodes.discard(i.ino)
            self._inodes[i.ino] = i
            if i.node is not None:
                self.keep_node(i.node)
            i = i.parent
        self._inodes[inode.ino] = inode

    def keep_node(self, node: Node) -> None:
        """Journal this node from now on, with the directories it is in."""
        n: Node | None = node
        while n is not None and not n.kept:
            n.kept = True
            self._gone_nodes.discard(n.id)
            self._nodes[n.id] = n
            n = n.parent
        self._nodes[node.id] = node

    def touch(self, inode: Inode) -> None:
        """The inode's row has changed, if it has one."""
        if inode.kept:
            self._inodes[inode.ino] = inode

    def touch_node(self, node: Node) -> None:
        """The node's row has changed, if it has one."""
        if node.kept:
            self._nodes[node.id] = node

    def touch_entry(self, entry: Entry) -> None:
        """The entry's row has changed."""
        self._entries[entry.id] = entry

    def shift_to_end(self, entries: list[Entry]) -> None:
        """Move entries (in their order) behind the whole log. Cheap: there may be 10,000 of them."""
        log, pos = self.log, self.last_id + 1
        if len(entries) >= MANY:
            self._shifted.append((pos, json.dumps([e.id for e in entries])))
        else:
            self._moved.update((e.id, e) for e in entries)
        # Close together, wherever they come from: renames in turns would else spread the log without bound.
        for e in entries:
            e.pos = pos
            pos += 1
            log.move_to_end(e.id)
        self.last_id = pos - 1

    def record_sent(self, entry: Entry, digest: Digest) -> None:
        """One more chunk of the entry is on the tier."""
        entry.sent[digest.offset] = digest
        self._sent.append((entry.id, digest.offset, digest.length, digest.xxh3))

    def forget_sent(self, entry: Entry) -> None:
        """The entry's bytes must be sent again."""
        entry.sent.clear()
        self.abandon(entry)
        self._sent = [row for row in self._sent if row[0] != entry.id]
        self._unsent.add(entry.id)
        self.touch_entry(entry)

    def abandon(self, entry: Entry) -> None:
        """The entry's upload will not be published."""
        if entry.upload is not None:
            if entry.upload != INLINE:
                self.abandoned.append((entry.id, entry.upload))
            entry.upload = None

    def take_abandoned(self) -> list[Upload]:
        """Uploads whose hidden bytes may be removed from the tier (`Tier.abandon`), once the journal
        has the changes. Of an entry that is to be sent again only when it is over: its new upload
        may lie under the same handle."""
        over = [u for id, u in self.abandoned if id not in self.log]
        self.abandoned = [(id, u) for id, u in self.abandoned if id in self.log]
        return over

    def drop_entry_row(self, entry: Entry) -> None:
        """The entry is over."""
        self._entries.pop(entry.id, None)
        self._moved.pop(entry.id, None)
        self._gone_entries.add(entry.id)

    def drop_node(self, node: Node) -> None:
        """The node is over."""
        self.nodes.pop(node.id, None)
        self.graves.pop(node.id, None)
        self.doubtful.pop(node.id, None)
        self._nodes.pop(node.id, None)
        if node.kept:
            node.kept = False
            self._gone_nodes.add(node.id)

    def unkeep(self, inode: Inode) -> None:
        """The tier has all there is to know of this file: no journal row needed."""
        self._inodes.pop(inode.ino, None)
        if inode.kept:
            inode.kept = False
            self._gone_inodes.add(inode.ino)
        node = inode.node
        if node is not None and node.kept:
            self._nodes.pop(node.id, None)
            node.kept = False
            self._gone_nodes.add(node.id)

    def drop_inode(self, inode: Inode) -> None:
        """The inode is over."""
        self.inodes.pop(inode.ino, None)
        self.attr_queue.pop(inode.ino, None)
        self.held_inodes.pop(inode.ino, None)
        self._inodes.pop(inode.ino, None)
        if inode.kept:
            inode.kept = False
            self._gone_inodes.add(inode.ino)

    @property
    def changed(self) -> bool:
        """Whether `take_changes` would return anything."""
        return bool(
            self._inodes or self._nodes or self._entries or self._sent or self._moved or self._shifted
            or self._gone_inodes or self._gone_nodes or self._gone_entries or self._unsent
        )  # fmt: skip

    def take_changes(self) -> Changes:
        """Everything changed since the last call, as one transaction."""
        mark = 0
        if self.last_id > self._saved_id:
            mark = self._saved_id = self.last_id + ID_STEP
        changes = Changes(
            inodes=[inode_row(i) for i in self._inodes.values()],
            nodes=[node_row(n) for n in self._nodes.values()],
            entries=[entry_row(e) for e in self._entries.values()],
            sent=[r for r in self._sent if r[0] not in self._gone_entries] if self._sent else [],
            shifted=self._shifted,
            moved=[(e.pos, e.id) for e in self._moved.values() if e.id not in self._entries]
            if self._moved
            else [],
            gone_inodes=list(self._gone_inodes),
            gone_nodes=list(self._gone_nodes),
            gone_entries=list(self._gone_entries),
            unsent=list(self._unsent),
            last_id=mark,
        )
        self._inodes, self._nodes, self._entries, self._moved = {}, {}, {}, {}
        self._sent, self._shifted = [], []
        self._gone_inodes, self._gone_nodes = set(), set()
        self._gone_entries, self._unsent = set(), set()
        return changes

    def put_back(self, c: Changes) -> None:
        """The journal could not be written: these changes are still to be committed.

        As far as they are still true: more may have changed since `take_changes`.
        """
        log = self.log
        for r in c.inodes:
            if r[0] in self.inodes:
                self.touch(self.inodes[r[0]])
        for r in c.nodes:
            if r[0] in self.nodes:
                self.touch_node(self.nodes[r[0]])
        for r in c.entries:
            if r[0] in log:
                self._entries[r[0]] = log[r[0]]
        self._moved |= {id: log[id] for _, id in c.moved if id in log}
        if c.shifted:  # positions do not say any more what is to be shifted: name all
            self._moved = dict(log)
            self._shifted = []
        sent = [r for r in c.sent if r[0] in log and log[r[0]].sent.get(r[1]) == Digest(*r[1:])]
        self._sent = sent + self._sent
        self._gone_inodes.update(i for i in c.gone_inodes if i not in self.inodes or not self.inodes[i].kept)
        self._gone_nodes.update(n for n in c.gone_nodes if n not in self.nodes or not self.nodes[n].kept)
        self._gone_entries.update(c.gone_entries)
        self._unsent.update(c.unsent)
        if c.last_id:
            self._saved_id = 0

    # -- data --------------------------------------------------------------------------------

    def ref_data(self, data: int) -> None:
        """One more user of a data id."""
        if data:
            self.data_refs[data] = self.data_refs.get(data, 0) + 1

    def unref_data(self, data: int) -> None:
        """One user less; the last one frees it."""
        if not data:
            return
        left = self.data_refs[data] - 1
        if left:
            self.data_refs[data] = left
        else:
            del self.data_refs[data]
            self.freed.append(data)

    def set_data(self, inode: Inode, data: int) -> None:
        """Give the inode other content."""
        if data != inode.data:
            self.ref_data(data)
            old, inode.data = inode.data, data
            self.unref_data(old)
            self.touch(inode)

    def take_freed(self) -> list[int]:
        """Data ids that may be deleted, once the journal has the changes."""
        freed, self.freed = self.freed, []
        return freed


def inode_row(i: Inode) -> Row:
    """The journal row of an inode. Content is named only while the tier does not have it."""
    return (
        i.ino, int(i.kind), i.parent.ino if i.parent else 0, i.name, i.mode, i.uid, i.gid, i.atime_ns,
        i.mtime_ns, i.ctime_ns, i.size, i.target, i.node.id if i.node else 0, i.data if i.local else 0,
        int(i.unsealed), i.close_mark, i.held, i.held_at, min(i.attr_dirty, 1),
        json.dumps([[k.hex(), v.hex()] for k, v in i.xattrs.items()]) if i.xattrs else "",
    )  # fmt: skip


def node_row(n: Node) -> Row:
    """The journal row of a node."""
    return (
        n.id, int(n.kind), n.parent.id if n.parent else 0, n.name, int(n.present), n.token, n.ident,
        n.inode.ino if n.inode else 0, n.dead_pos, n.held_by.ino if n.held_by else 0,
        json.dumps(dataclasses.astuple(n.setting)) if n.setting else "",
    )  # fmt: skip


def entry_row(e: Entry) -> Row:
    """The journal row of a log entry."""
    return (
        e.id, int(e.kind), e.pos, e.inode.ino, e.node.id, e.dir.ino, e.name, int(e.frozen), e.stuck,
        e.stuck_at, e.data, e.length, e.mtime_ns, e.atime_ns, e.sealed_at, e.first_at, e.chunk,
        e.upload.handle if e.upload else None, e.upload.ident if e.upload else None,
    )  # fmt: skip


def load(rows: Rows, attrs: Attrs) -> State:
    """The state that a journal describes, with nothing changed and nothing open."""
    state = State(attrs)
    state.last_id = state._saved_id = max(rows.last_id, ROOT)
    for r in rows.inodes:
        i = state.inodes.get(r[0]) or Inode(r[0], Kind(r[1]), attrs)
        (i.name, i.mode, i.uid, i.gid, i.atime_ns, i.mtime_ns, i.ctime_ns, i.size, i.target) = r[3:12]
        i.data, i.unsealed, i.close_mark = r[13], Unsealed(r[14]), r[15]
        i.held, i.held_at, i.attr_dirty = r[16], r[17], r[18]
        if r[19]:
            i.xattrs = {bytes.fromhex(k): bytes.fromhex(v) for k, v in json.loads(r[19])}
        i.kept = True
        state.inodes[i.ino] = i
        state.ref_data(i.data)
        if i.attr_dirty:
            state.attr_queue[i.ino] = i
        if i.held:
            state.held_inodes[i.ino] = i
    for r in rows.nodes:
        n = state.nodes.get(r[0]) or Node(r[0], Kind(r[1]))
        n.name, n.present, n.token, n.ident, n.dead_pos = r[3], bool(r[4]), r[5], r[6], r[8]
        n.kept = True
        state.nodes[n.id] = n
        if r[10]:
            n.setting = Attrs(*json.loads(r[10]))
            state.doubtful[n.id] = n
    for r in rows.inodes:
        i = state.inodes[r[0]]
        i.parent = state.inodes.get(r[2])
        i.node = state.nodes.get(r[12])
        if i.parent is not None and i.name is not None:
            i.parent.children[i.name] = i
    for r in sorted(rows.nodes, key=lambda r: int(r[8])):
        n = state.nodes[r[0]]
        n.parent = state.nodes.get(r[2])
        n.inode = state.inodes.get(r[7])
        n.held_by = state.inodes.get(r[9])
        if n.present and n.parent is not None:
            n.parent.children[n.name] = n
        if n.dead_pos:
            state.graves[n.id] = n
        if n.held_by is not None:
            n.held_by.holding.append(n)
    state.root.node = state.root_node
    for r in sorted(rows.entries, key=lambda r: int(r[2])):
        e = Entry(r[0], EntryKind(r[1]), state.inodes[r[3]], state.nodes[r[4]], state.inodes[r[5]], r[6])
        e.pos, e.frozen, e.stuck, e.stuck_at, e.data = r[2], bool(r[7]), r[8], r[9], r[10]
        e.length, e.mtime_ns, e.atime_ns, e.sealed_at, e.first_at, e.chunk = r[11:17]
        if r[17] is not None:
            e.upload = Upload(r[17], r[18])
        state.log[e.id] = e
        state.ref_data(e.data)
        key = (e.dir.ino, e.name)
        state.targets[key] = state.targets.get(key, 0) + 1
        state.busy_dirs[e.dir.ino] = state.busy_dirs.get(e.dir.ino, 0) + 1
        e.inode.pending += 1
        e.node.pending += 1
        if e.kind in (EntryKind.PUT, EntryKind.LINK):
            e.inode.puts.append(e)
    for entry_id, offset, length, xxh3 in rows.sent:
        if entry_id in state.log:
            state.log[entry_id].sent[offset] = Digest(offset, length, xxh3)
    return state
