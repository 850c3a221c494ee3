"""The object tier: checkpoints as objects of a bucket, the path `a/b` as the key `prefix/a/b`.

What ckptfs adds is below `prefix/.ckptfs/`: `tier-id`, `uploads/`, `conflicts/`, `manifests/`, `attrs/`,
`moves/`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfs.tiers.base import (
    Digest,
    Draft,
    Familiar,
    Found,
    Op,
    Outcome,
    Source,
    Space,
    TierError,
    TierInfo,
    Trouble,
    Upload,
)
from ckptfs.tiers.s3_apply import Applier
from ckptfs.tiers.s3_client import Capabilities, Missing, Store
from ckptfs.tiers.s3_keys import Keys
from ckptfs.tiers.s3_objects import Objects
from ckptfs.tiers.s3_probe import TIER_ID, probe
from ckptfs.tiers.s3_read import Reader
from ckptfs.tiers.s3_records import AttrRecords, Manifests
from ckptfs.tiers.s3_site import Site
from ckptfs.tiers.s3_uploads import Uploads


class S3Tier:
    """`base.Tier` on a bucket and prefix. See there for what the methods promise.

    Concurrency: any method from any thread. What is remembered between calls only saves requests. The first
    call that needs the store makes its clients; the first one but `probe` checks, where the tier's identity
    is known, that this is the tier that was probed: when it is another one, or empty, the answer is
    `Trouble.DOWN`, never an empty listing.
    """

    def __init__(
        self,
        bucket: str,
        prefix: bytes,
        mount_uuid: str,
        *,
        url: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options`: see `s3_client.Store`; `tier_id`: the identity an earlier probe found, empty if none."""
        options = options or {}
        self._url = url
        self._tier_id = str(options.get("tier_id", ""))
        self._checked = not self._tier_id
        self._lock = threading.Lock()
        keys = Keys(prefix)
        self._store = Store(bucket, prefix, options)
        objects = Objects(self._store, keys)
        attrs, manifests = AttrRecords(self._store, keys, objects), Manifests(self._store, keys)
        self._uploads = Uploads(self._store, keys, mount_uuid)
        self._reader = Reader(self._store, keys, objects, attrs, manifests)
        self.site = Site(
            self._store,
            keys,
            objects,
            self._reader,
            attrs,
            manifests,
            self._uploads,
            mount_uuid,
        )
        self._applier = Applier(self.site)

    def _ready(self) -> None:
        """Raise DOWN unless this is the tier that is meant."""
        if self._checked:
            return
        key = self.site.keys.own(TIER_ID)
        try:
            found = self._store.run(
                f"looking at {self.site.url(key)}",
                lambda client: client.get_object(Bucket=self._store.bucket, Key=key)["Body"].read(),
            )
        except Missing as exc:
            raise TierError(
                Trouble.DOWN, f"{self._url} is empty: {self.site.url(key)} is gone; put it back", exc.errno
            ) from exc
        if found.decode("utf-8", "replace").strip() != self._tier_id:
            raise TierError(Trouble.DOWN, f"{self._url} is another tier than when it was mounted")
        self._checked = True

    def probe(self) -> TierInfo:
        """Check what the store can do, and give the tier an identity if it has none."""
        info = probe(self._store, self.site.keys, self._url, self._tier_id)
        with self._lock:
            self._tier_id, self._checked = info.tier_id, True
            self._store.capabilities = Capabilities.from_json(info.caps)
        return info

    def begin(self, draft: Draft) -> Upload:
        """Create a multipart upload; one of the same version left by an earlier try is aborted."""
        self._ready()
        return self._uploads.begin(draft)

    def send(self, upload: Upload, offset: int, source: Source) -> bytes:
        """Send a window as one part. REDO when the upload, or the staging file, is gone."""
        self._ready()
        return self._uploads.send(upload, offset, source)

    def send_small(self, batch: Sequence[tuple[Draft, Source]]) -> list[tuple[Upload, bytes]]:
        """`begin` and `send` of each. (Small versions come with their `Put` instead, see `Traits`.)"""
        sent = []
        for draft, source in batch:
            upload = self.begin(draft)
            sent.append((upload, self.send(upload, 0, source)))
        return sent

    def apply(self, ops: Sequence[Op]) -> Outcome:
        """Apply a batch; a batch that was applied before, wholly or in part, may come again."""
        self._ready()
        return self._applier.apply(ops)

    def listdir(self, path: bytes, familiar: Familiar | None = None) -> list[Found]:
        """The directory's entries, in no order. What is familiar costs no request of its own."""
        self._ready()
        return self._reader.listdir(path, familiar)

    def stat(self, path: bytes) -> Found | None:
        """The object, or directory."""
        self._ready()
        return self._reader.stat(path)

    def digests(self, path: bytes, token: str) -> tuple[Digest, ...]:
        """The digests recorded for exactly this content."""
        self._ready()
        return self._reader.digests(path, token)

    def fetch(self, path: bytes, token: str, offset: int, length: int, into: str) -> int:
        """Copy a range to the local file, which must exist."""
        self._ready()
        return self._reader.fetch(path, token, offset, length, into)

    def read(self, path: bytes, token: str, offset: int, length: int) -> bytes:
        """Return a range."""
        self._ready()
        return self._reader.read(path, token, offset, length)

    def space(self) -> Space:
        """Object stores have no such notion."""
        return Space(0, 0)

    def abandon(self, uploads: Sequence[Upload]) -> None:
        """Abort uploads."""
        self._ready()
        self._uploads.abandon(uploads)

    def sweep(self, keep: frozenset[str]) -> int:
        """Abort uploads of this mount's uuid that no journal row names."""
        self._ready()
        return self._uploads.sweep(keep)
