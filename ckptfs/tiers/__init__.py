"""Tiers: where checkpoints live for good. Run in worker processes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfs.tiers.base import Traits

if TYPE_CHECKING:
    from ckptfs.tiers.base import Tier

OBJECTS = Traits(inline_bytes=1 << 20, bound=True, least_chunk=5 << 20, heads=True)
"""Object stores: PutObject is data and publish in one, an upload belongs to its key, and parts of a
multipart upload have at least 5 MiB."""


def traits_of(url: str) -> Traits:
    """How the tier of a URL takes data."""
    from ckptfs.tiers.s3_keys import forbids
    from ckptfs.tiers.url import bucket_of, parse_tier_url

    scheme, root = parse_tier_url(url)
    if scheme != "s3":
        return Traits()
    _, prefix = bucket_of(root)
    return replace(OBJECTS, forbids=partial(forbids, prefix=prefix))


def open_tier(url: str, mount_uuid: str, options: Mapping[str, Any] | None = None) -> Tier:
    """The tier of a URL, for one mount. Touches nothing: the first call does.

    `options["tier_id"]`: identity found by an earlier probe; with it a directory, or bucket, that is another
    tier, or none, is never taken for this one. What else: see `s3_client.Store`. Raises `CkptfsError` for a
    URL that is none.
    """
    from ckptfs.tiers.url import bucket_of, parse_tier_url

    scheme, root = parse_tier_url(url)
    if scheme == "s3":
        from ckptfs.tiers.s3 import S3Tier

        bucket, prefix = bucket_of(root)
        return S3Tier(bucket, prefix, mount_uuid, url=url, options=options)
    from ckptfs.tiers.file import FileTier

    return FileTier(root, mount_uuid, url=url, tier_id=str((options or {}).get("tier_id", "")))
