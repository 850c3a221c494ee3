"""PutObject for many small objects in a row, at a third of the CPU time.

Small objects are published one after the other, each after the answer about the one before (R2), and half of
what that takes is botocore: it resolves, serialises and signs every request from the start. Here it makes the
first of a kind. The others are made from that one: with other values in the headers that say what is put,
and signed anew (Signature Version 4, AWS General Reference, "Signing AWS API requests").

That is only done while this module, given botocore's own request, comes to botocore's own signature; and what
is not simply taken by the store is asked for once more in the ordinary way, which says what is wrong.
"""

from __future__ import annotations

import hmac
import re
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlsplit
from weakref import WeakKeyDictionary

from botocore.awsrequest import AWSPreparedRequest

Arguments = Mapping[str, Any]
"""Of `put_object`."""

_HEADERS = {
    "ContentType": "content-type",
    "IfNoneMatch": "if-none-match",
    "IfMatch": "if-match",
    "ChecksumCRC32": "x-amz-checksum-crc32",
    "ContentMD5": "content-md5",
}
_OTHERS = frozenset({"Bucket", "Key", "Body", "Metadata"})
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/([0-9]{8})/([^/]+)/s3/aws4_request, "
    r"SignedHeaders=([^,]+), Signature=([0-9a-f]{64})\Z"
)
_PLAIN = re.compile(r"[!-~]+(?: [!-~]+)*\Z")
"""Header values that stay as they are when they are signed."""
_REFUSED = frozenset({400, 403})
"""Answers to a request that was not made right; also to others."""

_making = threading.local()
_lock = threading.Lock()
_known: WeakKeyDictionary[Any, dict[Any, _Pattern | None]] = WeakKeyDictionary()
"""By client: requests by their kind; None: to be made in the ordinary way."""


def put_object(client: Any, arguments: Arguments) -> Mapping[str, Any]:
    """The answer of `client.put_object(**arguments)`, `ETag` and what there is about encryption at least.
    `Body` is bytes. Raises what botocore raises."""
    pattern = _pattern(client, arguments)
    request = pattern.request(arguments) if pattern is not None else None
    status = 0
    if pattern is not None and request is not None:
        response = pattern.session.send(request)
        status, headers = response.status_code, response.headers
        if status == 200 and "etag" in headers:
            return {
                "ETag": headers["etag"],
                "ServerSideEncryption": headers.get("x-amz-server-side-encryption", ""),
                "SSECustomerAlgorithm": headers.get("x-amz-server-side-encryption-customer-algorithm", ""),
            }
    answer: Mapping[str, Any] = client.put_object(**arguments)
    if status in _REFUSED:
        with _lock:  # the store takes botocore's and not ours
            _known[client] = dict.fromkeys(_known.get(client, ()))
    return answer


def _pattern(client: Any, arguments: Arguments) -> _Pattern | None:
    kind = (*sorted(arguments), *sorted(arguments.get("Metadata", ())))
    with _lock:
        kinds = _known.setdefault(client, {})
        if kind in kinds:
            return kinds[kind]
    made = _first(client, arguments)
    with _lock:
        return kinds.setdefault(kind, made)


# -- the first of a kind -------------------------------------------------------------------------


class _Made(Exception):
    """Carries a finished request out of botocore, before it is sent."""

    def __init__(self, request: Any) -> None:
        super().__init__("made, not sent")
        self.request = request


def _hold(request: Any, **_: Any) -> None:
    """botocore's event `before-send`."""
    if getattr(_making, "on", False):
        raise _Made(request)


def _first(client: Any, arguments: Arguments) -> _Pattern | None:
    """What others are made from; None when this can't be done with this client."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    signer = getattr(client, "_request_signer", None)
    credentials = getattr(signer, "_credentials", None)
    if session is None or credentials is None or not set(arguments) <= _OTHERS | _HEADERS.keys():
        return None
    client.meta.events.register("before-send.s3.PutObject", _hold, unique_id="ckptfs-quick")
    _making.on = True
    try:
        client.put_object(**arguments)
    except _Made as made:
        request = made.request
    finally:
        _making.on = False
    headers = {_text(name).lower(): _text(value) for name, value in request.headers.items()}
    match = _AUTHORIZATION.match(headers.pop("authorization", ""))
    path = quote(str(arguments["Key"]), safe="/~")
    url = urlsplit(request.url)
    if match is None or url.query or not request.url.endswith("/" + path):
        return None
    headers.setdefault("host", url.netloc)
    region, signed = match.group(3), tuple(match.group(4).split(";"))
    base = request.url[: -len(path)]
    pattern = _Pattern(session, credentials, base, headers, region, signed)
    frozen = credentials.get_frozen_credentials()
    if headers.get("x-amz-content-sha256") != "UNSIGNED-PAYLOAD" or frozen.access_key != match.group(1):
        return None
    try:
        signature = pattern.signature(headers, url.path, frozen.secret_key)
    except KeyError:
        return None
    return pattern if signature == match.group(5) else None


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


# -- the others ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One request of a kind."""

    session: Any
    credentials: Any
    base: str
    """The URL without the key."""
    headers: Mapping[str, str]
    """By lower-case name, without `authorization`."""
    region: str
    signed: tuple[str, ...]
    """Names of the headers that are signed, in order."""

    def request(self, arguments: Arguments) -> Any:
        """The request for other arguments of the kind; None when that is better left to botocore."""
        headers = dict(self.headers)
        for name, header in _HEADERS.items():
            if name in arguments:
                headers[header] = str(arguments[name])
        for name, value in arguments.get("Metadata", {}).items():
            headers[f"x-amz-meta-{name.lower()}"] = str(value)
        credentials = self.credentials.get_frozen_credentials()
        if (credentials.token or None) != headers.get("x-amz-security-token"):
            if not credentials.token or "x-amz-security-token" not in headers:
                return None
            headers["x-amz-security-token"] = credentials.token
        if not all(_PLAIN.match(headers[name]) for name in self.signed):
            return None
        headers["content-length"] = str(len(arguments["Body"]))
        headers["x-amz-date"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        if "amz-sdk-invocation-id" in headers:
            headers["amz-sdk-invocation-id"] = str(uuid.uuid4())
        url = self.base + quote(str(arguments["Key"]), safe="/~")
        signature = self.signature(headers, urlsplit(url).path, credentials.secret_key)
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{self._scope(headers)}, "
            f"SignedHeaders={';'.join(self.signed)}, Signature={signature}"
        )
        return AWSPreparedRequest("PUT", url, headers, arguments["Body"], False)

    def _scope(self, headers: Mapping[str, str]) -> str:
        return f"{headers['x-amz-date'][:8]}/{self.region}/s3/aws4_request"

    def signature(self, headers: Mapping[str, str], path: str, secret: str) -> str:
        """Of a PUT without a query."""
        lines = "".join(f"{name}:{headers[name]}\n" for name in self.signed)
        canonical = f"PUT\n{path}\n\n{lines}\n{';'.join(self.signed)}\n{headers['x-amz-content-sha256']}"
        hashed = sha256(canonical.encode()).hexdigest()
        scope = self._scope(headers)
        key = f"AWS4{secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{hashed}"
        return hmac.digest(key, text.encode(), "sha256").hex()
