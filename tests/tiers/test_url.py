"""Tier URLs."""

from __future__ import annotations

import pytest

from ckptfs.errors import CkptfsError, Exit
from ckptfs.tiers import open_tier
from ckptfs.tiers.url import bucket_of, parse_tier_url


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
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", b""),
        ("s3://bucket/", "bucket", b""),
        ("S3://bucket/p", "bucket", b"p"),
        ("s3://bucket/p/q/", "bucket", b"p/q"),
        ("s3://My_old.Bucket/run 7", "My_old.Bucket", b"run 7"),
        ("s3://bucket/with%20space%25/%3F%23/caf%C3%A9", "bucket", "with space%/?#/caf\u00e9".encode()),
        ("s3://bucket/caf\u00e9/...", "bucket", "caf\u00e9/...".encode()),
        (f"s3://bucket/{'p' * 800}", "bucket", b"p" * 800),
    ],
)
def test_urls_of_object_stores(url: str, bucket: str, prefix: bytes) -> None:
    scheme, root = parse_tier_url(url)
    assert scheme == "s3"
    assert bucket_of(root) == (bucket, prefix)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "empty"),
        ("/mnt/x", "file:///mnt/x"),
        ("nfs://host/p", "unknown scheme"),
        ("file://host/p", "host"),
        ("file://", "absolute"),
        ("file:///", "root of the machine"),
        ("file:///a?b", "%3F"),
        ("file:///a%00b", "absolute"),
        ("s3://", "no bucket"),
        ("s3:///prefix", "no bucket"),
        ("s3://a/p", "bucket name"),
        ("s3://-abc/p", "bucket name"),
        ("s3://abc-/p", "bucket name"),
        ("s3://a%62c/p", "bucket name"),
        ("s3://h\u00e9llo/p", "bucket name"),
        (f"s3://{'a' * 256}", "bucket name"),
        ("s3://127.0.0.1:9000/bucket", "--endpoint-url"),
        ("s3://key:secret@bucket/p", "--endpoint-url"),
        ("s3://bucket/a?b", "%3F"),
        ("s3://bucket/a#b", "%23"),
        ("s3://bucket?x", "%3F"),
        ("s3://bucket//p", "empty name"),
        ("s3://bucket/a//b", "empty name"),
        ("s3://bucket/a//", "empty name"),
        ("s3://bucket/a/%2Fb", "empty name"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/%2e/b", "'.'"),
        ("s3://bucket/.ckptfs/b", ".ckptfs"),
        ("s3://bucket/%ff", "UTF-8"),
        ("s3://bucket/\udcff", "UTF-8"),
        ("s3://bucket/a%00b", "control"),
        ("s3://bucket/a%0ab", "control"),
        (f"s3://bucket/{'p' * 801}", "800"),
    ],
)
def test_urls_that_cannot_be_used(url: str, part: str) -> None:
    with pytest.raises(CkptfsError) as found:
        open_tier(url, "uuid")
    assert found.value.code is Exit.USAGE
    assert part in found.value.message
    assert "\n" not in found.value.message
