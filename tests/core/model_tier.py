"""A tier in memory: a tree of objects that executes `Op`s as `tiers/base.py` and the file tier do.

Contents are tuples of cells, one cell per MiB, each an int that no other write ever used, so that a
torn, stale or half-written object can't look like a good one. Other writers act through `foreign_*`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckptfs.core.content import MIB
from ckptfs.tiers.base import (
    RESERVED,
    Applied,
    Attrs,
    Failed,
    Found,
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Put,
    Remove,
    SetAttrs,
    Trouble,
    Upload,
)

Cells = tuple[int, ...]
NOBODY = Attrs(0o755, 0, 0, 0, 0)


def xxh3(cells: Cells) -> bytes:
    """Stands for the digest of a chunk."""
    return repr(cells).encode()


@dataclass
class Obj:
    """One visible object. `version` names its content for ever: ours `v<id>`, links `L:<target>`,
    other writers' `F<n>`; directories have none."""

    kind: Kind
    id: int
    attrs: Attrs
    version: str = ""
    cells: Cells = ()
    target: bytes = b""
    generation: int = 0
    children: dict[bytes, Obj] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """Changes with content and times, except for a directory."""
        return f"d{self.id}" if self.kind == Kind.DIR else f"{self.id}.{self.generation}"

    @property
    def ident(self) -> str:
        """Survives a rename."""
        return str(self.id)

    def found(self, name: bytes) -> Found:
        """As a listing shows it."""
        size = len(self.cells) * MIB if self.kind == Kind.FILE else len(self.target)
        return Found(name, self.kind, size, self.attrs, self.token, self.target, self.ident)


@dataclass
class Hidden:
    """An upload that no reader sees."""

    ident: str
    version: str
    chunks: dict[int, Cells] = field(default_factory=dict)


