"""What publishing on an object tier works with, and the requests that several kinds of ops make."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.s3_client import Missing, Store
from ckptfs.tiers.s3_keys import Keys
from ckptfs.tiers.s3_objects import Objects, Seen
from ckptfs.tiers.s3_read import Reader
from ckptfs.tiers.s3_records import AttrRecords, Manifests
from ckptfs.tiers.s3_uploads import Uploads

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

WAS = "ckptfs-was"
"""Metadata of a copy: ETags of the objects that it is a copy of, where they differ from its own."""
_PER_DELETE = 1000
"""Keys of one DeleteObjects request (S3 API reference)."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One key of a listing. `token` is the ETag without quotes."""

    key: str
    size: int
    token: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class Site:
    """One mount's view of a bucket and prefix. For any number of threads."""

    store: Store
    keys: Keys
    objects: Objects
    reader: Reader
    attrs: AttrRecords
    manifests: Manifests
    uploads: Uploads
    uuid: str

    def url(self, key: str) -> str:
        """A key for messages."""
        return f"s3://{self.store.bucket}/{key}"

    def each(self, job: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`job` of every item, many at once; results in order. All have ended when it raises."""
        return self.objects.each(job, items)

    # -- looking ---------------------------------------------------------------------------------

    def listed(self, prefix: str, at_once: int = 1000) -> Iterator[Listed]:
        """Everything below a key prefix, in the order of keys; asked for in pages as it is consumed.

        Keys that are directories of the store itself, not objects (SeaweedFS shows some, without an
        ETag), are left out.
        """
        token = ""
        while True:
            page = self.page(prefix, token, MaxKeys=max(2, min(at_once, 1000)))
            for item in page.get("Contents", ()):
                found = _listed(item)
                if found.token or not found.key.endswith("/"):
                    yield found
            if not page.get("IsTruncated"):
                return
            token = page["NextContinuationToken"]

    def page(self, prefix: str, token: str = "", **more: Any) -> Mapping[str, Any]:
        """One answer of ListObjectsV2."""
        if token:
            more["ContinuationToken"] = token

        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.list_objects_v2(
                Bucket=self.store.bucket, Prefix=prefix, **more
            )
            return answer

        return self.store.run(f"listing {self.url(prefix)}", ask)

    def anything(self, prefix: str) -> bool:
        """Whether there is any object below a key prefix."""
        return next(self.listed(prefix, 2), None) is not None

    def raw(self, key: str) -> Mapping[str, Any] | None:
        """The answer of HeadObject, or None when there is no such object."""

        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = client.head_object(Bucket=self.store.bucket, Key=key)
            return answer

        try:
            return self.store.run(f"looking at {self.url(key)}", ask)
        except Missing:
            return None

    def is_expected(self, path: bytes, there: Seen, expected: str | None) -> bool:
        """Whether the object at a path is the one with the token `expected`, maybe moved with its directory
        since: a copy of what came in parts has another ETag, and names the old one in its metadata (W3)."""
        if expected is None or there.token == expected:
            return there.token == expected
        head = self.raw(self.keys.key(path))
        if head is None or str(head["ETag"]).strip('"') != there.token:
            return False
        return expected in str(head.get("Metadata", {}).get(WAS, "")).split()

    # -- changing --------------------------------------------------------------------------------

    def put(self, key: str, body: bytes, what: str = "writing", **more: Any) -> str:
        """PutObject; returns the token."""

        def ask(client: Any) -> str:
            guards = self.store.guards(body)
            answer = client.put_object(Bucket=self.store.bucket, Key=key, Body=body, **guards, **more)
            return str(answer["ETag"]).strip('"')

        return self.store.run(f"{what} {self.url(key)}", ask)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys, in order up to a thousand at once; those that are not there count as deleted."""
        for first in range(0, len(keys), _PER_DELETE):
            some = keys[first : first + _PER_DELETE]
            left = self._delete_many(some) if len(some) > 1 else some
            for key in left:
                self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            self.store.run(
                f"deleting {self.url(key)}",
                lambda client: client.delete_object(Bucket=self.store.bucket, Key=key),
            )
        except Missing:
            pass  # AWS answers 204, not every store does

    def _delete_many(self, keys: Sequence[str]) -> Sequence[str]:
        """Returns the keys that are to be deleted one by one, which says clearly what is wrong with them.

        All, where the store does not have this request, or not with this client's kind of checksum.
        """
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            answer = self.store.run(
                f"deleting {len(keys)} objects of s3://{self.store.bucket}",
                lambda client: client.delete_objects(Bucket=self.store.bucket, Delete=wanted),
            )
        except TierError as exc:
            if exc.trouble is not Trouble.REFUSED:
                raise
            return keys
        return [str(item["Key"]) for item in answer.get("Errors", ()) if item.get("Code") != "NoSuchKey"]


def _listed(item: Mapping[str, Any]) -> Listed:
    return Listed(item["Key"], int(item["Size"]), str(item.get("ETag", "")).strip('"'), item["LastModified"])
