"""Removing objects from an object tier: many at once, since their order does not matter (R3)."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.tiers.base import Applied, Kind, Link, Op, Put, Remove
from ckptfs.tiers.s3_objects import Seen
from ckptfs.tiers.s3_places import Batch, Places
from ckptfs.tiers.s3_replay import ident_of
from ckptfs.tiers.s3_site import Site


class Remover:
    """Removals of one batch."""

    def __init__(self, site: Site, places: Places, batch: Batch) -> None:
        self._site = site
        self._places = places
        self._batch = batch

    def remove(self, ops: Sequence[Remove], rest: Sequence[Op]) -> list[Applied]:
        """Apply removals that follow each other; `rest` is what comes after them.

        What another writer has there stays (W3), as do directories with something in them (W4). A
        directory that becomes empty, and is not removed itself, gets a marker first.
        """
        site = self._site
        objects = [op.path for op in ops if op.kind is not Kind.DIR]
        seen = dict(zip(objects, site.each(site.objects.head, objects), strict=True))
        later = frozenset(ident_of(op, site.uuid) for op in rest if isinstance(op, (Put, Link)))
        answers: list[Applied] = []
        dying: dict[str, bytes] = {}
        dead: list[tuple[bytes, Seen]] = []
        for op in ops:
            if op.kind is Kind.DIR:
                dying[site.keys.dir(op.path)] = op.path
                answers.append(Applied())
                continue
            there = seen[op.path]
            if there is None:
                answers.append(Applied())
            elif there.kind is not op.kind or not site.is_expected(op.path, there, op.expected):
                answers.append(Applied(conflict=there.ident not in later))
            else:
                dying[site.keys.key(op.path)] = op.path
                dead.append((op.path, there))
                answers.append(Applied())
        gone = {op.path for op in (*ops, *rest) if isinstance(op, Remove) and op.kind is Kind.DIR}
        parents = [path.rpartition(b"/")[0] for path in dying.values()]
        self._places.keep_alive([parent for parent in parents if parent not in gone], dying.keys())
        site.delete(list(dying))
        for op in ops:
            if op.kind is Kind.DIR:
                self._places.forget(op.path)
        self._discard(ops, dead)
        return answers

    def _discard(self, ops: Sequence[Remove], dead: Sequence[tuple[bytes, Seen]]) -> None:
        """What was recorded about the objects; it is deleted at leisure."""
        site, garbage = self._site, self._batch.garbage
        for op in ops:
            if op.kind is Kind.DIR:
                garbage[site.attrs.key(op.path)] = None
        recorded = {
            parent: self._any_record(parent) for parent in {path.rpartition(b"/")[0] for path, _ in dead}
        }
        for path, there in dead:
            if recorded[path.rpartition(b"/")[0]]:
                garbage[site.attrs.key(path)] = None
            self._batch.drop_manifest(there)

    def _any_record(self, directory: bytes) -> bool:
        """Whether anything directly in a directory has late attributes; usually nothing has."""
        prefix = self._site.attrs.key(directory + b"/" if directory else b"")
        return self._site.anything(prefix)
