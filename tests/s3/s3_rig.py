"""An object tier as a `Rig`: a bucket and a prefix of a real server, and a stranger with plain boto3."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from rig import Rig

from ckptfs.tiers import OBJECTS, open_tier
from ckptfs.tiers.base import Tier
from tests.s3.servers import REGION, Server
from tests.s3.stranger import Bucket

MIB = 1 << 20
LEAST_PART = 5 * MIB
"""Bytes that every part but the last must have, on AWS and on all servers used here."""

_numbers = itertools.count(1)


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

    def opened() -> Tier:
        caps = _probed.get(server.endpoint, "") if probed else ""
        return open_tier(place.url, "0000-mount", {**told, "caps": caps})

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
