"""A stranger who uses the same prefix of a bucket as a mount, with plain boto3 and without ckptfs."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

OWN = ".ckptfs/"


@dataclass(frozen=True)
class Listed:
    """An object as a listing shows it."""

    key: str
    size: int
    etag: str


class Bucket:
    """A prefix of a bucket. Paths and keys are without it."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def key(self, path: bytes | str) -> str:
        return f"{self.prefix}/{os.fsdecode(path)}"

    def at(self, path: bytes | str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key(path)}

    # -- doing -------------------------------------------------------------------------------------

    def write(self, path: bytes | str, data: bytes, **more: Any) -> None:
        self.client.put_object(**self.at(path), Body=data, **more)

    def remove(self, path: bytes | str) -> None:
        """A file, or a directory with all that is in it."""
        name = os.fsdecode(path)
        gone = [item.key for item in self.listed(name) if (item.key + "/").startswith(name + "/")]
        for some in (gone[at : at + 1000] for at in range(0, len(gone), 1000)):
            objects = [{"Key": self.key(key)} for key in some]
            self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects})

    # -- looking -----------------------------------------------------------------------------------

    def read(self, path: bytes | str) -> bytes | None:
        try:
            body: bytes = self.client.get_object(**self.at(path))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return body

    def head(self, path: bytes | str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self.client.head_object(**self.at(path))
        except ClientError as exc:
            if exc.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            return None
        return found

    def listed(self, below: bytes | str = "") -> list[Listed]:
        """Objects whose key starts with this."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.key(below)
        )
        start = len(self.prefix) + 1
        return [
            Listed(item["Key"][start:], item["Size"], item["ETag"])
            for page in pages
            for item in page.get("Contents", ())
        ]

    def keys(self, below: bytes | str = "") -> list[str]:
        """Keys that start with this."""
        return [item.key for item in self.listed(below)]

    def tree(self, below: str = "") -> set[str]:
        """Paths of files, links and directories, as anybody sees them who takes `/` for a separator."""
        found: set[str] = set()
        for item in self.listed(below):
            if not item.key.startswith(OWN):
                name = item.key.rstrip("/")
                while name:
                    found.add(name)
                    name = name.rpartition("/")[0]
        return {name for name in found if (name + "/").startswith(below)} if below else found

    def uploads(self) -> list[str]:
        """Keys of the unfinished multipart uploads."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix + "/")
        return [item["Key"][len(self.prefix) + 1 :] for item in found.get("Uploads", ())]

    def own(self, kind: str) -> list[str]:
        """Keys of what ckptfs keeps for itself: `uploads`, `conflicts`, `moves`, `manifests`, ..."""
        return [item.key for item in self.listed(f"{OWN}{kind}/")]

    def conflicts(self) -> list[bytes]:
        """Contents of what was kept aside."""
        kept = (self.read(key) for key in self.own("conflicts"))
        return [data for data in kept if data is not None]

    def moves(self) -> list[str]:
        """New names of the directories whose renames are not complete."""
        records = (self.read(key) for key in self.own("moves"))
        return [json.loads(record)["dst"] for record in records if record is not None]


def is_link(head: dict[str, Any]) -> bool:
    """Whether the metadata of an object says so, as s3fs writes it."""
    return stat.S_ISLNK(int(head["Metadata"].get("mode", "0")))
