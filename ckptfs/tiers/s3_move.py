"""Renames on an object tier: copies, then removals.

One object is copied, checked, and deleted under its old name. A directory (R8) is recorded first, in
`.ckptfs/moves/`; while that record is there, the new name may be incomplete. What was published last is
copied last: all but the newest few go many at once, a group after the other, the newest few one by one.
The old names go in reverse order. What a crash leaves is found by looking: an object that is at its new place
is not copied again, so the same op simply goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import xxhash

from ckptfs.tiers.base import Applied, Kind, Move, Op, TierError, Trouble
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.s3_client import Missing, Precondition
from ckptfs.tiers.s3_conflicts import Conflicts
from ckptfs.tiers.s3_copy import Copier
from ckptfs.tiers.s3_meta import IDENT, nanoseconds
from ckptfs.tiers.s3_objects import Seen
from ckptfs.tiers.s3_places import Batch, Places
from ckptfs.tiers.s3_records import is_ident
from ckptfs.tiers.s3_replay import DIR, landed, made_later
from ckptfs.tiers.s3_site import WAS, Listed, Site

_VERSION = re.compile(r".*/v([0-9]+)\Z")


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two answers of HeadObject describe copies of one object."""
    ident = ident_in(one)
    if int(one["ContentLength"]) != int(other["ContentLength"]) or ident != ident_in(other):
        return False
    return bool(ident) or one["ETag"] == other["ETag"]


def ident_in(head: Mapping[str, Any]) -> str:
    """The ident of an object, from its HeadObject."""
    return str(head.get("Metadata", {}).get(IDENT, ""))


def same_seen(one: Seen, other: Seen) -> bool:
    """Whether two objects are copies of one."""
    if one.size != other.size or one.kind is not other.kind or one.ident != other.ident:
        return False
    return bool(one.ident) or one.token == other.token


class Mover:
    """Renames of one batch."""

    def __init__(
        self, site: Site, places: Places, conflicts: Conflicts, copier: Copier, batch: Batch
    ) -> None:
        self._site = site
        self._places = places
        self._conflicts = conflicts
        self._copier = copier
        self._batch = batch

    def move(self, op: Move, rest: Sequence[Op]) -> Applied:
        """Rename an object or a directory; what another writer has at the new name is kept (W3)."""
        if op.kind is Kind.DIR:
            tree = TreeMove(self._site, self._places, self._conflicts, self._copier, self._batch, op)
            return tree.run(rest)
        return self._object(op, rest)

    def _object(self, op: Move, rest: Sequence[Op]) -> Applied:
        site = self._site
        there = site.objects.head(op.src)
        if there is None or there.kind is not op.kind or op.ident not in ("", there.ident):
            return self._was_moved(op, there, rest)
        if op.src == op.dst:
            return Applied(there.token, there.ident)
        self._batch.settle(op.dst)
        conflict = self._conflicts.clear(op.dst)
        at_dst = site.objects.head(op.dst)
        replaced = None
        if at_dst is None or not same_seen(there, at_dst):
            if at_dst is not None and not site.is_expected(op.dst, at_dst, op.expected):
                self._conflicts.keep(op.dst)
                conflict = True
            else:
                replaced = at_dst
            at_dst = self._copy(op, there)
        record = site.attrs.get(op.src, op.kind)
        if record is not None and record.about(there):
            site.attrs.put(op.dst, op.kind, at_dst.token, record.attrs)
        elif replaced is not None:
            self._batch.garbage[site.attrs.key(op.dst)] = None
        source = site.keys.key(op.src)
        self._places.keep_alive([op.src.rpartition(b"/")[0]], {source})
        now = site.objects.head(op.src)
        if now is not None and now.token == there.token:
            site.delete([source])
        if record is not None:
            self._batch.garbage[site.attrs.key(op.src)] = None
        if replaced is not None:
            self._batch.drop_manifest(replaced)
        self._batch.entered(op.dst)
        return Applied(at_dst.token, at_dst.ident, conflict)

    def _copy(self, op: Move, there: Seen) -> Seen:
        """Copy and check."""
        site, source, target = self._site, self._site.keys.key(op.src), self._site.keys.key(op.dst)
        head = site.raw(source)
        if head is None or str(head["ETag"]).strip('"') != there.token:
            raise TierError(Trouble.DOWN, f"{show(op.src)} was changed by another writer while it was moved")
        try:
            self._copier.copy(source, head, target)
        except (Precondition, Missing):
            raise
        except TierError:
            self._conflicts.clear(op.dst, remains=True)
            self._conflicts.clear_above(op.dst)
            self._copier.copy(source, head, target)
        now = site.objects.head(op.dst)
        if now is None or now.size != there.size or now.ident != there.ident:
            raise TierError(Trouble.DOWN, f"{show(op.dst)} is not what was copied there")
        return now

    def _was_moved(self, op: Move, at_src: Seen | None, rest: Sequence[Op]) -> Applied:
        """Moved by an earlier try, or removed or replaced by another writer, whose it stays."""
        site = self._site
        moved = at_src is None
        if op.ident:
            moved = landed(site.objects.head, site.uuid, op.dst, op.ident, rest)
        now = site.objects.head(op.dst) if moved else None
        if now is not None and now.kind is op.kind and op.ident in ("", now.ident):
            return Applied(now.token, now.ident)
        if moved and op.ident:
            return Applied("", op.ident)
        return Applied(conflict=True)


