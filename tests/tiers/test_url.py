"""Tier URLs."""

from __future__ import annotations

import pytest

from ckptfs.errors import CkptfsError, Exit
from ckptfs.tiers import open_tier
from ckptfs.tiers.url import parse_tier_url


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///mnt/ckpt", b"/mnt/ckpt"),
        ("FILE:///mnt/ckpt/", b"/mnt/ckpt"),
        ("file://localhost/a//b/./c/../d", b"/a/b/d"),
        ("file:///with%20space%25/%ff%3F", b"/with space%/\xff?"),
        ("file:///tab\there", b"/tab\there"),
        ("file:///caf\u00e9/\udcff", b"/caf\xc3\xa9/\xff"),
    ],
)
def test_urls(url: str, root: bytes) -> None:
    assert parse_tier_url(url) == ("file", root)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "empty"),
        ("/mnt/x", "file:///mnt/x"),
        ("s3://bucket/p", "no S3 tier yet"),
        ("nfs://host/p", "unknown scheme"),
        ("file://host/p", "host"),
        ("file://", "absolute"),
        ("file:///", "root of the machine"),
        ("file:///a?b", "%3F"),
        ("file:///a%00b", "absolute"),
    ],
)
def test_urls_that_cannot_be_used(url: str, part: str) -> None:
    with pytest.raises(CkptfsError) as found:
        open_tier(url, "uuid")
    assert found.value.code is Exit.USAGE
    assert part in found.value.message
    assert "\n" not in found.value.message
