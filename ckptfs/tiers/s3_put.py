"""Making one version, or one symbolic link, visible on an object tier."""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs.tiers.base import INLINE, Applied, Kind, Link, Op, Put, TierError, Trouble, bound_path
from ckptfs.tiers.file_errors import show
from ckptfs.tiers.file_records import Record
from ckptfs.tiers.s3_body import Checks, load
from ckptfs.tiers.s3_client import Missing, Precondition
from ckptfs.tiers.s3_conflicts import Conflicts
from ckptfs.tiers.s3_meta import FILE_TYPE, pack, seconds
from ckptfs.tiers.s3_objects import Seen
from ckptfs.tiers.s3_places import Batch, Places
from ckptfs.tiers.s3_quick import put_object
from ckptfs.tiers.s3_replay import ident_of, landed
from ckptfs.tiers.s3_site import Site
from ckptfs.tiers.s3_uploads import Part

_RACES = 5
_MD5 = re.compile(r"[0-9a-f]{32}\Z")
_COMPOSITE = re.compile(r"[0-9a-f]{32}-([0-9]+)\Z")


@dataclass(frozen=True, slots=True)
class _Content:
    """What one PutObject sends."""

    data: bytes
    sums: Checks
    metadata: Mapping[str, str]
    ident: str


class Publisher:
    """Puts and links of one batch."""

    def __init__(self, site: Site, places: Places, conflicts: Conflicts, batch: Batch) -> None:
        self._site = site
        self._places = places
        self._conflicts = conflicts
        self._batch = batch

    def put(self, op: Put, rest: Sequence[Op]) -> Applied:
        """Publish one version; what another writer has there is kept (W3)."""
        if op.upload != INLINE:
            return self._complete(op, rest)
        return self._place(op, self._content(op), rest)

    def _content(self, op: Put) -> _Content:
        """What the request for a small version sends."""
        if op.source is None or not op.version:
            raise TierError(Trouble.REDO, f"the bytes of {show(op.path)} did not come with it", errno.ENODATA)
        data, sums = load(op.source, md5=self._wants_md5)
        if len(data) != op.size:
            raise TierError(
                Trouble.REDO,
                f"{show(op.path)} has {len(data)} staged bytes, {op.size} are to be published",
                errno.ENODATA,
            )
        ident = ident_of(op, self._site.uuid)
        metadata = _dated(pack(Kind.FILE, op.attrs, ident, sums.xxh3))
        return _Content(data, sums, metadata, ident)

    def link(self, op: Link, rest: Sequence[Op]) -> Applied:
        """Publish a symbolic link: its body is the target."""
        ident = ident_of(op, self._site.uuid)
        sums = Checks(b"", "", _md5(op.target))
        metadata = _dated(pack(Kind.LINK, op.attrs, ident))
        return self._place(op, _Content(op.target, sums, metadata, ident), rest)

    # -- one request -----------------------------------------------------------------------------

    @property
    def _wants_md5(self) -> bool:
        return not self._site.store.capabilities.crc32

    def _place(self, op: Put | Link, content: _Content, rest: Sequence[Op]) -> Applied:
        """PutObject, on the condition that what is there is what is expected (W3).

        Where the store has no conditions, or the condition does not hold, a HEAD says what is there.
        """
        site = self._site
        self._batch.settle(op.path)
        conflict = self._places.has_sub(op.path) and self._conflicts.clear(op.path, remains=True)
        known, look, replaced = op.expected, not self._guarded(op.expected), None
        refused = cleared = False
        for _ in range(_RACES):
            if look:
                there = site.objects.head(op.path)
                if there is not None and there.ident == content.ident and there.size == len(content.data):
                    self._batch.entered(op.path)
                    return Applied(there.token, there.ident, conflict)
                if there is not None and not site.is_expected(op.path, there, op.expected):
                    if landed(site.objects.head, site.uuid, op.path, content.ident, rest):
                        return Applied("", content.ident)
                    self._conflicts.keep(op.path)
                    conflict, replaced = True, None
                else:
                    replaced = there
                if there is None and refused:
                    conflict |= self._conflicts.clear(op.path, remains=True)
                known = there.token if there is not None else None
            try:
                token = self._send(op, content, known)
            except (Precondition, Missing):
                look = refused = True
            except TierError as exc:
                if cleared:
                    raise
                conflict |= self._clear(op.path, exc)
                look = cleared = True
            else:
                break
        else:
            raise TierError(Trouble.DOWN, f"another writer keeps replacing {show(op.path)}", errno.EAGAIN)
        if token == op.expected and not conflict:
            # The same bytes again: a record of later attributes of the old object would count for the new.
            self._site.attrs.drop(op.path)
        self._published(op.path, replaced)
        return Applied(token, content.ident, conflict)

    def _guarded(self, expected: str | None) -> bool:
        capabilities = self._site.store.capabilities
        return capabilities.if_none_match if expected is None else capabilities.if_match

    def _send(self, op: Put | Link, content: _Content, known: str | None) -> str:
        """The request. What the store does not verify itself is verified by the ETag it answers."""
        site = self._site
        arguments = self._arguments(op, content, known)
        what = "publishing" if isinstance(op, Put) else "linking"
        what = f"{what} {site.url(arguments['Key'])}"
        answer = site.store.run(what, lambda client: put_object(client, arguments))
        token = str(answer["ETag"]).strip('"')
        if content.sums.md5 and _MD5.match(token) and not _encrypted(answer):
            sent = base64.b64decode(content.sums.md5).hex()
            if sent != token:
                raise TierError(Trouble.DOWN, f"{what}: the store has other bytes than were sent", errno.EIO)
        return token

    def _arguments(self, op: Put | Link, content: _Content, known: str | None) -> dict[str, Any]:
        """Of `put_object`; `known` is the token of what may be replaced."""
        site, capabilities = self._site, self._site.store.capabilities
        arguments: dict[str, Any] = {
            "Bucket": site.store.bucket,
            "Key": site.keys.key(op.path),
            "Body": content.data,
            "Metadata": content.metadata,
            "ContentType": FILE_TYPE,
        }
        if known is None and capabilities.if_none_match:
            arguments["IfNoneMatch"] = "*"
        elif known is not None and capabilities.if_match:
            arguments["IfMatch"] = f'"{known}"'
        if capabilities.crc32 and content.sums.crc32:
            arguments["ChecksumCRC32"] = content.sums.crc32
        elif capabilities.md5 and content.sums.md5:
            arguments["ContentMD5"] = content.sums.md5
        return arguments

    def _clear(self, path: bytes, problem: TierError) -> bool:
        """After a refusal, which may be due to a directory at the path, or an object in the place of one
        above: stores that can't have both do not say so clearly. True when one of others was kept."""
        try:
            return self._conflicts.clear(path, remains=True) | self._conflicts.clear_above(path)
        except TierError:
            raise problem from None

    def _published(self, path: bytes, replaced: Seen | None) -> None:
        if replaced is not None:
            self._batch.drop_manifest(replaced)
        self._batch.entered(path)

    # -- many parts ------------------------------------------------------------------------------

    def _complete(self, op: Put, rest: Sequence[Op]) -> Applied:
        site, ident = self._site, op.upload.ident
        self._batch.settle(op.path)
        if bound_path(op.upload) != op.path:
            raise TierError(
                Trouble.REDO,
                f"the upload for {show(bound_path(op.upload))} can't be published as {show(op.path)}",
                errno.ESTALE,
            )
        there = site.objects.head(op.path)
        if _is_it(there, op):
            assert there is not None
            site.uploads.abandon([op.upload])  # begun again after an answer that was lost
            return self._done(op, there, None, False)
        parts = self._parts(op)
        if parts is None:
            if landed(site.objects.head, site.uuid, op.path, ident, rest):
                return Applied("", ident)
            raise TierError(
                Trouble.REDO, f"the upload of {show(op.path)} is gone before it was published", errno.ENOENT
            )
        conflict = self._conflicts.clear(op.path)
        replaced = there
        if there is not None and not site.is_expected(op.path, there, op.expected):
            self._conflicts.keep(op.path)
            conflict, replaced = True, None
        if op.digests:
            site.manifests.put(ident, self._record(op))
        now, problem = self._finished(op, parts)
        if problem is not None and problem.trouble is not Trouble.REDO:
            conflict |= self._clear(op.path, problem)
            now, problem = self._finished(op, parts)
        if problem is not None:
            raise problem
        assert now is not None
        self._check(op, parts)
        return self._done(op, now, replaced, conflict)

    def _record(self, op: Put) -> Record:
        """The digests, valid with the mtime that the upload was begun with."""
        return Record(op.size, self._site.uploads.opened(op.upload).mtime_ns, op.version, op.digests)

    def _done(self, op: Put, now: Seen, replaced: Seen | None, conflict: bool) -> Applied:
        """It is there. Attributes that it got after the upload was begun are late ones."""
        if now.attrs != op.attrs:
            self._site.attrs.put(op.path, Kind.FILE, now.token, op.attrs)
        elif now.token == op.expected:
            self._site.attrs.drop(op.path)
        self._batch.garbage[self._site.uploads.record_key(op.upload)] = None
        self._published(op.path, replaced)
        return Applied(now.token, now.ident, conflict)

    def _parts(self, op: Put) -> list[Part] | None:
        """The parts, exactly those that make up the version; None when the upload is gone."""
        uploads = self._site.uploads
        parts = uploads.parts(op.upload)
        if parts is None:
            return None
        parts = list(dict.fromkeys(parts))  # SeaweedFS shows a part that was sent again twice
        sizes = uploads.sizes(op.size, uploads.opened(op.upload).chunk)
        if [(part.number, part.size) for part in parts] != list(enumerate(sizes, 1)):
            had = f"{len(parts)} parts of {sum(part.size for part in parts)} bytes"
            raise TierError(
                Trouble.REDO,
                f"the upload of {show(op.path)} has {had}, not the {len(sizes)} of {op.size} that were sent",
                errno.ENODATA,
            )
        return parts

    def _finished(self, op: Put, parts: Sequence[Part]) -> tuple[Seen | None, TierError | None]:
        """Complete the upload. Whatever the answer is, only what a HEAD shows then counts."""
        problem = TierError(
            Trouble.REDO, f"{show(op.path)} is another object right after it was published", errno.EAGAIN
        )
        try:
            self._finish(op, parts)
        except TierError as exc:
            problem = exc
        now = self._site.objects.head(op.path)
        return (now, None) if _is_it(now, op) else (None, problem)

    def _finish(self, op: Put, parts: Sequence[Part]) -> None:
        """CompleteMultipartUpload."""
        site, opened = self._site, self._site.uploads.opened(op.upload)
        listed = [
            {"PartNumber": part.number, "ETag": f'"{part.etag}"'}
            | ({"ChecksumCRC32": part.crc32} if part.crc32 else {})
            for part in parts
        ]
        site.store.run(
            f"publishing {site.url(opened.key)}",
            lambda client: client.complete_multipart_upload(
                Bucket=site.store.bucket,
                Key=opened.key,
                UploadId=opened.upload_id,
                MultipartUpload={"Parts": listed},
            ),
        )

    def _check(self, op: Put, parts: Sequence[Part]) -> None:
        """Whether the ETag is that of these parts, where both are of the usual kind: the md5 of the parts'
        md5s. It says then that the store has joined exactly what it has verified."""
        site = self._site
        if not all(_MD5.match(part.etag) for part in parts):
            return
        head = site.raw(site.keys.key(op.path))
        if head is None or _encrypted(head):
            return
        match = _COMPOSITE.match(str(head["ETag"]).strip('"'))
        joined = b"".join(bytes.fromhex(part.etag) for part in parts)
        expected = hashlib.md5(joined, usedforsecurity=False).hexdigest()
        if match and int(match.group(1)) == len(parts) and not match.group(0).startswith(expected):
            # It would be taken for what is sent next, which is the same version.
            site.delete([site.keys.key(op.path)])
            raise TierError(
                Trouble.REDO, f"{show(op.path)} was published with other parts than were sent", errno.EIO
            )


def _is_it(there: Seen | None, op: Put) -> bool:
    return there is not None and there.ident == op.upload.ident and there.size == op.size


def _dated(metadata: dict[str, str]) -> dict[str, str]:
    """With the time of publishing: stores have dates to the second, too coarse for the order of a rename."""
    return metadata | {"ctime": seconds(time.time_ns())}


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether an ETag says nothing about the bytes (SSE-KMS and SSE-C, S3 user guide)."""
    return "kms" in str(answer.get("ServerSideEncryption", "")) or bool(answer.get("SSECustomerAlgorithm"))
