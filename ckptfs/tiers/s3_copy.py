"""Copies inside the store: the bytes do not pass this machine, except where the store cannot copy parts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from ckptfs.tiers.base import TierError
from ckptfs.tiers.s3_site import WAS, Site

_REMEMBERED = 3
"""ETags of earlier copies that stay in the metadata."""
_HEADERS = ("CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType")


class Copier:
    """Copies objects with their metadata. Sizes in bytes; lower ones are for tests."""

    ONE_REQUEST = 5 << 30
    """Largest object of a CopyObject (S3 API reference)."""
    PART = 512 << 20
    """Bytes of one UploadPartCopy, more for objects above 4.4 TiB."""
    THROUGH = 64 << 20
    """Bytes of one part that goes through this machine."""
    AT_ONCE = 8
    """Parts copied at the same time."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def copy(self, source: str, head: Mapping[str, Any], target: str, was: str = "") -> None:
        """Copy the object that HeadObject described as `head` to the key `target`, replacing what is there.

        `was`: an ETag to be added to the metadata, see `s3_site.WAS`.

        Raises `Precondition` or `Missing` when the source is another object by now.
        """
        site, size = self._site, int(head["ContentLength"])
        if source.endswith("/") and size == 0:
            # A marker of a directory, which SeaweedFS cannot copy.
            site.put(target, b"", "copying a marker to", **_dress(head))
        elif size <= self.ONE_REQUEST:
            site.store.run(
                f"copying {site.url(source)} to {site.url(target)}",
                lambda client: client.copy_object(
                    Bucket=site.store.bucket,
                    Key=target,
                    CopySource={"Bucket": site.store.bucket, "Key": source},
                    CopySourceIfMatch=head["ETag"],
                    **({"MetadataDirective": "REPLACE", **_dress(head, was)} if was else {}),
                ),
            )
        else:
            self._in_parts(source, head, target, was)

    def _in_parts(self, source: str, head: Mapping[str, Any], target: str, was: str) -> None:
        """One request copies 5 GiB at most. What a crash leaves is found by the sweep like any upload."""
        site, bucket, size = self._site, self._site.store.bucket, int(head["ContentLength"])
        part = self.PART if site.store.capabilities.part_copy else self.THROUGH
        part = max(part, -(-size // 9000))
        ident = f"{site.uuid}/copy-{xxhash.xxh3_64_hexdigest(target.encode())}"
        what = f"copying {site.url(source)} to {site.url(target)}"
        upload_id = site.uploads.create(ident, target, _dress(head, was))

        def one(number: int) -> dict[str, Any]:
            first = (number - 1) * part
            span = f"bytes={first}-{min(first + part, size) - 1}"
            common = {"Bucket": bucket, "Key": target, "UploadId": upload_id, "PartNumber": number}

            def ask(client: Any) -> str:
                if site.store.capabilities.part_copy:
                    answer = client.upload_part_copy(
                        **common,
                        CopySource={"Bucket": bucket, "Key": source},
                        CopySourceRange=span,
                        CopySourceIfMatch=head["ETag"],
                    )["CopyPartResult"]
                else:
                    got = client.get_object(Bucket=bucket, Key=source, Range=span, IfMatch=head["ETag"])
                    answer = client.upload_part(**common, Body=got["Body"].read())
                return str(answer["ETag"])

            return {"PartNumber": number, "ETag": site.store.run(f"{what}, part {number}", ask)}

        try:
            # Threads of its own: the caller may be in one of the shared ones.
            with ThreadPoolExecutor(self.AT_ONCE, "copy") as pool:
                parts = list(pool.map(one, range(1, -(-size // part) + 1)))
            site.store.run(
                what,
                lambda client: client.complete_multipart_upload(
                    Bucket=bucket, Key=target, UploadId=upload_id, MultipartUpload={"Parts": parts}
                ),
            )
        except BaseException:
            with contextlib.suppress(TierError):
                site.uploads.abort(target, upload_id)
            raise
        site.delete([site.keys.own("uploads", ident)])


def _dress(head: Mapping[str, Any], was: str = "") -> dict[str, Any]:
    """The arguments that give a new object the metadata of another."""
    metadata = dict(head.get("Metadata", {}))
    if was:
        metadata[WAS] = " ".join([*str(metadata.get(WAS, "")).split()[-_REMEMBERED:], was])
    return {
        "Metadata": metadata,
        **{name: head[name] for name in _HEADERS if head.get(name)},
    }
