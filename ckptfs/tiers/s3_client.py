"""The connection to an object store: clients, endpoints, credentials; `Store.run` makes every request.

botocore's own retries are off: the flusher retries for ever, slowly, and shows what it waits for.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import boto3
import urllib3
from botocore.config import Config
from botocore.exceptions import NoCredentialsError

import ckptfs
from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.s3_body import Body, checks_of
from ckptfs.tiers.s3_errors import Missing, Precondition, stale_credentials, tier_error
from ckptfs.tiers.s3_lanes import MOST, Lane, Lanes

__all__ = ["Capabilities", "Missing", "Precondition", "Store"]

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0
"""Seconds to a connection."""
READ_TIMEOUT = 60.0
"""Seconds without a byte from the store."""
LOOK = 1.0
"""Seconds between two looks at the credential files."""
RENEW = 30.0
"""Seconds until credentials that were nowhere are looked for again in all places."""
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the store does right, as a probe found; all False until then."""

    crc32: bool = False
    """Refuses a wrong `x-amz-checksum-crc32`, for objects and for parts."""
    crc32_listed: bool = False
    """Uploads are to be created with `ChecksumAlgorithm="CRC32"`; ListParts then tells the `ChecksumCRC32` of
    each part, which CompleteMultipartUpload has to repeat (AWS). Where this is False they are not."""
    md5: bool = False
    """Refuses a wrong `Content-MD5`."""
    if_none_match: bool = False
    """`If-None-Match: *` keeps PutObject from replacing anything."""
    if_match: bool = False
    """`If-Match` keeps PutObject from replacing another object."""
    part_copy: bool = False
    """Has UploadPartCopy."""

    def to_json(self) -> str:
        """As in `TierInfo.caps`."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Capabilities:
        """What `to_json` wrote; names of other versions are left out, anything else is no capability."""
        try:
            found = json.loads(text or "{}")
        except ValueError:
            found = {}
        names = cls.__dataclass_fields__
        if not isinstance(found, dict):
            return cls()
        return cls(**{name: found.get(name) is True for name in names})


class Store:
    """One bucket and prefix of an object store.

    Concurrency: for any number of threads. Opening it touches nothing but files of the user.
    """

    def __init__(self, bucket: str, prefix: bytes, options: Mapping[str, Any]) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.capabilities = Capabilities.from_json(str(options.get("caps", "")))
        self._lanes = Lanes(str(options.get("endpoint_url", "")).split() or [""])
        self._clients = _Clients(options)

    def run(self, what: str, job: Callable[[Any], T]) -> T:
        """Run `job(client)`, which makes requests at one endpoint, and return what it returns.

        `what` opens the message of an error: `sending part 3 of s3://bucket/key`. The job may be run more
        than once, at several endpoints: after a refusal to connect, after SlowDown and with new credentials.
        A streamed answer must be read inside it. Raises `Missing`, `Precondition` or another TierError.
        """
        with self._lanes.use() as turn:
            while True:
                lane = turn.lane
                try:
                    value = job(self._clients.of(lane))
                except Exception as exc:
                    renewed = stale_credentials(exc) and self._clients.renew(exc)
                    if (renewed and turn.once("credentials")) or turn.failed(exc):
                        continue
                    raise tier_error(exc, what) from exc
                turn.succeeded()
                return value

    def guards(self, body: bytes) -> dict[str, str]:
        """Arguments of `put_object` that let the store notice a body that did not arrive whole: without them
        some keep an empty object when the sender dies in between."""
        if self.capabilities.crc32:
            return {"ChecksumCRC32": checks_of(body).crc32}
        if self.capabilities.md5:
            return {"ContentMD5": checks_of(body, md5=True).md5}
        return {}

    def each_endpoint(
        self, what: str, job: Callable[[Any], T], patience: float
    ) -> list[tuple[str, T | TierError]]:
        """Run `job` at every endpoint at once; returns (endpoint, result or error) in their order.

        `patience`: seconds that the others get once one has answered; who has not answered by then is left
        out for a while, as after an error.
        """
        found: dict[str, T | TierError] = {}
        changed = threading.Condition()

        def ask(lane: Lane) -> None:
            try:
                result: T | TierError = job(self._clients.of(lane))
            except Exception as exc:
                self._lanes.note(lane, exc)
                result = tier_error(exc, what)
            else:
                self._lanes.note(lane, None)
            with changed:
                found[lane.url] = result
                changed.notify()

        lanes = self._lanes.all
        for lane in lanes:
            # Daemons: the end of the process does not wait for an endpoint that hangs.
            threading.Thread(target=ask, args=(lane,), name="endpoint", daemon=True).start()
        with changed:
            changed.wait_for(
                lambda: len(found) == len(lanes) or any(not isinstance(r, TierError) for r in found.values())
            )
            changed.wait_for(lambda: len(found) == len(lanes), patience)
            late = TierError(Trouble.DOWN, f"{what}: no answer within {patience:g} s", errno.ETIMEDOUT)
            for lane in lanes:
                if lane.url not in found:
                    self._lanes.note(lane, TimeoutError())
            return [(lane.url, found.get(lane.url, late)) for lane in lanes]


class _Clients:
    """One client per endpoint, made anew when the credentials on disk have changed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}
        self._session: Any = None
        self._seen: tuple[Any, ...] = ()
        self._looked = 0.0
        self._since = 0.0

    def of(self, lane: Lane) -> Any:
        """The client for an endpoint. Raises what botocore raises when there can be none."""
        self.rotated()
        with self._lock:
            client = self._made.get(lane.url)
            if client is None:
                client = self._made[lane.url] = self._make(lane.url)
            return client

    def renew(self, exc: Exception) -> bool:
        """After an answer that other credentials may change: True when there may be others now."""
        if self.rotated(force=True):
            return True
        with self._lock:
            if not isinstance(exc, NoCredentialsError) or time.monotonic() - self._since < RENEW:
                return False
            # A role of the machine, or of the container, may be there by now.
            self._forget()
            return True

    def _forget(self) -> None:
        self._session = None
        self._made.clear()

    def rotated(self, force: bool = False) -> bool:
        """Look at the credential files (at most once a second unless `force`); True when they are others."""
        with self._lock:
            if not force and time.monotonic() - self._looked < LOOK:
                return False
            self._looked = time.monotonic()
            seen = _signature()
            if seen == self._seen:
                return False
            changed = self._session is not None
            self._seen = seen
            self._forget()
            return changed

    def _make(self, url: str) -> Any:
        options = self._options
        if self._session is None:
            self._since = time.monotonic()
            self._session = boto3.session.Session(profile_name=options.get("profile") or None)
        session = self._session
        verify: bool | str | None = options.get("ca_bundle") or None
        if str(options.get("verify", "true")).lower() == "false":
            verify = False
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        client = session.client(
            "s3",
            endpoint_url=url or None,
            region_name=options.get("region") or session.region_name or DEFAULT_REGION,
            verify=verify,
            config=Config(
                connect_timeout=CONNECT_TIMEOUT,
                read_timeout=READ_TIMEOUT,
                max_pool_connections=MOST,
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                tcp_keepalive=True,
                s3={"addressing_style": "path", "payload_signing_enabled": False},
                user_agent_extra=f"ckptfs/{ckptfs.__version__}",
            ),
        )
        client.meta.events.register("before-call.s3", _rewind)
        return client


def _rewind(params: Mapping[str, Any], **_: Any) -> None:
    """A job that is run again sends its body from the start."""
    body = params.get("body")
    if isinstance(body, Body):
        body.rewind()


def _signature() -> tuple[Any, ...]:
    """What tells one state of the credential files from another."""
    found: list[Any] = []
    home = os.path.expanduser("~/.aws/")
    for name, default in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        path = os.path.expanduser(os.environ.get(name) or home + default)
        try:
            status = os.stat(path)
            found.append((path, status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append((path,))
    return tuple(found)
