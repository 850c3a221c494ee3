"""What a probe tries on an object store: objects, and multipart uploads.

Each trial says what it found and raises only when the store cannot be a tier, or does not answer. The
meaning of the requests is that of the S3 API reference.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.s3_body import checks_of
from ckptfs.tiers.s3_client import Missing, Precondition
from ckptfs.tiers.s3_errors import code_of
from ckptfs.tiers.s3_scratch import Answer, Finding, Scratch, State, refused

BODY = b"ckptfs probe\n"
_SUMS = checks_of(BODY, md5=True)
_WRONG = checks_of(b"something else\n", md5=True)
_ODD = "odd name+%41&'(\u00e9)~"
_METADATA = {"mode": "33188", "mtime": "1700000000.123456789", "ckptfs-version": "probe/1"}
_BACKSLASH = "back\\slash"
_UPLOADED = {"ckptfs-version": "probe/upload"}
_TYPE = "application/octet-stream"
_IN_COMPLETE = ("PartNumber", "ETag", "ChecksumCRC32")


@dataclass(slots=True)
class Found:
    """The capabilities that a group of trials has shown."""

    crc32: bool = False
    md5: bool = False
    if_none_match: bool = False
    if_match: bool = False
    part_copy: bool = False
    crc32_listed: bool = False


class Trials:
    """Both groups; `findings` are in the order of their trials."""

    def __init__(self, scratch: Scratch) -> None:
        self._s = scratch
        self.findings: list[Finding] = []

    def _say(self, name: str, good: bool | None, text: str) -> None:
        state = State.NOTE if good is None else State.OK if good else State.NO
        self.findings.append(Finding(name, state, text))


class ObjectTrials(Trials):
    """Objects as a whole: the verbs, checksums and conditions of PutObject, CopyObject."""

    def run(self) -> Found:
        """Try all."""
        found = Found()
        takes_crc = self._write_and_read()
        self._checksums(found, takes_crc)
        self._conditions(found)
        self._names()
        self._copy()
        self._delete()
        return found

    def _write_and_read(self) -> bool:
        """Returns whether a right CRC32 is taken."""
        s = self._s
        put: dict[str, Any] = {"Body": BODY, "Metadata": _METADATA, "ContentType": _TYPE}
        refusal = s.refusal("put_object", "a", ChecksumCRC32=_SUMS.crc32, **put)
        if refusal is not None:
            if refusal.errno == errno.EACCES:
                raise refusal
            s.ask("put_object", "a", **put)
        head = s.ask("head_object", "a")
        whole = s.ask("get_object", "a", IfMatch=head["ETag"])["Body"]
        part = s.ask("get_object", "a", Range="bytes=1-4")["Body"]
        if (whole, part, head["ContentLength"]) != (BODY, BODY[1:5], len(BODY)):
            raise TierError(
                Trouble.DOWN,
                f"s3://{s.bucket}/{s.home}a: the store does not give back what was written",
                errno.EIO,
            )
        _need_metadata(s, "a", head, _METADATA)
        self._say("write, read", True, "PutObject, HeadObject, GetObject with Range; metadata is kept")
        other = s.refusal("get_object", "a", IfMatch='"0123456789abcdef0123456789abcdef"')
        good = isinstance(other, Precondition)
        self._say("conditional read", good, "If-Match" if good else "If-Match is ignored: ETags are compared")
        return refusal is None

    def _checksums(self, found: Found, takes_crc: bool) -> None:
        s = self._s
        if takes_crc:
            wrong = s.refusal("put_object", "wrong", Body=BODY, ChecksumCRC32=_WRONG.crc32)
            found.crc32 = wrong is not None and _absent(s, "wrong")
        self._say("CRC32", found.crc32, _verdict(found.crc32, takes_crc))
        takes_md5 = s.refusal("put_object", "b", Body=BODY, ContentMD5=_SUMS.md5) is None
        if takes_md5:
            wrong = s.refusal("put_object", "wrong5", Body=BODY, ContentMD5=_WRONG.md5)
            found.md5 = wrong is not None and _absent(s, "wrong5")
        self._say("Content-MD5", found.md5, _verdict(found.md5, takes_md5))

    def _conditions(self, found: Found) -> None:
        s = self._s
        made = s.refusal("put_object", "c", Body=BODY, IfNoneMatch="*")
        s.ask("put_object", "d", Body=BODY)
        kept = s.refusal("put_object", "d", Body=BODY, IfNoneMatch="*")
        found.if_none_match = isinstance(kept, Precondition) and made is None
        etag = s.ask("head_object", "d")["ETag"]
        kept = s.refusal("put_object", "d", Body=b"other", IfMatch='"0123456789abcdef0123456789abcdef"')
        replaced = s.refusal("put_object", "d", Body=BODY + b"2", IfMatch=etag)
        found.if_match = isinstance(kept, Precondition) and replaced is None
        for name, good in (("If-None-Match", found.if_none_match), ("If-Match", found.if_match)):
            self._say(
                f"put {name}", good, "kept" if good else "not kept: objects are looked at before each write"
            )

    def _names(self) -> None:
        """Odd names and directory markers, as a listing shows them."""
        s = self._s
        s.ask("put_object", _ODD, Body=BODY)
        s.ask("put_object", "dir/", Body=b"", Metadata=_METADATA, ContentType="application/x-directory")
        marker = s.ask("head_object", "dir/")
        s.ask("put_object", _BACKSLASH, Body=BODY)
        page = s.ask("list_objects_v2", Prefix=s.home, Delimiter="/")
        names = {item["Key"].removeprefix(s.home) for item in page.get("Contents", ())}
        dirs = {item["Prefix"].removeprefix(s.home) for item in page.get("CommonPrefixes", ())}
        good = {"a", _ODD} <= names and "dir/" in dirs
        text = "ListObjectsV2 shows at once what was written, odd names too"
        if not good:
            text = f"ListObjectsV2 shows {sorted(names | dirs)} in place of what was written"
        self._say("list", good, text)
        kept = _BACKSLASH in names
        text = "kept" if kept else "changed by the store: files with one in their name are not found again"
        self._say("backslash in names", kept or None, text)
        kept = marker.get("Metadata", {}).get("mtime") == _METADATA["mtime"]
        text = "markers keep metadata" if kept else "markers lose metadata: attributes are in records"
        self._say("empty directories", kept or None, text)

    def _copy(self) -> None:
        s = self._s
        source = {"Bucket": s.bucket, "Key": s.home + "a"}
        refusal = s.refusal("copy_object", "copy", CopySource=source, MetadataDirective="COPY")
        if refusal is not None:
            self._say("copy", False, f"renames will be refused ({refusal.message})")
            return
        _need_metadata(s, "copy", s.ask("head_object", "copy"), _METADATA)
        self._say("copy", True, "CopyObject keeps the metadata")

    def _delete(self) -> None:
        s = self._s
        s.ask("delete_object", "b")
        many = s.refusal("delete_objects", "", Delete={"Objects": [{"Key": s.home + "c"}]})
        text = "DeleteObject, DeleteObjects" if many is None else "only one by one: DeleteObjects is refused"
        self._say("delete", many is None, text)


class UploadTrials(Trials):
    """Multipart uploads: their verbs, checksums of parts, part copy, ranking, the smallest part."""

    def run(self) -> Found:
        """Try all."""
        found = Found()
        self._s.ask("put_object", "source", Body=BODY)
        self._upload_id = ""
        self._crc = self._declare = False
        self._etags: dict[int, str] = {}
        self._checksums(found)
        self._part_copy(found)
        self._complete()
        self._abort()
        return found

    def _begin(self) -> None:
        """A new upload in place of the last one."""
        if self._upload_id:
            self._s.ask("abort_multipart_upload", "m", UploadId=self._upload_id)
        more = {"ChecksumAlgorithm": "CRC32"} if self._declare else {}
        self._upload_id = self._s.ask(
            "create_multipart_upload", "m", Metadata=_UPLOADED, ContentType=_TYPE, **more
        )["UploadId"]
        self._etags.clear()

    def _part(self, number: int, **sums: str) -> TierError | None:
        """Send a part with a right CRC32 where that is taken; returns how it was refused."""
        if self._crc:
            sums.setdefault("ChecksumCRC32", _SUMS.crc32)
        try:
            answer = self._s.ask(
                "upload_part", "m", UploadId=self._upload_id, PartNumber=number, Body=BODY, **sums
            )
        except TierError as exc:
            return refused(exc)
        self._etags[number] = answer["ETag"].strip('"')
        return None

    def _checksums(self, found: Found) -> None:
        found.crc32_listed = self._crc32_listed()
        self._declare = found.crc32_listed
        self._crc = False
        self._begin()
        takes_crc = self._part(1, ChecksumCRC32=_SUMS.crc32) is None
        found.crc32 = takes_crc and self._part(1, ChecksumCRC32=_WRONG.crc32) is not None
        self._say("CRC32 of parts", found.crc32, _verdict(found.crc32, takes_crc))
        self._crc = takes_crc
        takes_md5 = self._part(1, ContentMD5=_SUMS.md5) is None
        found.md5 = takes_md5 and self._part(1, ContentMD5=_WRONG.md5) is not None
        self._say("Content-MD5 of parts", found.md5, _verdict(found.md5, takes_md5))
        self._need_part(1)

    def _crc32_listed(self) -> bool:
        """Whether an upload can be declared to have CRC32 sums, which ListParts then shows."""
        self._declare = self._crc = True
        try:
            self._begin()
        except TierError as exc:
            refused(exc)
            self._upload_id = ""
            return False
        if self._part(1) is not None:
            return False
        listed = self._s.ask("list_parts", "m", UploadId=self._upload_id).get("Parts", ())
        return [part.get("ChecksumCRC32") for part in listed] == [_SUMS.crc32]

    def _need_part(self, number: int) -> None:
        refusal = self._part(number)
        if refusal is not None:
            raise refusal

    def _part_copy(self, found: Found) -> None:
        s = self._s
        refusal = s.refusal(
            "upload_part_copy", "m", UploadId=self._upload_id, PartNumber=2,
            CopySource={"Bucket": s.bucket, "Key": s.home + "source"}, CopySourceRange="bytes=0-5",
        )  # fmt: skip
        found.part_copy = refusal is None
        text = (
            "UploadPartCopy"
            if refusal is None
            else "no UploadPartCopy: large objects are read and written again"
        )
        self._say("part copy", found.part_copy, text)
        if refusal is None:
            listed = s.ask("list_parts", "m", UploadId=self._upload_id).get("Parts", ())
            self._etags[2] = next((p["ETag"].strip('"') for p in listed if p["PartNumber"] == 2), "")
        else:
            self._need_part(2)

    def _complete(self) -> None:
        s = self._s
        page = s.ask("list_multipart_uploads", Prefix=s.home)
        shown = self._upload_id in {item["UploadId"] for item in page.get("Uploads", ())}
        s.ask("put_object", "m", Body=b"later", Metadata={"ckptfs-version": "probe/later"})
        refusal = self._finish(2)
        small = refusal is None
        if refusal is not None:
            cause: Any = refusal.__cause__
            if code_of(cause)[0] != "EntityTooSmall":
                raise refusal
            self._begin()
            self._need_part(1)
            s.ask("put_object", "m", Body=b"later", Metadata={"ckptfs-version": "probe/later"})
            refusal = self._finish(1)
            if refusal is not None:
                raise refusal
        head = s.ask("head_object", "m")
        last = head.get("Metadata", {}).get("ckptfs-version") == "probe/upload"
        if last and head["ContentLength"] not in (len(BODY), len(BODY) + 6, 2 * len(BODY)):
            raise TierError(Trouble.DOWN, f"s3://{s.bucket}/{s.home}m: the store lost a part", errno.EIO)
        text = "Create, UploadPart, ListParts, Complete" + (
            "" if shown else "; ListMultipartUploads shows none"
        )
        self._say("multipart upload", shown, text)
        text = "of any size are taken" if small else "of less than 5 MiB are refused: ckptfs sends none"
        self._say("small parts", None, text)
        text = "the last Complete wins" if last else "an upload ranks by its start, as on AWS"
        self._say("overlapping uploads", None, text)

    def _finish(self, count: int) -> TierError | None:
        s = self._s
        listed = s.ask("list_parts", "m", UploadId=self._upload_id).get("Parts", ())
        # SeaweedFS lists a part that was sent again once for every time.
        parts = {
            part["PartNumber"]: {name: part[name] for name in _IN_COMPLETE if name in part}
            for part in listed
            if part["ETag"].strip('"') == self._etags.get(part["PartNumber"])
        }
        if sorted(parts) != list(range(1, count + 1)):
            raise TierError(
                Trouble.DOWN,
                f"ListParts s3://{s.bucket}/{s.home}m: the parts shown are not those sent",
                errno.EIO,
            )
        in_order = [parts[number] for number in sorted(parts)]
        refusal = s.refusal(
            "complete_multipart_upload", "m", UploadId=self._upload_id, MultipartUpload={"Parts": in_order}
        )
        if refusal is None:
            self._upload_id = ""
        return refusal

    def _abort(self) -> None:
        self._begin()
        upload_id = self._upload_id
        self._s.ask("abort_multipart_upload", "m", UploadId=upload_id)
        gone = self._s.refusal("list_parts", "m", UploadId=upload_id) is not None
        self._say("abort", gone, "AbortMultipartUpload" if gone else "aborted uploads still show")


def _verdict(good: bool, taken: bool) -> str:
    if good:
        return "wrong ones are refused"
    return "wrong ones are accepted: of no use" if taken else "not taken at all"


def _absent(s: Scratch, name: str) -> bool:
    return isinstance(s.refusal("head_object", name), Missing)


def _need_metadata(s: Scratch, name: str, head: Answer, wanted: dict[str, str]) -> None:
    if dict(head.get("Metadata", {})) != wanted:
        raise TierError(
            Trouble.REFUSED,
            f"s3://{s.bucket}/{s.home}{name}: the store does not keep user metadata, it cannot be a tier",
            errno.EOPNOTSUPP,
        )
