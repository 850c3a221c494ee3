"""One ordered batch of ops on an object tier."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from ckptfs.tiers.base import (
    Applied,
    Failed,
    Kind,
    Link,
    Mkdir,
    Move,
    Op,
    Outcome,
    Put,
    Remove,
    SetAttrs,
    TierError,
    Trouble,
)
from ckptfs.tiers.s3_conflicts import Conflicts
from ckptfs.tiers.s3_copy import Copier
from ckptfs.tiers.s3_move import Mover
from ckptfs.tiers.s3_places import Batch, Places, above
from ckptfs.tiers.s3_put import Publisher
from ckptfs.tiers.s3_remove import Remover
from ckptfs.tiers.s3_replay import DIR
from ckptfs.tiers.s3_site import Site


class Applier:
    """Applies batches. What it remembers between them is in `Places`, and only saves requests."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._places = Places(site)
        self.copier = Copier(site)

    def apply(self, ops: Sequence[Op]) -> Outcome:
        """Apply the ops in order, stopping at the first failure.

        Each request is durable when it is answered. What is merely superfluous (markers of directories
        that are not empty any more, records of what is replaced) is deleted at the end.
        """
        return _Run(self._site, self._places, self.copier, ops).run()


class _Run:
    """State of one `apply`."""

    def __init__(self, site: Site, places: Places, copier: Copier, ops: Sequence[Op]) -> None:
        self._site = site
        self._places = places
        self._ops = ops
        self._batch = Batch(site, places)
        self._conflicts = Conflicts(site, places, copier)
        self._publisher = Publisher(site, places, self._conflicts, self._batch)
        self._mover = Mover(site, places, self._conflicts, copier, self._batch)
        self._remover = Remover(site, places, self._batch)
        self._one_by_one = False
        """A removal was refused in this batch."""
        self._unmarked: dict[bytes, int] = {}
        """Directories that the next op makes visible, by the index of their `Mkdir`."""

    def run(self) -> Outcome:
        applied: list[Applied] = []
        failure: Failed | None = None
        while len(applied) < len(self._ops):
            index = len(applied)
            op = self._ops[index]
            try:
                self._check(op)
                if isinstance(op, Remove):
                    applied += self._remove(index)
                elif isinstance(op, SetAttrs):
                    applied += self._set_all(index)
                else:
                    applied.append(self._apply(index, op))
            except TierError as exc:
                failure = _failed(exc)
                break
            if index not in self._unmarked.values() and isinstance(op, (Put, Link, Mkdir)):
                for parent in above(op.path):
                    self._unmarked.pop(parent, None)
        for path, index in self._unmarked.items():
            # What was to make it visible did not come.
            op = self._ops[index]
            assert isinstance(op, Mkdir)
            try:
                self._places.put_marker(path, op.attrs)
            except TierError as exc:
                failure = _failed(exc)
                del applied[index:]
                break
        self._batch.settle()
        return Outcome(tuple(applied), failure)

    def _check(self, op: Op) -> None:
        for path in (op.src, op.dst) if isinstance(op, Move) else (op.path,):
            if path:
                self._site.keys.key(path)
            elif not isinstance(op, (Mkdir, SetAttrs)):
                raise TierError(Trouble.REFUSED, "the tier's root cannot be replaced", errno.EBUSY)

    def _apply(self, index: int, op: Op) -> Applied:
        rest = self._ops[index + 1 :]
        if isinstance(op, Put):
            return self._publisher.put(op, rest)
        if isinstance(op, Link):
            return self._publisher.link(op, rest)
        if isinstance(op, Mkdir):
            return self._mkdir(index, op)
        if isinstance(op, Move):
            return self._mover.move(op, rest)
        raise AssertionError(op)

    def _remove(self, index: int) -> list[Applied]:
        """All removals up to the next op that is none: they may be applied in any order (R3)."""
        end = index
        while end < len(self._ops) and isinstance(self._ops[end], Remove):
            end += 1
        removals = [op for op in self._ops[index:end] if isinstance(op, Remove)]
        if not self._one_by_one:
            try:
                for op in removals:
                    self._check(op)
                return self._remover.remove(removals, self._ops[end:])
            except TierError as exc:
                if exc.trouble is not Trouble.REFUSED:
                    raise
                self._one_by_one = True  # to find out which is refused
        return self._remover.remove(removals[:1], self._ops[index + 1 :])

    def _set_all(self, index: int) -> list[Applied]:
        """All changes of attributes up to the next op that is none, or about the same path: at once."""
        run: list[SetAttrs] = []
        paths: set[bytes] = set()
        for op in self._ops[index:]:
            if not isinstance(op, SetAttrs) or op.path in paths:
                break
            run.append(op)
            paths.add(op.path)

        def one(op: SetAttrs) -> Applied | TierError:
            try:
                self._check(op)
                return self._set_attrs(op)
            except TierError as exc:
                return exc

        answers: list[Applied] = []
        for answer in self._site.each(one, run):
            if isinstance(answer, TierError):
                if not answers:
                    raise answer
                break  # it is asked for again, alone or as the first
            answers.append(answer)
        return answers

    def _mkdir(self, index: int, op: Mkdir) -> Applied:
        """Make or adopt a directory. Its record comes first: nobody sees it with other attributes."""
        site, path = self._site, op.path
        if not path:
            return self._set_attrs(SetAttrs(b"", Kind.DIR, op.attrs, None))
        there = site.objects.head(path)
        conflict = there is not None
        if there is not None:
            # Deleted before the marker is there: to some stores `d` and `d/` are one.
            self._conflicts.keep_away(path)
        site.attrs.put(path, Kind.DIR, "", op.attrs)
        known = self._places.look(path)
        if known.alive:
            # It may have been emptied by others since it was looked at.
            self._places.forget(path)
            known = self._places.look(path)
        self._places.is_sub(path)
        if not known.alive:
            if self._filled_next(index, path):
                self._unmarked[path] = index
            else:
                self._mark(op)
        self._batch.entered(path)
        return Applied(DIR, DIR, conflict)

    def _mark(self, op: Mkdir) -> None:
        try:
            self._places.put_marker(op.path, op.attrs)
        except TierError:
            if not self._conflicts.clear_above(op.path):
                raise
            self._places.put_marker(op.path, op.attrs)

    def _filled_next(self, index: int, path: bytes) -> bool:
        """Whether the next op puts something in, so that no other becomes visible before it does (R2)."""
        following = self._ops[index + 1] if index + 1 < len(self._ops) else None
        return isinstance(following, (Put, Link, Mkdir)) and following.path.startswith(path + b"/")

    def _set_attrs(self, op: SetAttrs) -> Applied:
        """Late attributes go to the record, valid for the object with this token."""
        site = self._site
        if op.kind is Kind.DIR:
            if op.path and not site.objects.is_dir(op.path):
                theirs = site.objects.head(op.path) is not None
                return Applied(conflict=theirs)
            site.attrs.put(op.path, Kind.DIR, "", op.attrs)
            return Applied(DIR, DIR)
        there = site.objects.head(op.path)
        if there is None:
            return Applied()
        if there.kind is not op.kind or not site.is_expected(op.path, there, op.expected):
            return Applied(conflict=True)
        site.attrs.put(op.path, op.kind, there.token, op.attrs)
        return Applied(there.token, there.ident)


def _failed(exc: TierError) -> Failed:
    """What was looked at and is another object by now is to be tried again."""
    trouble = Trouble.DOWN if exc.trouble in (Trouble.CHANGED, Trouble.CORRUPT) else exc.trouble
    return Failed(trouble, exc.message, exc.errno)
