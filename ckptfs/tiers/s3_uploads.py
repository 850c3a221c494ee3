"""Multipart uploads of one mount: begun, filled, listed, given up.

An upload carries no readable mark of who began it. So a record comes first, `.ckptfs/uploads/<mount
uuid>/<version>`: its body is the key, its metadata names the upload as soon as there is one. A crash in
between leaves an upload that is recognised by its key and by the time it was begun. The sweep aborts what
this mount's records name and the journal does not; other mounts' uploads are left alone.
"""

from __future__ import annotations

import base64
import errno
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ckptfs.tiers.base import (
    Draft,
    Kind,
    Source,
    TierError,
    Trouble,
    Upload,
    bound_handle,
    split_handle,
)
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.s3_body import Body, Checks, checks
from ckptfs.tiers.s3_client import Missing, Precondition, Store
from ckptfs.tiers.s3_keys import KEY_MAX, Keys
from ckptfs.tiers.s3_meta import FILE_TYPE, pack
from ckptfs.tiers.s3_objects import Entry, Objects, decoded, url
from ckptfs.tiers.window import digest, narrow

_log = logging.getLogger(__name__)

PARTS_MAX = 10_000
"""Parts of one upload (S3 API reference)."""
_NAMED = "ckptfs-upload"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\Z")
_MD5 = re.compile(r"[0-9a-f]{32}\Z")
_BEFORE = timedelta(seconds=30)
_AFTER = timedelta(seconds=180)
"""How much earlier and later than its record an upload was begun, if it is the one: requests time out
after a minute, and clocks within a store differ."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the store has."""

    number: int
    size: int
    etag: str
    """Without quotes."""
    crc32: str = ""
    """As `ChecksumCRC32` in Complete needs it; empty when the store does not tell."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What the handle of an upload says."""

    path: bytes
    key: str
    chunk: int
    mtime_ns: int
    """The mtime in its metadata."""
    upload_id: str