class TreeMove:
    """One rename of a directory. The numbers are class attributes for tests."""

    AT_ONCE = 16
    """Objects copied at the same time."""
    ALONE = 16
    """The newest ones, each copied after the one before is there."""

    def __init__(
        self, site: Site, places: Places, conflicts: Conflicts, copier: Copier, batch: Batch, op: Move
    ) -> None:
        self._site = site
        self._places = places
        self._conflicts = conflicts
        self._copier = copier
        self._batch = batch
        self._op = op
        self._from = site.keys.dir(op.src)
        self._to = site.keys.dir(op.dst)
        name = xxhash.xxh3_128_hexdigest(op.src + b"\0" + op.dst)
        self._record = site.keys.own("moves", f"{site.uuid}-{name}")
        self._resumed = False
        self._conflict = False

    def run(self, rest: Sequence[Op]) -> Applied:
        """Go on from wherever an earlier try got to."""
        site, op = self._site, self._op
        if op.src == op.dst:
            return Applied(DIR, DIR)
        self._batch.settle()
        self._resumed = site.raw(self._record) is not None
        items = self._to_move(rest)
        if not self._resumed:
            if not items:
                return self._was_moved(rest)
            self._make_room()
            self._note("copying")
        heads = self._heads(items)
        order = self._by_age([item for item in items if item.key in heads], heads)
        self._copy_all(order, heads)
        site.attrs.move(op.src, op.dst)
        if any(item.key != self._from for item in order):
            site.delete([self._to])  # the marker of an empty directory that was there before
        self._note("removing")
        self._remove_old(order)
        site.delete([self._record])
        self._places.forget(op.src)
        self._places.forget(op.dst)
        self._places.is_sub(op.dst)
        self._batch.entered(op.dst)
        return Applied(DIR, DIR, self._conflict)

    # -- what is to do -----------------------------------------------------------------------------

    def _to_move(self, rest: Sequence[Op]) -> list[Listed]:
        """The keys in the directory, less what later ops of the same batch have put there, when that was
        applied before."""
        items = list(self._site.listed(self._from))
        idents, paths = made_later(rest, self._site.uuid, self._op.src)
        if self._resumed or not items or not (idents or paths) or not self._site.anything(self._to):
            return items
        left = []
        for item in items:
            if item.key.endswith("/"):
                later = self._site.keys.path(item.key[:-1]) in paths
            else:
                head = self._site.raw(item.key)
                later = head is not None and ident_in(head) in idents
            if not later:
                left.append(item)
        return left

    def _was_moved(self, rest: Sequence[Op]) -> Applied:
        """Nothing is there to move: an earlier try did it, or another writer removed it."""
        path = self._op.dst
        for later in rest:
            if isinstance(later, Move) and (path == later.src or path.startswith(later.src + b"/")):
                path = later.dst + path[len(later.src) :]
        if not self._site.anything(self._site.keys.dir(path)):
            return Applied(conflict=True)
        return Applied(DIR, DIR)

    def _make_room(self) -> None:
        """Before the first copy: all that is at the new name is what is expected there, or others'."""
        op, site = self._op, self._site
        there = site.objects.head(op.dst)
        if there is not None and not site.is_expected(op.dst, there, op.expected):
            self._conflicts.keep(op.dst)
            self._conflict = True
        if there is not None:
            site.delete([site.keys.key(op.dst)])
        if any(item.key != self._to for item in site.listed(self._to)):
            self._conflict |= self._conflicts.clear(op.dst)

    def _note(self, phase: str) -> None:
        """Tell everybody who looks (R8)."""
        text = {name: path.decode() for name, path in (("src", self._op.src), ("dst", self._op.dst))}
        self._site.put(self._record, json.dumps({**text, "phase": phase}).encode(), "recording the move")

    def _heads(self, items: Sequence[Listed]) -> dict[str, Mapping[str, Any]]:
        """The metadata of what is to be moved; what another writer removes is left out."""
        found = self._site.each(self._site.raw, [item.key for item in items])
        return {item.key: head for item, head in zip(items, found, strict=True) if head is not None}

    def _by_age(self, items: Sequence[Listed], heads: Mapping[str, Mapping[str, Any]]) -> list[Listed]:
        """The oldest first, by publication.

        On AWS the date of an object that came in parts is that of its upload's beginning; its digests were
        written when it was published.
        """
        site = self._site
        composite = [item for item in items if "-" in item.token and is_ident(ident_in(heads[item.key]))]
        digests = site.each(site.raw, [site.manifests.key(ident_in(heads[i.key])) for i in composite])
        dates = {item.key: item.modified for item in items}
        for item, head in zip(composite, digests, strict=True):
            if head is not None:
                dates[item.key] = max(item.modified, head["LastModified"])
        return sorted(items, key=lambda item: _age(item, dates[item.key], heads[item.key]))

    # -- copying -----------------------------------------------------------------------------------

    def _copy_all(self, order: Sequence[Listed], heads: Mapping[str, Mapping[str, Any]]) -> None:
        """Oldest first; nothing of a group is begun before all of the group before is there."""
        many, alone = order[: -self.ALONE], order[-self.ALONE :]
        for first in range(0, len(many), self.AT_ONCE):
            group = [item.key for item in many[first : first + self.AT_ONCE]]
            # One in parts has threads itself.
            small = [key for key in group if int(heads[key]["ContentLength"]) <= self._copier.ONE_REQUEST]
            self._site.each(lambda key: self._copy(key, heads[key]), small)
            for key in group:
                if key not in small:
                    self._copy(key, heads[key])
        for item in alone:
            self._copy(item.key, heads[item.key])

    def _copy(self, source: str, head: Mapping[str, Any]) -> None:
        site, target = self._site, self._target(source)
        if self._resumed:
            there = site.raw(target)
            if there is not None and same(head, there):
                self._keep_attributes(source, head, there)
                return
            if there is not None and not target.endswith("/"):
                self._conflicts.keep(site.keys.path(target))
                self._conflict = True
        token = str(head["ETag"]).strip('"')
        try:
            self._copier.copy(source, head, target, token if "-" in token else "")
        except Missing:
            return  # removed by another writer
        now = site.raw(target)
        if now is not None and now["ETag"] != head["ETag"] and WAS not in now.get("Metadata", {}):
            # Encrypted: an ETag is no checksum then, and says nothing about the next one.
            self._copier.copy(source, head, target, token)
            now = site.raw(target)
        if now is None or int(now["ContentLength"]) != int(head["ContentLength"]):
            raise TierError(Trouble.DOWN, f"{site.url(target)} is not what was copied there")
        if not target.endswith("/") and ident_in(now) != ident_in(head):
            raise TierError(Trouble.DOWN, f"{site.url(target)} is another object than was copied there")
        self._keep_attributes(source, head, now)

    def _target(self, source: str) -> str:
        return self._to + source[len(self._from) :]

    def _keep_attributes(self, source: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Late attributes are moved with the tree; here those of an object whose ETag changed by copying, as
        that of one that came in parts does."""
        token, site = str(old["ETag"]).strip('"'), self._site
        if source.endswith("/") or old["ETag"] == now["ETag"]:
            return
        path = site.keys.path(source)
        record = site.attrs.get(path)
        if record is None or record.token != token:
            return
        moved = site.keys.path(self._target(source))
        site.attrs.put(moved, record.kind, str(now["ETag"]).strip('"'), record.attrs)
        site.attrs.drop(path)

    # -- removing ----------------------------------------------------------------------------------

    def _remove_old(self, order: Sequence[Listed]) -> None:
        """Newest first. What others changed or added meanwhile stays."""
        site = self._site
        known = {item.key: item for item in order}
        dying = [
            item.key
            for item in site.listed(self._from)
            if item.key in known and (item.token, item.size) == (known[item.key].token, known[item.key].size)
        ]
        rank = {item.key: number for number, item in enumerate(order)}
        dying.sort(key=lambda key: rank[key], reverse=True)
        self._places.keep_alive([self._op.src.rpartition(b"/")[0]], set(dying))
        for key in dying[: self.ALONE]:
            site.delete([key])
        site.delete(dying[self.ALONE :])
        # Directories of the store itself, where it has such (SeaweedFS), innermost first.
        inner = {self._from}
        for key in known:
            parts = key[len(self._from) :].split("/")[:-1]
            inner |= {self._from + "/".join(parts[: n + 1]) + "/" for n in range(len(parts))}
        site.delete(sorted(inner, key=len, reverse=True))


def _age(item: Listed, date: datetime, head: Mapping[str, Any]) -> tuple[datetime, int, int, str]:
    """What sorts by publication. Stores give dates to the second; within one it is the time in the metadata
    of what is published by one request, then the numbers of versions, which grow in each mount."""
    match = _VERSION.match(ident_in(head))
    at = nanoseconds(str(head.get("Metadata", {}).get("ctime", ""))) if "-" not in item.token else 0
    return date.replace(microsecond=0), at or 0, int(match.group(1)) if match else 0, item.key
