"""The records of the core: inodes (what the mount shows), nodes (what the tier holds), entries (the log).

Names and data are separate. An `Inode` is a file, directory or symlink of the mount. A `Node` is
one object of the tier, present or about to be. An `Entry` is one step that turns the tier's tree
into the mount's. Staged bytes are named by a data id (an int); the core never sees them.
"""

from __future__ import annotations

import enum

from ckptfs.tiers.base import INLINE, Attrs, Digest, Kind, Upload

ROOT = 1
"""Inode number of the mount's root, and id of the tier root's node."""


def to_ns(seconds: float) -> int:
    """Nanoseconds of a time given in seconds: whole microseconds, which a float holds exactly."""
    return round(seconds * 1e6) * 1000


class EntryKind(enum.IntEnum):
    """Ordered log entries (R1). A REMOVE is a dead node instead, see `Node.dead_pos`."""

    PUT = 1
    LINK = 2
    MKDIR = 3
    MOVE = 4


class Unsealed(enum.IntEnum):
    """What was done to a file's content since its last seal."""

    NO = 0
    APPENDED = 1
    """Only bytes at or beyond the sealed length were written."""
    REWRITTEN = 2
    """Created, truncated or written below the sealed length."""


class Inode:
    """A file, directory or symlink of the mount.

    `parent` and `name` are None once unlinked ("dead"); a dead inode lives on while it is open or
    an entry still needs it. `node` is the tier object holding its last published content (for a
    directory: its node, present or not). `data` is the id of its staged or cached content, 0 when
    only the tier has it. `puts` are its un-applied PUT or LINK entries, oldest first. `kept`
    inodes have a journal row. `opens`, `writers` and `lookups` are of this process only.
    """

    __slots__ = (
        "atime_ns", "attr_dirty", "children", "close_mark", "ctime_ns", "data", "dirty_at", "gid", "held",
        "held_at", "holding", "ino", "kept", "kind", "lookups", "mode", "mtime_ns", "name", "node", "opens",
        "parent", "pending", "puts", "size", "target", "uid", "unsealed", "writers", "xattrs",
    )  # fmt: skip

    def __init__(self, ino: int, kind: Kind, attrs: Attrs) -> None:
        self.ino = ino
        self.kind = kind
        self.parent: Inode | None = None
        self.name: bytes | None = None
        self.mode = attrs.mode
        self.uid = attrs.uid
        self.gid = attrs.gid
        self.atime_ns = attrs.atime_ns
        self.mtime_ns = attrs.mtime_ns
        self.ctime_ns = attrs.mtime_ns
        self.size = 0
        self.target = b""
        self.children: dict[bytes, Inode] = {}
        self.node: Node | None = None
        self.data = 0
        self.unsealed = Unsealed.NO
        self.dirty_at = 0.0
        """Since when it is unsealed (of this process only)."""
        self.close_mark = 0
        self.held = ""
        """Why it is not published ("interrupted", "skipped"...), empty when nothing holds it."""
        self.held_at = 0.0
        self.holding: list[Node] = []
        """Graves that may wait for this file's seal (`Node.held_by` tells which still do)."""
        self.puts: list[Entry] = []
        self.attr_dirty = 0
        """Generation of attribute changes the tier has not got; 0 when it has all."""
        self.pending = 0
        """Un-applied entries of this inode."""
        self.xattrs: dict[bytes, bytes] = {}
        self.kept = False
        self.opens = 0
        self.writers = 0
        self.lookups = 0

    @property
    def dead(self) -> bool:
        """Unlinked (the root never is)."""
        return self.parent is None and self.ino != ROOT

    @property
    def local(self) -> bool:
        """Has content or names that the tier does not have yet."""
        return bool(self.puts) or self.unsealed != Unsealed.NO or bool(self.held)

    @property
    def published(self) -> bool:
        """The tier has exactly this content."""
        return self.node is not None and self.node.present and not self.local

    def attrs(self) -> Attrs:
        """Attributes as they travel to the tier."""
        return Attrs(self.mode, self.uid, self.gid, self.atime_ns, self.mtime_ns)

    def path(self) -> bytes:
        """Path in the mount, without leading slash; of a dead inode: its number."""
        parts: list[bytes] = []
        inode: Inode | None = self
        while inode is not None and inode.ino != ROOT:
            if inode.name is None:
                parts.append(b"(unlinked inode %d)" % inode.ino)
                break
            parts.append(inode.name)
            inode = inode.parent
        return b"/".join(reversed(parts))

    def __repr__(self) -> str:
        return f"<Inode {self.ino} {self.path()!r}>"


