"""The world with an object store as its tier: uploads are bound to their path (R5), small versions
travel with their publishing."""

from __future__ import annotations

from dataclasses import replace

from ckptfs.core import Core, EntryKind
from ckptfs.core.content import MIB
from ckptfs.core.plan import Begin, Job
from ckptfs.core.state import load
from ckptfs.tiers.base import (
    INLINE,
    UNASKED,
    Applied,
    Failed,
    Kind,
    Link,
    Move,
    Op,
    Put,
    Remove,
    Traits,
    Trouble,
    Upload,
    bound_handle,
    bound_path,
)

from .model_tier import Cells, Hidden, ModelTier, Obj
from .world import ROOT_ATTRS, Question, World

TRAITS = Traits(inline_bytes=MIB, bound=True)


class BoundTier(ModelTier):
    """`changed` tells when a path was last written or removed, by the tier's own count of changes: an
    upload created before that is discarded by some stores, and reported as done."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: dict[str, Cells] = {}
        self.changed: dict[bytes, int] = {}
        self.created: dict[str, int] = {}
        self._count = 0

    def begin_at(self, version: str, path: bytes) -> Upload:
        """An upload for one path."""
        upload = Upload(bound_handle(path, str(self._id())), str(self._id()))
        self.hidden[upload.handle] = Hidden(upload.ident, version)
        self.created[upload.handle] = self._count
        return upload

    def apply(self, op: Op) -> Applied | Failed:
        if isinstance(op, Put):
            if op.upload == INLINE:
                answer = self._put_inline(op)
            elif op.upload.handle in self.hidden and bound_path(op.upload) != op.path:
                return Failed(Trouble.REDO, "the upload is for another path")
            else:
                if op.upload.handle in self.hidden:
                    made, last = self.created[op.upload.handle], self.changed.get(op.path, 0)
                    assert made >= last, f"R5: the upload of {op.path!r} is older than what is there"
                answer = super().apply(op)
        else:
            touched = self._touched(op)
            answer = super().apply(op)
            if isinstance(answer, Applied):
                self._touch(touched)
            return answer
        if isinstance(answer, Applied):
            self._touch({op.path})
        return answer

    def _touch(self, paths: set[bytes]) -> None:
        self._count += 1
        self.changed.update(dict.fromkeys(paths, self._count))

    def _touched(self, op: Op) -> set[bytes]:
        """Paths of files and links that an op writes or removes."""
        if isinstance(op, Link):
            return {op.path}
        if isinstance(op, Remove):
            there = self.at(op.path)
            return {op.path} if there is not None and there.kind != Kind.DIR else set()
        if isinstance(op, Move):
            found = {op.src, op.dst}
            for path in self.visible():
                if path.startswith(op.src + b"/"):
                    found |= {path, op.dst + path[len(op.src) :]}
            return found
        return set()

    def _put_inline(self, op: Put) -> Applied:
        there = self.at(op.path)
        if there is not None and there.version == op.version:
            return Applied(there.token, there.ident)
        parent, name, conflict = self._parent(op.path)
        conflict |= self._make_way(parent, name, op.expected)
        cells = self.inline[op.version]
        assert len(cells) * MIB == op.size
        obj = Obj(Kind.FILE, self._id(), op.attrs, op.version, cells)
        parent.children[name] = obj
        self.versions[obj.ident] = obj.version
        return Applied(obj.token, obj.ident, conflict)

    def is_done(self, op: Op) -> bool:
        if isinstance(op, Put) and op.upload == INLINE:
            there = self.at(op.path)
            return there is not None and there.version == op.version
        return super().is_done(op)


class BoundWorld(World):
    """`World` with a `BoundTier`."""

    tier: BoundTier

    def __init__(self) -> None:
        super().__init__()
        self.tier = BoundTier()

    def _load(self) -> Core:
        rows = self.journal.load()
        return Core(load(rows, ROOT_ATTRS), settle_s=self.settle_s, chunk_bytes=MIB, traits=TRAITS)

    def do_job(self, job: Job, fate: str = "ok") -> None:
        if isinstance(job, Begin) and fate != "fail":
            self.jobs.remove(job)
            self.core.planner.begun(job.entry, self.tier.begin_at(job.entry.version, job.path))
            self.commit()
        else:
            super().do_job(job, fate)

    def _look(self, q: Question) -> None:
        """Listings leave out what they need not say."""
        super()._look(q)
        if q.name is not None or not isinstance(q.answer, list):
            return
        familiar = self.core.tier.familiar(q.dir)
        q.answer = [
            replace(f, attrs=UNASKED, target=b"", ident="")
            if f.kind != Kind.DIR
            and f.name in familiar
            and (familiar[f.name] is None or familiar[f.name] == (f.token, f.kind))
            else f
            for f in q.answer
        ]

    def publish_take(self, limit: int = 64) -> bool:
        taken = super().publish_take(limit)
        if taken:
            for e in self.core.state.log.values():
                if e.kind == EntryKind.PUT and e.frozen and e.upload == INLINE:
                    self.tier.inline[e.version] = self._staged(e, 0, e.length)
        return taken
