"""Looking at an object tier and reading from it: the sibling of `file_read`."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import xxhash
from botocore.exceptions import ClientError

from ckptfs.tiers.base import (
    RESERVED,
    UNASKED,
    Attrs,
    Digest,
    Familiar,
    Found,
    Kind,
    Source,
    TierError,
    Trouble,
)
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.s3_client import Missing, Precondition, Store
from ckptfs.tiers.s3_errors import code_of
from ckptfs.tiers.s3_keys import Keys
from ckptfs.tiers.s3_meta import DEFAULT_DIR_MODE, date_ns
from ckptfs.tiers.s3_objects import SAMPLE, Objects, Place, Seen, seen_of, url
from ckptfs.tiers.s3_records import AttrRecord, AttrRecords, Manifests
from ckptfs.tiers.window import digest, write_all

DIR = "dir"
"""Token and ident of every directory: it has no identity."""
PIECE = 8 << 20
"""Bytes of one ranged GET, where a larger range is asked for: they are made in parallel."""
AT_ONCE = 16
"""Pieces that are asked for before the size of the object is known."""
SLICE = 1 << 20
"""Bytes taken from a connection at a time."""
_RANGE = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+)\Z")
_DIR_ATTRS = Attrs(DEFAULT_DIR_MODE, os.geteuid(), os.getegid(), 0, 0)


class Reader:
    """Everything a mount asks of the tier without changing it. For any number of threads."""

    def __init__(
        self, store: Store, keys: Keys, objects: Objects, records: AttrRecords, manifests: Manifests
    ) -> None:
        self._store = store
        self._keys = keys
        self._objects = objects
        self._records = records
        self._manifests = manifests

    # -- looking ---------------------------------------------------------------------------------

    def listdir(self, path: bytes, familiar: Familiar | None = None) -> list[Found]:
        """Everything in a directory but ckptfs's own names and what the mount cannot show.

        ENOENT or ENOTDIR (`TierError(CHANGED)`) when it is no directory. Of an object and a directory of one
        name, the directory is shown.
        """
        if not self._possible(path):
            raise self._no_dir(path, errno.ENOENT)
        base = path + b"/" if path else b""
        listed = self._objects.pool.submit(self._objects.listing, path)
        records = self._records.listed(path)
        listing = listed.result()

        def place(name: bytes) -> Place:
            record = records.get(name)
            sampled = record is None or record.kind is not Kind.DIR
            return self._objects.look_dir(base + name, SAMPLE if sampled else 1)

        names = [name for name in listing.dirs if self._keys.has(base + name)]
        places = dict(zip(names, self._objects.each(place, names), strict=True))
        dirs = {name: place for name, place in places.items() if place.exists}
        for name in dirs.keys() & listing.objects.keys():
            entry = listing.objects.pop(name)
            self._objects.hide(entry.key, "a directory has its name")
        if path and listing.marker is None and not dirs and not listing.objects:
            raise self._no_dir(path, self._why_no_dir(path))

        found = [
            Found(name, kind, entry.size, UNASKED, entry.token)
            for name, entry in listing.objects.items()
            if name not in records and (kind := _as_known(familiar or {}, name, entry.token)) is not None
        ]
        asked = {n: e for n, e in listing.objects.items() if n not in {f.name for f in found}}
        seen = self._objects.described(asked.values())
        for (name, entry), there in zip(asked.items(), seen, strict=True):
            if there is None:
                continue  # removed meanwhile
            if there.kind is None:
                self._objects.hide(entry.key, "it is a device, a socket or a pipe")
            else:
                found.append(_found(name, there, records.get(name)))
        attrs = self._objects.each(
            lambda item: self._dir_attrs(item[1], records.get(item[0])), list(dirs.items())
        )
        found += [
            Found(name, Kind.DIR, 0, these, DIR, b"", DIR) for name, these in zip(dirs, attrs, strict=True)
        ]
        return found

    def stat(self, path: bytes) -> Found | None:
        """One object or directory; None for what is not there or not shown."""
        if not self._possible(path):
            return None
        placed = self._objects.pool.submit(self._objects.look_dir, path)
        recorded = self._objects.pool.submit(self._records.get, path)
        try:
            there = self._objects.stat(path) if path else None
        finally:
            place, record = placed.result(), recorded.result()
        name = path.rpartition(b"/")[2]
        if place.exists or not path:
            return Found(name, Kind.DIR, 0, self._dir_attrs(place, record), DIR, b"", DIR)
        if there is None or there.kind is None:
            return None
        return _found(name, there, record)

    def attrs_of_dir(self, path: bytes) -> Attrs:
        """The attributes of a directory, as `stat` shows them; defaults when there is none."""
        return self._dir_attrs(self._objects.look_dir(path), self._records.get(path, Kind.DIR))

    def _possible(self, path: bytes) -> bool:
        """Whether the tier can have anything that is shown under this path."""
        reserved = any(name.startswith(RESERVED) for name in path.split(b"/"))
        return not reserved and self._keys.has(path)

    def _dir_attrs(self, place: Place, record: AttrRecord | None) -> Attrs:
        """From the record, else the marker; an mtime that neither has is that of the newest object."""
        if record is not None and record.kind is Kind.DIR:
            return record.attrs
        marker = self._objects.described_marker(place.marker) if place.marker is not None else None
        attrs = marker.attrs if marker is not None else _DIR_ATTRS
        if place.newest is not None and (marker is None or not marker.mtime_known):
            newest = date_ns(place.newest)
            attrs = replace(attrs, mtime_ns=newest, atime_ns=newest)
        return attrs

    def _no_dir(self, path: bytes, code: int) -> TierError:
        return TierError(Trouble.CHANGED, f"{show(path)} is no directory on the tier", code)

    def _why_no_dir(self, path: bytes) -> int:
        """ENOTDIR when there is an object at the path or above it."""
        names = path.split(b"/")
        above = [b"/".join(names[:count]) for count in range(len(names), 0, -1)]
        there = self._objects.head_many(above)
        return errno.ENOTDIR if any(seen is not None for seen in there) else errno.ENOENT

    # -- digests ---------------------------------------------------------------------------------

    def digests(self, path: bytes, token: str) -> tuple[Digest, ...]:
        """Those recorded with the object; empty when there are none or the object is not `token` any more."""
        if not path or not self._possible(path):
            return ()
        there = self._objects.head(path)
        return self._digests(there) if there is not None and there.token == token else ()

    def _digests(self, there: Seen) -> tuple[Digest, ...]:
        if there.kind is not Kind.FILE:
            return ()
        if there.xxh3 is not None:
            return (Digest(0, there.size, there.xxh3),) if there.size else ()
        record = self._manifests.valid(there)
        return record.digests if record is not None else ()

    # -- reading ---------------------------------------------------------------------------------

    def fetch(self, path: bytes, token: str, offset: int, length: int, into: str) -> int:
        """Copy a range into the same range of a local file; whole chunks in it are verified there,
        where they will be read."""
        try:
            local = os.open(into, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise TierError(
                Trouble.REDO, f"staging file {into} cannot be opened: {exc.strerror}", exc.errno or 0
            ) from exc
        try:

            def take(view: memoryview, at: int) -> None:
                try:
                    write_all(local, view, at)
                except OSError as exc:
                    code = exc.errno or errno.EIO
                    raise TierError(
                        Trouble.DOWN, f"no room in the cache to fetch {show(path)}: {os.strerror(code)}", code
                    ) from exc

            there, got = self._get(path, token, offset, length, take)
            for chunk in self._whole_chunks(there, offset, got):
                where = Source(into, chunk.offset, chunk.length)
                if digest(where) != chunk.xxh3:
                    self._get(path, token, chunk.offset, chunk.length, take)  # damaged on the way?
                    if digest(where) != chunk.xxh3:
                        raise _corrupt(path, chunk)
            return got
        finally:
            os.close(local)

    def read(self, path: bytes, token: str, offset: int, length: int) -> bytes:
        """A range as bytes; whole chunks in it are verified."""
        data, lock = bytearray(), threading.Lock()

        def take(view: memoryview, at: int) -> None:
            first, last = at - offset, at - offset + len(view)
            with lock:  # pieces come from several threads
                data.extend(bytes(max(0, last - len(data))))
                data[first:last] = view

        there, got = self._get(path, token, offset, length, take)
        for chunk in self._whole_chunks(there, offset, got):
            where = slice(chunk.offset - offset, chunk.offset - offset + chunk.length)
            if xxhash.xxh3_128_digest(data[where]) != chunk.xxh3:
                self._get(path, token, chunk.offset, chunk.length, take)
                if xxhash.xxh3_128_digest(data[where]) != chunk.xxh3:
                    raise _corrupt(path, chunk)
        return bytes(data)

    def _whole_chunks(self, there: Seen, offset: int, length: int) -> Sequence[Digest]:
        """Chunks with a recorded digest that lie in the range completely."""
        end = offset + length
        return [
            item
            for item in self._digests(there)
            if item.offset >= offset and item.offset + item.length <= end
        ]

    def _get(
        self, path: bytes, token: str, offset: int, length: int, take: Callable[[memoryview, int], None]
    ) -> tuple[Seen, int]:
        """Hand out a range in pieces, from several threads at once: what the object is, and how many bytes it
        has there. CHANGED when it is not `token`, at any moment."""
        if length <= 0:
            return self._look(path, token), 0
        key, end = self._keys.key(path), offset + length

        def piece(at: int) -> tuple[Seen | None, int]:
            return self._get_piece(path, key, token, at, min(PIECE, end - at), take)

        if length > AT_ONCE * PIECE:  # perhaps much more than there is: ask for the first alone
            there, got = piece(offset)
            end = min(end, there.size) if there is not None else offset
            got += sum(count for _, count in self._objects.each(piece, range(offset + PIECE, end, PIECE)))
        else:
            results = self._objects.each(piece, range(offset, end, PIECE))
            there, got = results[0][0], sum(count for _, count in results)
        if there is None:
            there = self._look(path, token)
        if got != max(0, min(end, there.size) - offset):
            raise TierError(
                Trouble.DOWN, f"{url(self._store, key)}: the store gave other bytes than asked for"
            )
        return there, got

    def _look(self, path: bytes, token: str) -> Seen:
        there = self._objects.head(path)
        if there is None or there.token != token:
            raise _changed(path, gone=there is None)
        return there

    def _get_piece(
        self,
        path: bytes,
        key: str,
        token: str,
        offset: int,
        length: int,
        take: Callable[[memoryview, int], None],
    ) -> tuple[Seen | None, int]:
        """One request. None and 0 where the object has no such bytes."""

        def ask(client: Any) -> tuple[Seen | None, int]:
            try:
                answer = client.get_object(
                    Bucket=self._store.bucket,
                    Key=key,
                    Range=f"bytes={offset}-{offset + length - 1}",
                    IfMatch=f'"{token}"',
                )
            except ClientError as exc:
                if code_of(exc)[1] == 416:
                    return None, 0
                raise
            with closing(answer["Body"]) as body:
                first, total = _place_of(answer)
                there = seen_of(answer, total)
                if there.token != token:
                    raise _changed(path)  # where IfMatch is not looked at
                if first != offset:
                    raise TierError(
                        Trouble.REFUSED, f"{what}: the store does not give ranges", errno.EOPNOTSUPP
                    )
                at, end = offset, min(offset + length, total)
                while at < end:
                    data = body.read(min(SLICE, end - at))
                    if not data:
                        raise TierError(Trouble.DOWN, f"{what}: the connection ended early", errno.ECONNRESET)
                    with memoryview(data) as view:
                        take(view, at)
                    at += len(data)
            return there, end - offset

        what = f"reading {url(self._store, key)}"
        try:
            return self._store.run(what, ask)
        except (Missing, Precondition) as exc:
            raise _changed(path, gone=isinstance(exc, Missing)) from exc


def _place_of(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Where the bytes of an answer begin, and the size of the whole object."""
    match = _RANGE.match(str(answer.get("ContentRange", "")))
    return (int(match.group(1)), int(match.group(2))) if match else (0, int(answer["ContentLength"]))


def _as_known(familiar: Familiar, name: bytes, token: str) -> Kind | None:
    """The kind of an object that needs no look, None of one that does."""
    if name not in familiar:
        return None
    known = familiar[name]
    if known is None:
        return Kind.FILE
    return known[1] if known[0] == token and known[1] is not Kind.DIR else None


def _found(name: bytes, there: Seen, record: AttrRecord | None) -> Found:
    assert there.kind is not None
    attrs = record.attrs if record is not None and record.about(there) else there.attrs
    return Found(name, there.kind, there.size, attrs, there.token, there.target, there.ident)


def _changed(path: bytes, *, gone: bool = False) -> TierError:
    what = "is gone from" if gone else "was changed on"
    return TierError(Trouble.CHANGED, f"{show(path)} {what} the tier", errno.ESTALE)


def _corrupt(path: bytes, chunk: Digest) -> TierError:
    return TierError(
        Trouble.CORRUPT,
        f"{show(path)}: bytes {chunk.offset}..{chunk.offset + chunk.length} are not what was written",
        errno.EIO,
    )
