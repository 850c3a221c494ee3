"""Records beside the objects: late attributes, and digests of large objects.

Attributes changed after publishing are `.ckptfs/attrs/<directory>/.ckptfs-<name>`: JSON with the ETag they
are valid for (none for directories). A name has one record, whatever it is; one request lists those of a
directory; and since no name begins with `.ckptfs`, no record is in the way of another on stores that keep
keys as files. Digests are `.ckptfs/manifests/<ident>` in the form of `file_records`, written before the
object is visible, found through its ident, and valid for its size and the mtime in its metadata.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ckptfs.tiers.base import RESERVED, Attrs, Kind, TierError, Trouble
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.file_records import Record, decode, encode
from ckptfs.tiers.s3_client import Missing, Precondition, Store
from ckptfs.tiers.s3_keys import KEY_MAX, Keys
from ckptfs.tiers.s3_meta import FILE_TYPE
from ckptfs.tiers.s3_objects import Entry, Objects, Seen, url

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MARK = RESERVED + b"-"
_REMEMBERED = 16384
"""Attribute records that one process remembers."""
_MANIFESTS = 256
"""Manifests that one process remembers: at most 40 MB, usually 1 MB."""
_LIMIT = 64 << 20
"""No manifest is larger."""


@dataclass(frozen=True, slots=True)
class AttrRecord:
    """Attributes that win over an object's metadata while its ETag is `token`."""

    kind: Kind
    token: str
    attrs: Attrs

    def about(self, seen: Seen) -> bool:
        """Whether it is about this object, as it is."""
        return self.kind == seen.kind and self.token == seen.token

    def encode(self) -> bytes:
        """The stored form."""
        return json.dumps({"kind": int(self.kind), "token": self.token, **asdict(self.attrs)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> AttrRecord | None:
        """The record, or None for anything that is not one, whoever wrote it."""
        try:
            found = json.loads(data)
            numbers = {name: found[name] for name in Attrs.__dataclass_fields__}
            if not all(type(value) is int for value in numbers.values()):
                return None
            return cls(Kind(found["kind"]), str(found["token"]), Attrs(**numbers))
        except (ValueError, KeyError, TypeError):
            return None


class AttrRecords:
    """Late attributes. For any number of threads."""

    def __init__(self, store: Store, keys: Keys, objects: Objects) -> None:
        self._store = store
        self._keys = keys
        self._objects = objects
        self._known: OrderedDict[tuple[str, str], AttrRecord] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, path: bytes) -> str:
        """The key of a path's record."""
        parent, slash, name = path.rpartition(b"/")
        return self._keys.own("attrs", parent + slash + _MARK + name)

    def get(self, path: bytes, kind: Kind | None = None) -> AttrRecord | None:
        """The record of a path, if there is one about something of the kind (None: any)."""
        record = _get(self._store, self.key(path), AttrRecord.decode)
        return record if record is not None and kind in (None, record.kind) else None

    def listed(self, path: bytes) -> dict[bytes, AttrRecord]:
        """The records of everything directly in a directory, by name."""
        prefix = self._keys.own("attrs", path + b"/" + _MARK if path else _MARK)
        entries = {
            entry.key[len(prefix) :].encode("utf-8", "surrogateescape"): entry
            for entry in self._objects.below(prefix)
        }
        found = self._objects.each(self._load, entries.values())
        return {name: record for name, record in zip(entries, found, strict=True) if record and name}

    def _load(self, entry: Entry) -> AttrRecord | None:
        """The ETag of so small an object changes with every change of its bytes."""
        at = (entry.key, entry.token)
        with self._lock:
            if at in self._known:
                self._known.move_to_end(at)
                return self._known[at]
        record = _get(self._store, entry.key, AttrRecord.decode, entry.token)
        if record is not None:
            with self._lock:
                self._known[at] = record
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return record

    def put(self, path: bytes, kind: Kind, token: str, attrs: Attrs) -> bool:
        """Record attributes; False where a key of somebody else's is too long to have a record."""
        key = self.key(path)
        if len(key.encode()) > KEY_MAX:
            _log.warning("attributes of %s are not kept: its key is too long", show(path))
            return False
        _put(self._store, key, AttrRecord(kind, token, attrs).encode(), "recording attributes as")
        return True

    def drop(self, path: bytes, kind: Kind | None = None) -> None:
        """Forget the record of a path, whatever it is about."""
        _delete(self._store, self.key(path))

    def move(self, src: bytes, dst: bytes) -> None:
        """Take the records of `src`, and of everything below it, to `dst`. Can be done again."""
        base = self._keys.own("attrs", src, "")
        keys = [entry.key for entry in self._objects.below(base)]
        jobs = [(key, self._keys.own("attrs", dst, key[len(base) :])) for key in keys]
        self._objects.each(self._move_one, [(self.key(src), self.key(dst)), *jobs])

    def _move_one(self, job: tuple[str, str]) -> None:
        source, target = job
        data = _get(self._store, source, bytes)
        if data is not None:
            if len(target.encode()) <= KEY_MAX:
                _put(self._store, target, data, "recording attributes as")
            _delete(self._store, source)


class Manifests:
    """Digests of large objects, by ident. For any number of threads."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._known: OrderedDict[str, Record] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, ident: str) -> str:
        """Where the manifest of `<mount uuid>/<version>` is; a key that nothing has for another ident."""
        return self._keys.own("manifests", ident if is_ident(ident) else "none")

    def put(self, ident: str, record: Record) -> None:
        """Write it; `record.mtime_ns` is the one in the object's metadata."""
        if not is_ident(ident):
            raise TierError(Trouble.REFUSED, f"{ident!r} is not the identity of a version")
        _put(self._store, self.key(ident), encode(record), "writing the digests")
        self._remember(ident, record)

    def get(self, ident: str) -> Record | None:
        """The manifest, if there is one; whether it is about an object as it is tells `valid`."""
        if not is_ident(ident):
            return None  # other writers may put anything into metadata
        with self._lock:
            known = self._known.get(ident)
            if known is not None:
                self._known.move_to_end(ident)
                return known
        record = _get(self._store, self.key(ident), decode)
        if record is not None:
            self._remember(ident, record)
        return record

    def valid(self, seen: Seen) -> Record | None:
        """The manifest of an object, if it is about it as it is."""
        record = self.get(seen.ident) if seen.ident and seen.kind is Kind.FILE else None
        if record is None or record.size != seen.size or record.mtime_ns != seen.attrs.mtime_ns:
            return None
        return record

    def drop(self, ident: str) -> None:
        """Forget it, if there is one."""
        if is_ident(ident):
            with self._lock:
                self._known.pop(ident, None)
            _delete(self._store, self.key(ident))

    def _remember(self, ident: str, record: Record) -> None:
        with self._lock:
            self._known[ident] = record
            self._known.move_to_end(ident)
            while len(self._known) > _MANIFESTS:
                self._known.popitem(last=False)


def is_ident(text: str) -> bool:
    """Whether it is `<mount uuid>/<version>`, safe as a part of a key."""
    parts = text.split("/")
    return len(parts) == 2 and all(part and part.strip(".") and _plain(part) for part in parts)


def _plain(text: str) -> bool:
    return len(text) <= 160 and text.isascii() and all(c.isalnum() or c in "._-" for c in text)


# -- requests ------------------------------------------------------------------------------------


def _get(store: Store, key: str, decoded: Callable[[bytes], T], token: str = "") -> T | None:
    """A small object, decoded; None when it is gone (or not `token` any more), or too large to be ours."""
    condition = {"IfMatch": f'"{token}"'} if token else {}

    def ask(client: Any) -> bytes | None:
        answer = client.get_object(Bucket=store.bucket, Key=key, **condition)
        with closing(answer["Body"]) as body:
            data: bytes | None = body.read() if answer["ContentLength"] <= _LIMIT else None
        return data

    try:
        data = store.run(f"reading {url(store, key)}", ask)
    except (Missing, Precondition):
        return None
    return decoded(data) if data is not None else None


def _put(store: Store, key: str, data: bytes, what: str) -> None:
    guards = store.guards(data)
    store.run(
        f"{what} {url(store, key)}",
        lambda client: client.put_object(
            Bucket=store.bucket, Key=key, Body=data, ContentType=FILE_TYPE, **guards
        ),
    )


def _delete(store: Store, key: str) -> None:
    with suppress(Missing):  # AWS answers 204, not every store does
        store.run(
            f"deleting {url(store, key)}", lambda client: client.delete_object(Bucket=store.bucket, Key=key)
        )
