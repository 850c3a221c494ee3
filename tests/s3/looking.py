"""A prefix of a bucket under test: ckptfs's view of it, and a stranger's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ckptfs.tiers.base import Attrs, Draft, Found, Source
from ckptfs.tiers.s3_client import Store
from ckptfs.tiers.s3_keys import Keys
from ckptfs.tiers.s3_objects import Objects
from ckptfs.tiers.s3_read import Reader
from ckptfs.tiers.s3_records import AttrRecords, Manifests
from ckptfs.tiers.s3_uploads import Uploads

ATTRS = Attrs(0o640, 1000, 1001, 1_600_000_000_000_000_001, 1_700_000_000_123_456_789)
MIB = 1 << 20


class Place:
    """All parts that look at one prefix, and a plain client."""

    def __init__(self, client: Any, bucket: str, prefix: str, endpoint: str, uuid: str = "me") -> None:
        self.client = client
        self.bucket = bucket
        self.base = prefix + "/" if prefix else ""
        self.prefix, self.uuid = prefix, uuid
        self.through(endpoint)

    def through(self, endpoint: str) -> None:
        """Make all parts anew, with nothing remembered."""
        options = {"endpoint_url": endpoint, "region": "us-east-1"}
        self.store = Store(self.bucket, self.prefix.encode(), options)
        self.keys = Keys(self.prefix.encode())
        self.objects = Objects(self.store, self.keys)
        self.attrs = AttrRecords(self.store, self.keys, self.objects)
        self.manifests = Manifests(self.store, self.keys)
        self.reader = Reader(self.store, self.keys, self.objects, self.attrs, self.manifests)
        self.uploads = Uploads(self.store, self.keys, self.uuid, self.objects)

    def put(self, key: str, body: bytes = b"", metadata: Mapping[str, str] | None = None, **more: Any) -> str:
        """Another writer's PutObject; returns the token."""
        answer = self.client.put_object(
            Bucket=self.bucket, Key=self.base + key, Body=body, Metadata=dict(metadata or {}), **more
        )
        return str(answer["ETag"]).strip('"')

    def delete(self, key: str) -> None:
        """Another writer's DeleteObject."""
        self.client.delete_object(Bucket=self.bucket, Key=self.base + key)

    def head(self, key: str) -> dict[str, Any]:
        """HeadObject."""
        return dict(self.client.head_object(Bucket=self.bucket, Key=self.base + key))

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        page = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.base + key)
        return any(item["Key"] == self.base + key for item in page.get("Contents", ()))

    def listed(self, path: bytes = b"") -> dict[bytes, Found]:
        """The directory, each entry checked to be what stat says."""
        found = {item.name: item for item in self.reader.listdir(path)}
        for name, item in found.items():
            assert self.reader.stat(path + b"/" + name if path else name) == item
        return found

    def complete(self, upload: Any) -> str:
        """CompleteMultipartUpload with all that is there; returns the token."""
        opened = self.uploads.opened(upload)
        parts = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                **({"ChecksumCRC32": part.crc32} if part.crc32 else {}),
            }
            for part in self.uploads.parts(upload) or ()
        ]
        answer = self.client.complete_multipart_upload(
            Bucket=self.bucket, Key=opened.key, UploadId=opened.upload_id, MultipartUpload={"Parts": parts}
        )
        return str(answer["ETag"]).strip('"')

    def live(self) -> set[str]:
        """Upload ids of unfinished uploads."""
        answer = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.base)
        return {item["UploadId"] for item in answer.get("Uploads", ())}


def draft(version: str, path: bytes, size: int, chunk: int = 5 * MIB) -> Draft:
    """A version about to be sent."""
    return Draft(version, path, size, chunk, ATTRS)


def stage(path: Any, data: bytes) -> Source:
    """Staged bytes."""
    path.write_bytes(data)
    return Source(str(path), 0, len(data))


def date_of(head: Mapping[str, Any]) -> int:
    """The store's date of an object, in nanoseconds."""
    date: datetime = head["LastModified"]
    return int(date.timestamp()) * 10**9
