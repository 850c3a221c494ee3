"""The place in a bucket where a probe works: requests by name, and everything they made removed again."""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from botocore.exceptions import ClientError

from ckptfs.tiers.base import TierError
from ckptfs.tiers.s3_client import Missing, Store
from ckptfs.tiers.s3_errors import throttled
from ckptfs.tiers.s3_keys import Keys

Answer = Mapping[str, Any]

PREFIX = "probe-"
"""Below `.ckptfs/`, what the names of scratch places begin with."""
OLD = timedelta(hours=1)
"""A probe whose objects are older does not run any more: they are removed by the next."""


class State(enum.Enum):
    """How well something is."""

    OK = "ok"
    NO = "no"
    """Missing; ckptfs does without."""
    NOTE = "note"
    """Neither good nor bad."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of what a probe found."""

    name: str
    state: State
    text: str


class Scratch:
    """Requests below one fresh key prefix of our own. For several threads."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._all = keys.own(PREFIX)
        self.home = keys.own(PREFIX + secrets.token_hex(8)) + "/"
        """What all keys begin with."""
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], None] = {}
        self._uploads: dict[tuple[str, str], None] = {}

    @property
    def bucket(self) -> str:
        """The bucket."""
        return self._store.bucket

    def ask(self, method: str, name: str = "", **params: Any) -> Answer:
        """A request of this name about the key `name` of the scratch place. TierError as from `Store.run`."""
        if name:
            params["Key"] = self.home + name
        key = str(params.get("Key", ""))
        verb = "".join(word.capitalize() for word in method.split("_"))

        def job(client: Any) -> Answer:
            answer: Answer = getattr(client, method)(Bucket=self.bucket, **params)
            if method == "get_object":
                answer = {**answer, "Body": answer["Body"].read()}
            return answer

        if method in ("put_object", "copy_object", "complete_multipart_upload"):
            # Even a request that failed may have been carried out.
            self._made(self._objects, key)
        answer = self._store.run(f"{verb} s3://{self.bucket}/{key or params.get('Prefix', '')}", job)
        if method == "create_multipart_upload":
            self._made(self._uploads, key, answer["UploadId"])
        elif method in ("complete_multipart_upload", "abort_multipart_upload"):
            with self._lock:
                self._uploads.pop((key, params["UploadId"]), None)
        if answer.get("VersionId"):
            self._made(self._objects, key, answer["VersionId"])
        for item in answer.get("Deleted", ()):
            if item.get("DeleteMarkerVersionId"):
                self._made(self._objects, item["Key"], item["DeleteMarkerVersionId"])
        return answer

    def refusal(self, method: str, name: str, **params: Any) -> TierError | None:
        """How the store refused a request; None when it took it. Anything else is raised as by `ask`."""
        try:
            self.ask(method, name, **params)
        except TierError as exc:
            return refused(exc)
        return None

    def _made(self, what: dict[tuple[str, str], None], key: str, mark: str = "") -> None:
        with self._lock:
            what[key, mark] = None

    def clean(self) -> str:
        """Remove what was made, and what probes of others left long ago; returns what could not be."""
        trouble: list[str] = []
        uploads = [*self._uploads, *self._old_uploads()]
        for key, upload_id in uploads:
            self._try(trouble, "abort_multipart_upload", Key=key, UploadId=upload_id)
        versions = {(key, version) for key, version in self._objects if version and version != "null"}
        for key, version in versions:
            self._try(trouble, "delete_object", Key=key, VersionId=version)
        plain = {key for key, _ in self._objects} - {key for key, _ in versions}
        for key in [*plain, *self._old_objects()]:
            self._try(trouble, "delete_object", Key=key)
        if not trouble:
            try:
                left = [
                    item["Key"] for item in self.ask("list_objects_v2", Prefix=self.home).get("Contents", ())
                ]
            except TierError:
                left = []
            trouble = left
        return "; ".join(trouble[:3])

    def _try(self, trouble: list[str], method: str, **params: Any) -> None:
        try:
            self.ask(method, **params)
        except Missing:
            pass
        except TierError as exc:
            if "NoSuchUpload" not in exc.message:
                trouble.append(exc.message)

    def _old_objects(self) -> Iterable[str]:
        try:
            found = self.ask("list_objects_v2", Prefix=self._all).get("Contents", ())
        except TierError:
            return []
        return [item["Key"] for item in found if _old(item["LastModified"])]

    def _old_uploads(self) -> Iterable[tuple[str, str]]:
        try:
            found = self.ask("list_multipart_uploads", Prefix=self._all).get("Uploads", ())
        except TierError:
            return []
        return [
            (item["Key"], item["UploadId"])
            for item in found
            if item["Key"].startswith(self._all) and _old(item.get("Initiated"))
        ]


def refused(exc: TierError) -> TierError:
    """`exc`, if it is the store's answer to the request; else it is raised."""
    if isinstance(exc.__cause__, ClientError) and not throttled(exc.__cause__):
        return exc
    raise exc


def _old(date: datetime | None) -> bool:
    return date is not None and datetime.now(timezone.utc) - date > OLD
