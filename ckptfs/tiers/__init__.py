"""Tiers: where checkpoints live for good. Run in worker processes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptfs.tiers.base import Traits

if TYPE_CHECKING:
    from ckptfs.tiers.base import Tier

OBJECTS = Traits(inline_bytes=1 << 20, bound=True)
"""Object stores: PutObject is data and publish in one, an upload belongs to its key."""


def traits_of(url: str) -> Traits:
    """How the tier of a URL takes data."""
    from ckptfs.tiers.url import parse_tier_url

    scheme, _ = parse_tier_url(url)
    return OBJECTS if scheme == "s3" else Traits()


def open_tier(url: str, mount_uuid: str, options: Mapping[str, Any] | None = None) -> Tier:
    """The tier of a URL, for one mount. Touches nothing: the first call does.

    `options["tier_id"]`: identity found by an earlier probe; with it a directory that is another
    tier, or none, is never taken for this one. Raises `CkptfsError` for a URL that is none.
    """
    from ckptfs.tiers.file import FileTier
    from ckptfs.tiers.url import parse_tier_url

    _, root = parse_tier_url(url)
    return FileTier(root, mount_uuid, url=url, tier_id=str((options or {}).get("tier_id", "")))