class ModelTier:
    """`conflicts` holds what W3 kept, `removed` (version, path) of every object a Remove took,
    `versions` the content that an identity ever stood for."""

    def __init__(self) -> None:
        self.root = Obj(Kind.DIR, 1, NOBODY)
        self.hidden: dict[str, Hidden] = {}
        self.conflicts: list[Obj] = []
        self.removed: list[tuple[str, bytes]] = []
        self.versions: dict[str, str] = {}
        self._ids = 1

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    # -- looking -----------------------------------------------------------------------------

    def at(self, path: bytes) -> Obj | None:
        """The object at a path."""
        obj = self.root
        for part in path.split(b"/") if path else ():
            child = obj.children.get(part)
            if child is None:
                return None
            obj = child
        return obj

    def listdir(self, path: bytes) -> list[Found] | None:
        """A directory's content; None when there is no such directory."""
        obj = self.at(path)
        if obj is None or obj.kind != Kind.DIR:
            return None
        return [o.found(n) for n, o in obj.children.items() if not n.startswith(RESERVED)]

    def stat(self, path: bytes) -> Found | None:
        """One object."""
        obj = self.at(path)
        return None if obj is None else obj.found(path.rsplit(b"/", 1)[-1])

    def visible(self) -> dict[bytes, Obj]:
        """Every object by path."""
        all_: dict[bytes, Obj] = {}

        def walk(prefix: bytes, obj: Obj) -> None:
            for name, child in obj.children.items():
                path = prefix + b"/" + name if prefix else name
                all_[path] = child
                walk(path, child)

        walk(b"", self.root)
        return all_

    # -- uploads -----------------------------------------------------------------------------

    def begin(self, version: str) -> Upload:
        """A hidden place."""
        upload = Upload(f"h{self._id()}", str(self._id()))
        self.hidden[upload.handle] = Hidden(upload.ident, version)
        return upload

    def send(self, upload: Upload, offset: int, cells: Cells) -> bytes | None:
        """The digest, None when the upload is gone."""
        hidden = self.hidden.get(upload.handle)
        if hidden is None:
            return None
        hidden.chunks[offset] = cells
        return xxh3(cells)

    def abandon(self, uploads: list[Upload]) -> None:
        """Remove hidden bytes."""
        for upload in uploads:
            self.hidden.pop(upload.handle, None)

    # -- ops ---------------------------------------------------------------------------------

    def apply(self, op: Op) -> Applied | Failed:
        """Execute one op; again is the same."""
        if isinstance(op, Put):
            return self._put(op)
        if isinstance(op, Link):
            return self._link(op)
        if isinstance(op, Mkdir):
            return self._mkdir(op)
        if isinstance(op, Move):
            return self._move(op)
        if isinstance(op, Remove):
            return self._remove(op)
        return self._set_attrs(op)

    def is_done(self, op: Op) -> bool:
        """Whether an earlier try did it (it can't be refused any more)."""
        if isinstance(op, Put):
            return op.upload.handle not in self.hidden
        if isinstance(op, Move):
            dst = self.at(op.dst)
            return dst is not None and dst.ident == op.ident
        there = self.at(op.path)
        if isinstance(op, Link):
            return there is not None and there.target == op.target
        if isinstance(op, Mkdir):
            return there is not None and there.kind == Kind.DIR
        return there is None

    def _parent(self, path: bytes) -> tuple[Obj, bytes, bool]:
        """Directory of a path, made with its parents when missing, the name, and whether something
        foreign had to be kept."""
        obj, conflict = self.root, False
        *dirs, name = path.split(b"/")
        for part in dirs:
            child = obj.children.get(part)
            if child is None or child.kind != Kind.DIR:
                if child is not None:
                    self.conflicts.append(child)
                    conflict = True
                child = obj.children[part] = Obj(Kind.DIR, self._id(), NOBODY)
            obj = child
        return obj, name, conflict

    def _make_way(self, parent: Obj, name: bytes, expected: str | None) -> bool:
        """W3: True when something unexpected was kept."""
        there = parent.children.get(name)
        if there is None:
            return False
        del parent.children[name]
        if there.token == expected and not there.children:
            return False
        self.conflicts.append(there)
        return True

    def _put(self, op: Put) -> Applied | Failed:
        hidden = self.hidden.get(op.upload.handle)
        if hidden is None:
            there = self.at(op.path)
            if there is not None and there.ident == op.upload.ident:
                return Applied(there.token, there.ident)
            return Failed(Trouble.REDO, "the upload is gone")
        cells: Cells = ()
        for offset in sorted(hidden.chunks):
            assert offset == len(cells) * MIB, "chunks with holes or overlaps"
            cells += hidden.chunks[offset]
        assert len(cells) * MIB == op.size, "published incomplete"
        assert hidden.version == op.version
        assert [d.xxh3 for d in op.digests] == [xxh3(hidden.chunks[o]) for o in sorted(hidden.chunks)]
        parent, name, conflict = self._parent(op.path)
        conflict |= self._make_way(parent, name, op.expected)
        del self.hidden[op.upload.handle]
        obj = Obj(Kind.FILE, int(hidden.ident), op.attrs, op.version, cells)
        parent.children[name] = obj
        self.versions[obj.ident] = obj.version
        return Applied(obj.token, obj.ident, conflict)

    def _link(self, op: Link) -> Applied:
        parent, name, conflict = self._parent(op.path)
        there = parent.children.get(name)
        if there is None or there.target != op.target:
            conflict |= self._make_way(parent, name, op.expected)
            version = "L:" + op.target.decode()
            there = Obj(Kind.LINK, self._id(), op.attrs, version, (), op.target)
            parent.children[name] = there
            self.versions[there.ident] = version
        there.attrs = op.attrs
        return Applied(there.token, there.ident, conflict)

    def _mkdir(self, op: Mkdir) -> Applied:
        parent, name, conflict = self._parent(op.path)
        there = parent.children.get(name)
        if there is not None and there.kind != Kind.DIR:
            self.conflicts.append(there)
            there, conflict = None, True
        if there is None:
            there = parent.children[name] = Obj(Kind.DIR, self._id(), op.attrs)
        there.attrs = op.attrs
        return Applied(there.token, there.ident, conflict)

    def _move(self, op: Move) -> Applied | Failed:
        if op.dst.startswith(op.src + b"/"):
            return Failed(Trouble.REFUSED, "into itself")
        there = self.at(op.src)
        if there is None or (there.kind, there.ident) != (op.kind, op.ident):
            done = self.at(op.dst)
            if done is not None and done.ident == op.ident:
                return Applied(done.token, done.ident)
            if there is None or not there.kind == op.kind == Kind.DIR:
                return Applied(conflict=True)
        src_parent, src_name, _ = self._parent(op.src)
        parent, name, conflict = self._parent(op.dst)
        if op.src != op.dst:
            conflict |= self._make_way(parent, name, op.expected)
            del src_parent.children[src_name]
            parent.children[name] = there
        return Applied(there.token, there.ident, conflict)

    def _remove(self, op: Remove) -> Applied:
        there = self.at(op.path)
        if there is None:
            return Applied()
        parent, name, _ = self._parent(op.path)
        if op.kind == there.kind == Kind.DIR:
            if not there.children:
                del parent.children[name]
            return Applied()
        if there.kind != op.kind or there.token != op.expected:
            return Applied(conflict=True)
        del parent.children[name]
        self.removed.append((there.version, op.path))
        return Applied()

    def _set_attrs(self, op: SetAttrs) -> Applied:
        there = self.at(op.path)
        if there is None:
            return Applied()
        again = (
            op.expected is not None and op.expected.split(".")[0] == there.ident and there.attrs == op.attrs
        )
        if there.kind != op.kind or (there.kind != Kind.DIR and there.token != op.expected and not again):
            return Applied(conflict=True)
        if there.attrs != op.attrs:
            there.generation += 1
        there.attrs = op.attrs
        return Applied(there.token, there.ident)

    # -- other writers -----------------------------------------------------------------------

    def foreign_put(self, path: bytes, version: str, cells: Cells) -> Obj | None:
        """Another writer makes or replaces a file; returns what it replaced."""
        parent, name, _ = self._parent(path)
        old = parent.children.get(name)
        obj = Obj(Kind.FILE, self._id(), replace(NOBODY, mode=0o600), version, cells)
        parent.children[name] = obj
        self.versions[obj.ident] = version
        return old

    def foreign_mkdir(self, path: bytes) -> None:
        """Another writer makes a directory."""
        parent, name, _ = self._parent(path)
        parent.children[name] = Obj(Kind.DIR, self._id(), NOBODY)

    def foreign_remove(self, path: bytes) -> Obj:
        """Another writer removes an object."""
        parent, name, _ = self._parent(path)
        return parent.children.pop(name)