class Uploads:
    """The uploads of one mount. For any number of threads and processes."""

    def __init__(self, store: Store, keys: Keys, mount_uuid: str, objects: Objects | None = None) -> None:
        self._store = store
        self._keys = keys
        self._objects = objects or Objects(store, keys)
        self.uuid = mount_uuid

    def ident(self, version: str) -> str:
        """`ckptfs-version` of what a version of this mount becomes."""
        if not _VERSION.match(version):
            raise TierError(Trouble.REFUSED, f"{version!r} is not the name of a version", errno.EINVAL)
        return f"{self.uuid}/{version}"

    def record_key(self, upload: Upload) -> str:
        """The key of its record, deleted when it is published or given up."""
        return self._keys.own("uploads", upload.ident)

    def opened(self, upload: Upload) -> Opened:
        """What an upload's handle says. REDO for one that is no upload of this mount's kind."""
        try:
            path, (chunk, mtime_ns, upload_id) = split_handle(upload.handle, 3)
            return Opened(path, self._keys.key(path), int(chunk), int(mtime_ns), upload_id)
        except ValueError:
            raise TierError(
                Trouble.REDO, f"{upload.handle!r} is no upload to this tier", errno.EINVAL
            ) from None

    @staticmethod
    def sizes(size: int, chunk: int) -> list[int]:
        """Bytes of the parts of a version; an empty one has one part, which is empty."""
        return [min(chunk, size - at) for at in range(0, size, chunk)] or [0]

    # -- making and filling ----------------------------------------------------------------------

    def begin(self, draft: Draft) -> Upload:
        """A new upload, recorded before it exists; one left by an earlier try is aborted."""
        key, ident = self._keys.key(draft.path), self.ident(draft.version)
        if draft.chunk <= 0 or -(-draft.size // draft.chunk) > PARTS_MAX:
            raise TierError(
                Trouble.REFUSED,
                f"{show(draft.path)}: {draft.size} bytes in parts of {draft.chunk} are more than {PARTS_MAX};"
                " raise chunk_size",
                errno.EFBIG,
            )
        more = {"ChecksumAlgorithm": "CRC32"} if self._declares else {}
        dress = {"Metadata": pack(Kind.FILE, draft.attrs, ident), "ContentType": FILE_TYPE, **more}
        upload_id = self.create(ident, key, dress)
        handle = bound_handle(draft.path, str(draft.chunk), str(draft.attrs.mtime_ns), upload_id)
        upload = Upload(handle, ident)
        if draft.size == 0:
            self._send_part(self.opened(upload), 1, Source("", 0, 0), self._sums(Source("", 0, 0)))
        return upload

    def create(self, ident: str, key: str, dress: Mapping[str, Any]) -> str:
        """A new multipart upload of a key, recorded under `ident` before it exists; one left by an earlier
        try is aborted. `dress`: further arguments of CreateMultipartUpload. Returns the upload id."""
        record = self._keys.own("uploads", ident)
        self._record_new(record, key)
        try:
            upload_id = self._store.run(
                f"beginning the upload of {url(self._store, key)}",
                lambda client: str(
                    client.create_multipart_upload(Bucket=self._store.bucket, Key=key, **dress)["UploadId"]
                ),
            )
        except TierError as exc:
            if exc.trouble is Trouble.REFUSED:
                # Nothing was created, and the version may be skipped: who else would remove the record?
                with suppress(TierError):
                    self._forget(record)
            raise
        self._write_record(record, key, upload_id)
        return upload_id

    def send(self, upload: Upload, offset: int, source: Source) -> bytes:
        """Send a window whose place is `offset`, a multiple of the chunk: one part, or several whole ones.

        Returns its xxh3-128. REDO when the upload or the staged bytes are gone.
        """
        opened = self.opened(upload)
        if offset % opened.chunk:
            raise TierError(
                Trouble.REFUSED, f"part of {show(opened.path)} at {offset}: not a multiple of {opened.chunk}"
            )
        first = offset // opened.chunk + 1
        if source.length <= opened.chunk:
            sums = self._sums(source)
            self._send_part(opened, first, source, sums)
            return sums.xxh3
        for at in range(0, source.length, opened.chunk):
            part = narrow(source, source.offset + at, min(opened.chunk, source.length - at))
            self._send_part(opened, first + at // opened.chunk, part, self._sums(part))
        return digest(source)

    @property
    def _declares(self) -> bool:
        """Whether uploads are created with a checksum algorithm (AWS wants it, and every part's checksum
        again in Complete, so the store has to list them)."""
        capabilities = self._store.capabilities
        return capabilities.crc32 and capabilities.crc32_listed

    def _sums(self, source: Source) -> Checks:
        return checks(source, md5=not self._store.capabilities.crc32)

    def _send_part(self, opened: Opened, number: int, source: Source, sums: Checks) -> None:
        capabilities = self._store.capabilities
        more: dict[str, str] = {}
        if capabilities.crc32:
            more["ChecksumCRC32"] = sums.crc32
        elif capabilities.md5:
            more["ContentMD5"] = sums.md5
        what = f"sending part {number} of {url(self._store, opened.key)}"
        body: Body | bytes = Body(source) if source.length else b""

        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.upload_part(
                Bucket=self._store.bucket,
                Key=opened.key,
                UploadId=opened.upload_id,
                PartNumber=number,
                Body=body,
                **more,
            )
            return answer

        try:
            answer = self._store.run(what, ask)
        except Missing as exc:
            raise _gone(what) from exc
        finally:
            if isinstance(body, Body):
                body.close()
        if not more and _differs(answer, sums.md5):
            raise TierError(Trouble.DOWN, f"{what}: the store has other bytes than were sent", errno.EIO)

    def parts(self, upload: Upload) -> list[Part] | None:
        """The parts that the store has, by number; None when the upload is gone."""
        opened = self.opened(upload)
        found: list[Part] = []
        marker = 0
        while True:
            try:
                answer = self._list_parts(opened, marker)
            except TierError as exc:
                if isinstance(exc, Missing) or exc.trouble is Trouble.REDO:
                    return None
                raise
            for item in answer.get("Parts", ()):
                etag, crc32 = str(item["ETag"]).strip('"'), str(item.get("ChecksumCRC32", ""))
                found.append(Part(int(item["PartNumber"]), int(item["Size"]), etag, crc32))
            following = int(answer.get("NextPartNumberMarker") or 0)
            if not answer.get("IsTruncated") or following <= marker:
                return found
            marker = following

    def _list_parts(self, opened: Opened, marker: int) -> Mapping[str, Any]:
        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.list_parts(
                Bucket=self._store.bucket,
                Key=opened.key,
                UploadId=opened.upload_id,
                PartNumberMarker=marker,
            )
            return answer

        return self._store.run(f"listing the parts of {url(self._store, opened.key)}", ask)

    # -- giving up -------------------------------------------------------------------------------

    def abandon(self, uploads: Sequence[Upload]) -> None:
        """Abort uploads, and forget their records; those published or gone already are left."""

        def one(upload: Upload) -> None:
            opened = self.opened(upload)
            self.abort(opened.key, opened.upload_id)

        self._objects.each(one, [upload for upload in uploads if "\n" in upload.handle])
        self.finished(uploads)

    def finished(self, uploads: Sequence[Upload]) -> None:
        """Forget the records of uploads that were published or aborted."""
        self._objects.each(self._forget, [self.record_key(upload) for upload in uploads if upload.ident])

    def abort(self, key: str, upload_id: str) -> bool:
        """Abort an upload; False when it was gone already (as far as the store tells)."""
        try:
            self._store.run(
                f"aborting an upload of {url(self._store, key)}",
                lambda client: client.abort_multipart_upload(
                    Bucket=self._store.bucket, Key=key, UploadId=upload_id
                ),
            )
        except TierError as exc:
            if isinstance(exc, Missing) or exc.trouble is Trouble.REDO:
                return False
            raise
        return True

    def sweep(self, keep: frozenset[str]) -> int:
        """Abort this mount's uploads whose handle is not in `keep`; returns how many."""
        kept = frozenset(handle.split("\n", 3)[2] for handle in keep if handle.count("\n") >= 3)

        def one(entry: Entry) -> int:
            record = self._read_record(entry.key)
            if record is None or record.upload_id in kept:
                return 0
            aborted = self._abort_recorded(record, kept)
            self._forget(entry.key)
            return aborted

        return sum(self._objects.each(one, self._objects.below(self._keys.own("uploads", self.uuid, ""))))

    # -- records ---------------------------------------------------------------------------------

    def _record_new(self, record: str, key: str) -> None:
        """Record an upload that is about to begin; what an older record names is aborted first."""
        if self._store.capabilities.if_none_match:
            try:
                self._write_record(record, key, "", IfNoneMatch="*")
            except Precondition:
                pass
            else:
                return
        old = self._read_record(record)
        if old is not None:
            self._abort_recorded(old, frozenset())
        self._write_record(record, key, "")

    def _write_record(self, record: str, key: str, upload_id: str, **more: str) -> None:
        body = key.encode()
        guards = self._store.guards(body)
        self._store.run(
            f"recording the upload of {url(self._store, key)}",
            lambda client: client.put_object(
                Bucket=self._store.bucket,
                Key=record,
                Body=body,
                **guards,
                Metadata={_NAMED: upload_id} if upload_id else {},
                ContentType=FILE_TYPE,
                **more,
            ),
        )

    def _read_record(self, record: str) -> _Record | None:
        def ask(client: Any) -> _Record:
            answer = client.get_object(Bucket=self._store.bucket, Key=record)
            with closing(answer["Body"]) as body:
                key = body.read(KEY_MAX + 1).decode("utf-8", "replace")
            named = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
            return _Record(key, named.get(_NAMED, ""), answer["LastModified"])

        try:
            return self._store.run(f"reading {url(self._store, record)}", ask)
        except Missing:
            return None

    def _forget(self, record: str) -> None:
        with suppress(Missing):  # AWS answers 204, not every store does
            self._store.run(
                f"deleting {url(self._store, record)}",
                lambda client: client.delete_object(Bucket=self._store.bucket, Key=record),
            )

    def _abort_recorded(self, record: _Record, kept: frozenset[str]) -> int:
        """Abort what a record names; how many there were."""
        if not record.key.startswith(self._keys.dir(b"")):
            return 0
        live = self._live(record.key)
        if record.upload_id:
            self.abort(record.key, record.upload_id)  # whether listed or not
            return record.upload_id in live
        found = [
            upload_id
            for upload_id, began in live.items()
            if upload_id not in kept and record.date - _BEFORE <= began <= record.date + _AFTER
        ]
        if found:
            others = self._recorded_by_others(record.key)
            if "" in others:
                _log.warning(
                    "an upload of %s may be another mount's and is left", url(self._store, record.key)
                )
                return 0
            found = [upload_id for upload_id in found if upload_id not in others]
        return sum(self.abort(record.key, upload_id) for upload_id in found)

    def _live(self, key: str) -> dict[str, datetime]:
        """The unfinished uploads of a key, anybody's, and when they were begun."""
        found: dict[str, datetime] = {}
        markers: dict[str, str] = {}
        while True:
            answer = self._list_uploads(key, markers)
            encoded = answer.get("EncodingType") == "url"
            for item in answer.get("Uploads", ()):
                if decoded(item["Key"], encoded) == key:
                    found[str(item["UploadId"])] = item["Initiated"]
            following = {
                "KeyMarker": decoded(str(answer.get("NextKeyMarker", "")), encoded),
                "UploadIdMarker": str(answer.get("NextUploadIdMarker", "")),
            }
            past = following["KeyMarker"] != key  # keys that only begin with this one
            if not answer.get("IsTruncated") or past or following == markers:
                return found
            markers = following

    def _list_uploads(self, key: str, markers: Mapping[str, str]) -> Mapping[str, Any]:
        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.list_multipart_uploads(
                Bucket=self._store.bucket, Prefix=key, EncodingType="url", **markers
            )
            return answer

        return self._store.run(f"listing the uploads of {url(self._store, key)}", ask)

    def _recorded_by_others(self, key: str) -> set[str]:
        """The uploads of a key that other mounts' records name; `""` among them when one names none yet."""
        mine = self._keys.own("uploads", self.uuid, "")
        found = set()
        for entry in self._objects.below(self._keys.own("uploads", "")):
            record = self._read_record(entry.key) if not entry.key.startswith(mine) else None
            if record is not None and record.key == key:
                found.add(record.upload_id)
        return found


@dataclass(frozen=True, slots=True)
class _Record:
    """What is written about an upload before it is begun, and after."""

    key: str
    upload_id: str
    date: datetime


def _gone(what: str) -> TierError:
    return TierError(Trouble.REDO, f"{what}: the upload is gone", errno.ENOENT)


def _differs(answer: Mapping[str, Any], md5: str) -> bool:
    """Whether the ETag of a part is the MD5 of other bytes; under SSE-KMS and SSE-C it is none."""
    etag = str(answer.get("ETag", "")).strip('"')
    if not _MD5.match(etag) or answer.get("SSECustomerAlgorithm"):
        return False
    return "kms" not in str(answer.get("ServerSideEncryption", "")) and base64.b64decode(md5).hex() != etag