class Node:
    """One object of the tier, at `parent`/`name` when `present`.

    A node not present belongs to an entry that has not been applied. `inode` is the inode it is
    the content of, None when dead. `dead_pos` > 0 makes it a late removal at that log position
    (R3); `held_by` keeps such a removal back until that inode is sealed (R6). `children` holds the
    present nodes known in a directory.
    """

    __slots__ = (
        "children", "dead_pos", "held_by", "id", "ident", "inode", "kept", "kind", "name", "parent",
        "pending", "present", "setting", "token",
    )  # fmt: skip

    def __init__(self, id: int, kind: Kind) -> None:
        self.id = id
        self.kind = kind
        self.parent: Node | None = None
        self.name = b""
        self.present = False
        self.token = ""
        self.ident = ""
        self.inode: Inode | None = None
        self.dead_pos = 0
        self.held_by: Inode | None = None
        self.setting: Attrs | None = None
        """Attributes handed to the tier without an answer yet: `token` may be out of date."""
        self.children: dict[bytes, Node] = {}
        self.pending = 0
        """Un-applied entries about this node."""
        self.kept = False

    def path(self) -> bytes:
        """Path on the tier, relative to its root."""
        parts: list[bytes] = []
        node: Node | None = self
        while node is not None and node.id != ROOT:
            parts.append(node.name)
            node = node.parent
        return b"/".join(reversed(parts))

    def __repr__(self) -> str:
        state = "dead" if self.dead_pos else "present" if self.present else "pending"
        return f"<Node {self.id} {self.path()!r} {state}>"


class Entry:
    """One ordered step (R1, R2): `node` appears as, or moves to, `dir`/`name`.

    For PUT it is also the version: `length` bytes of `data` as sealed. `frozen` entries have been
    handed to the tier and keep their target until the answer is known. `pos` orders the log.
    """

    __slots__ = (
        "atime_ns", "chunk", "data", "dir", "first_at", "frozen", "id", "in_flight", "inode", "kind",
        "length", "mtime_ns", "name", "node", "pos", "retries", "sealed_at", "sent", "stuck", "stuck_at",
        "upload",
    )  # fmt: skip

    def __init__(self, id: int, kind: EntryKind, inode: Inode, node: Node, dir: Inode, name: bytes) -> None:
        self.id = id
        self.kind = kind
        self.inode = inode
        self.node = node
        self.dir = dir
        self.name = name
        self.pos = 0
        self.frozen = False
        self.stuck = ""
        self.stuck_at = 0.0
        self.retries = 0
        self.data = 0
        self.length = 0
        self.mtime_ns = 0
        self.atime_ns = 0
        self.sealed_at = 0.0
        self.first_at = 0.0
        """When the oldest version that this one replaced unsent was sealed."""
        self.chunk = 0
        self.upload: Upload | None = None
        self.sent: dict[int, Digest] = {}
        self.in_flight: set[int] = set()

    @property
    def version(self) -> str:
        """Name of the version, unique in this mount for ever."""
        return f"v{self.id}"

    @property
    def untouched(self) -> bool:
        """No byte was sent and the tier was asked for nothing."""
        return not self.frozen and self.upload is None and not self.sent and not self.in_flight

    @property
    def complete(self) -> bool:
        """Every byte is on the tier, unseen, or travels with the publishing."""
        if self.kind != EntryKind.PUT or self.upload == INLINE:
            return True
        return self.upload is not None and not self.in_flight and self.sent_bytes == self.length

    @property
    def sent_bytes(self) -> int:
        """Bytes of the version that the tier has."""
        return sum(d.length for d in self.sent.values())

    def path(self) -> bytes:
        """Where it goes, as a mount path."""
        prefix = self.dir.path()
        return prefix + b"/" + self.name if prefix else self.name

    def attrs(self) -> Attrs:
        """Attributes to publish with it."""
        i = self.inode
        if self.kind == EntryKind.PUT:
            return Attrs(i.mode, i.uid, i.gid, self.atime_ns, self.mtime_ns)
        return i.attrs()

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.id}@{self.pos} {self.path()!r}>"
