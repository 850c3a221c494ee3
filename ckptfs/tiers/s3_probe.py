"""Finding out whether a bucket can be a tier, and what its store does right.

A store that accepts a wrong checksum verifies none, one that accepts a failing condition keeps none: so
everything that ckptfs would rely on is sent wrong on purpose once. All that it makes is below
`.ckptfs/probe-*/` and removed again; only the tier's identity, `.ckptfs/tier-id`, stays.
"""

from __future__ import annotations

import errno
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError

from ckptfs.tiers.base import TierError, TierInfo, Trouble
from ckptfs.tiers.s3_client import Capabilities, Missing, Precondition, Store
from ckptfs.tiers.s3_errors import code_of
from ckptfs.tiers.s3_keys import Keys
from ckptfs.tiers.s3_scratch import Finding, Scratch, State
from ckptfs.tiers.s3_trials import ObjectTrials, UploadTrials

LARGEST_OBJECT = 5 << 40
"""Bytes (S3 API reference, "Amazon S3 multipart upload limits")."""
TIER_ID = "tier-id"
PATIENCE = 3.0
"""Seconds that endpoints get to answer after the first has."""
SKEW_SHOWN = 5.0
"""Seconds that clocks may differ without a note; at 900 stores refuse requests."""


def probe(store: Store, keys: Keys, url: str, tier_id: str = "") -> TierInfo:
    """Probe the tier at a mount. `tier_id`: its identity, where it is known.

    TierError: REFUSED when it cannot be a tier as it is, or not with these credentials; DOWN when it does not
    answer, or is another tier than the one that is known.
    """
    return Probe(store, keys, url).run(tier_id)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one endpoint shows."""

    server: str
    skew: float | None
    """Seconds that its clock is ahead of ours, to the second."""
    took: float
    tier_id: str
    """Empty: the bucket and prefix have been no tier so far."""


class Probe:
    """One examination; `findings` fill up while `run` works, so that they show how far it came."""

    def __init__(self, store: Store, keys: Keys, url: str) -> None:
        self._store = store
        self._keys = keys
        self._url = url
        self._where = f"s3://{store.bucket}/{keys.own()[: -len('.ckptfs')].rstrip('/')}".rstrip("/")
        self._notes: list[str] = []
        self.findings: list[Finding] = []

    def run(self, tier_id: str = "", *, identify: bool = True) -> TierInfo:
        """Examine everything. Without `identify` nothing stays in the bucket, and there is no `tier_id`."""
        look = self._endpoints()
        self._compare(look.tier_id, tier_id)
        self._versioning()
        capabilities = self._trials()
        if identify:
            tier_id = look.tier_id or self._identify(capabilities)
        self._notes.insert(0, _summary(look.server, capabilities))
        notes = tuple(self._notes + _lacks(capabilities))
        return TierInfo(self._url, tier_id, True, notes, LARGEST_OBJECT, capabilities.to_json())

    def _say(self, name: str, state: State, text: str, note: str = "") -> None:
        self.findings.append(Finding(name, state, text))
        if note:
            self._notes.append(note)

    # -- endpoints and the bucket ----------------------------------------------------------------

    def _endpoints(self) -> _Look:
        """Ask every endpoint for the bucket; what the quickest one says stands for all."""
        bucket, key = self._store.bucket, self._keys.own(TIER_ID)

        def look(client: Any) -> _Look:
            started = time.time()
            page = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
            ended = time.time()
            try:
                found = client.get_object(Bucket=bucket, Key=key)["Body"].read().decode("ascii", "replace")
            except ClientError as exc:
                if code_of(exc)[1] != 404:
                    raise
                found = ""
            headers = page["ResponseMetadata"]["HTTPHeaders"]
            skew = _ahead(headers.get("date", ""), (started + ended) / 2)
            return _Look(str(headers.get("server", "")), skew, ended - started, found.strip())

        what = f"looking at {self._where}"
        answers = self._store.each_endpoint(what, look, PATIENCE)
        good: list[_Look] = []
        errors: list[TierError] = []
        for url, result in answers:
            name = f"endpoint {url}" if url else "endpoint"
            if isinstance(result, TierError):
                reason = result.message.removeprefix(f"{what}: ")
                self._say(name, State.NO, reason, f"endpoint {url} did not answer: {reason}")
                errors.append(result)
            else:
                self._say(name, State.OK, f"answers in {result.took * 1000:.0f} ms")
                good.append(result)
        for exc in sorted(errors, key=lambda error: error.trouble is not Trouble.REFUSED):
            if isinstance(exc, Missing):
                raise TierError(
                    Trouble.REFUSED, f"{exc.message}; create it, or correct the URL", errno.ENOENT
                )
            if exc.trouble is Trouble.REFUSED or not good:
                raise exc
        if len({one.tier_id for one in good}) > 1:
            raise TierError(
                Trouble.REFUSED,
                f"the endpoints of {self._where} show different buckets; name only those of one store",
                errno.EINVAL,
            )
        self._clock([one.skew for one in good if one.skew is not None])
        return min(good, key=lambda one: one.took)

    def _clock(self, skews: list[float]) -> None:
        if not skews:
            self._say("clock", State.NOTE, "the store does not tell its time")
            return
        worst = max(skews, key=abs)
        if abs(worst) < SKEW_SHOWN:
            self._say("clock", State.OK, f"within {max(1, round(abs(worst)))} s of ours")
            return
        text = f"the store's clock is {abs(worst):.0f} s {'ahead of' if worst > 0 else 'behind'} ours"
        self._say(
            "clock", State.NO, text, f"{text}: set this machine's clock, at 15 minutes it refuses requests"
        )

    def _versioning(self) -> None:
        try:
            answer = self._store.run(
                f"GetBucketVersioning s3://{self._store.bucket}",
                lambda client: client.get_bucket_versioning(Bucket=self._store.bucket),
            )
        except TierError as exc:
            if not isinstance(exc.__cause__, ClientError) or exc.trouble is Trouble.DOWN:
                raise
            self._say("versioning", State.NOTE, "can't be asked for (GetBucketVersioning)")
            return
        status = str(answer.get("Status", "")).lower() or "off"
        if status == "enabled":
            note = (
                "versioning of the bucket is on: what is replaced or removed takes space until a lifecycle"
                " rule removes it"
            )
            self._say("versioning", State.NOTE, "on", note)
        else:
            self._say("versioning", State.OK, status)

    # -- trials ----------------------------------------------------------------------------------

    def _trials(self) -> Capabilities:
        scratch = Scratch(self._store, self._keys)
        objects, uploads = ObjectTrials(scratch), UploadTrials(scratch)
        try:
            with ThreadPoolExecutor(2, "probe") as pool:
                running = pool.submit(objects.run), pool.submit(uploads.run)
                of_objects, of_parts = (future.result() for future in running)
        finally:
            self.findings += objects.findings + uploads.findings
            left = scratch.clean()
            if left:
                self._say("clean up", State.NO, left, f"the probe could not clean up after itself: {left}")
        return Capabilities(
            crc32=of_objects.crc32 and of_parts.crc32,
            crc32_listed=of_parts.crc32_listed,
            md5=of_objects.md5 and of_parts.md5,
            if_none_match=of_objects.if_none_match,
            if_match=of_objects.if_match,
            part_copy=of_parts.part_copy,
        )

    # -- identity --------------------------------------------------------------------------------

    def _compare(self, found: str, known: str) -> None:
        if known and not found:
            raise TierError(
                Trouble.DOWN,
                f"{self._where} does not hold the tier any more (no .ckptfs/{TIER_ID}): was it emptied?",
                errno.ENOENT,
            )
        if known and found != known:
            raise TierError(
                Trouble.DOWN,
                f"{self._where} is tier {found}, not {known}: another bucket has taken its place",
                errno.ENODEV,
            )

    def _identify(self, capabilities: Capabilities) -> str:
        """Give the tier its identity, unless another mount does so at the same time."""
        bucket, key = self._store.bucket, self._keys.own(TIER_ID)
        more = {"IfNoneMatch": "*"} if capabilities.if_none_match else {}
        body = secrets.token_hex(16).encode() + b"\n"
        try:
            self._store.run(
                f"writing s3://{bucket}/{key}",
                lambda client: client.put_object(
                    Bucket=bucket, Key=key, Body=body, ContentType="text/plain", **more
                ),
            )
        except Precondition:
            pass  # another mount was quicker
        found = self._store.run(
            f"reading s3://{bucket}/{key}",
            lambda client: client.get_object(Bucket=bucket, Key=key)["Body"].read(),
        )
        return str(found.decode("ascii", "replace").strip())


def _ahead(date: str, now: float) -> float | None:
    """Seconds that the time of an HTTP `Date` header is ahead of `now`; its fraction is cut off."""
    try:
        then = parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return None
    return then - now if then > now else min(0.0, then + 1 - now)


def _summary(server: str, capabilities: Capabilities) -> str:
    """One line for `ckptfs status`."""
    sums = [name for name, good in (("CRC32", capabilities.crc32), ("MD5", capabilities.md5)) if good]
    does = [f"verifies {' and '.join(sums)}"] if sums else []
    if capabilities.if_none_match and capabilities.if_match:
        does.append("conditional writes")
    if capabilities.part_copy:
        does.append("part copy")
    name = " ".join(server.split()) or "object store"
    return f"{name}: {', '.join(does) or 'none of the optional abilities'}"


def _lacks(capabilities: Capabilities) -> list[str]:
    """What is missing and what ckptfs does instead."""
    notes = []
    if not capabilities.crc32 and not capabilities.md5:
        notes.append("the store verifies no checksums: its ETags are compared with what was sent")
    elif not capabilities.crc32:
        notes.append("the store does not verify CRC32: Content-MD5 is sent instead, which costs more CPU")
    if not capabilities.if_none_match or not capabilities.if_match:
        notes.append("no conditional writes: other writers' objects are looked for before each write instead")
    if not capabilities.part_copy:
        notes.append("no part copy: renaming an object above 5 GB reads and writes it")
    return notes
