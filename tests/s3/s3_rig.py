"""An object tier as a `Rig`: a bucket and a prefix of a real server, and a stranger with plain boto3."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from rig import Rig

from ckptfs.tiers import OBJECTS, open_tier
from ckptfs.tiers.base import Tier
from tests.s3.servers import REGION, Server

MIB = 1 << 20
LEAST_PART = 5 * MIB
"""Bytes that every part but the last must have, on AWS and on all servers used here."""

_numbers = itertools.count(1)


class Bucket:
    """What a stranger does below a prefix of a bucket. Paths are the mount's."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    def key(self, path: bytes) -> str:
        return f"{self.prefix}/{path.decode()}"

    def write(self, path: bytes, data: bytes, **more: Any) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.key(path), Body=data, **more)

    def read(self, path: bytes) -> bytes | None:
        try:
            body: bytes = self.client.get_object(Bucket=self.bucket, Key=self.key(path))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return body

    def keys(self, below: bytes = b"") -> list[str]:
        """Keys that start with a path, without the prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.key(below)
        )
        return [item["Key"][len(self.prefix) + 1 :] for page in pages for item in page.get("Contents", ())]

    def remove(self, path: bytes) -> None:
        """A file, or a directory with all that is in it."""
        name = path.decode()
        gone = [key for key in self.keys(path) if key == name or key.startswith(name + "/")]
        for some in (gone[at : at + 1000] for at in range(0, len(gone), 1000)):
            objects = [{"Key": f"{self.prefix}/{key}"} for key in some]
            self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects})

    def uploads(self) -> list[str]:
        """Keys of the unfinished multipart uploads below the prefix."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix + "/")
        return [item["Key"][len(self.prefix) + 1 :] for item in found.get("Uploads", ())]

    def conflicts(self) -> list[bytes]:
        """Contents of what was kept aside."""
        kept = (self.read(key.encode()) for key in self.keys(b".ckptfs/conflicts/"))
        return [data for data in kept if data is not None]


_probed: dict[str, str] = {}
"""What the probe found, by endpoint."""


@contextlib.contextmanager
def s3_rig(
    server: Server,
    staging: Path,
    *,
    inline: bool = True,
    probed: bool = True,
    endpoint: str = "",
    bucket: str = "contract",
    options: Mapping[str, str] | None = None,
) -> Iterator[Rig]:
    """A tier under a prefix that nobody used before.

    With `inline`, small versions are sent by their Put. Unless `probed`, the tier relies on nothing that
    not every store has.
    """
    place = Bucket(server.client(), server.bucket(bucket), f"p{next(_numbers)}")
    staging.mkdir(parents=True, exist_ok=True)
    told = {"endpoint_url": endpoint or server.endpoint, "region": REGION, **(options or {})}
    url = f"s3://{bucket}/{place.prefix}"

    def opened() -> Tier:
        caps = _probed.get(server.endpoint, "") if probed else ""
        return open_tier(url, "0000-mount", {**told, "caps": caps})

    with mock.patch.dict(os.environ, server.env):
        if probed and server.endpoint not in _probed:
            _probed[server.endpoint] = opened().probe().caps
        yield Rig(
            open=opened,
            staging=staging,
            foreign_write=place.write,
            foreign_read=place.read,
            foreign_remove=place.remove,
            foreign_mkdir=lambda path: place.write(path + b"/", b""),
            conflicts=place.conflicts,
            chunk=LEAST_PART,
            any_offset=False,
            inline=OBJECTS.inline_bytes if inline else -1,
            probe=False,
            small=20,
        )
