"""What the answers of an object store mean. The one place where that is decided.

Codes are those of the S3 API reference ("Error responses"), and of MinIO, SeaweedFS and FlashBlade where
they differ. Everything that gets better by itself is `DOWN` and is retried for ever.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from ckptfs.tiers.base import TierError, Trouble


class Missing(TierError):
    """No such object (404)."""

    def __init__(self, message: str) -> None:
        super().__init__(Trouble.CHANGED, message, errno.ENOENT)

    def __reduce__(self) -> tuple[Any, ...]:
        return Missing, (self.message,)


class Precondition(TierError):
    """The object is not the one that `IfMatch` or `IfNoneMatch` named (412)."""

    def __init__(self, message: str) -> None:
        super().__init__(Trouble.CHANGED, message, errno.EAGAIN)

    def __reduce__(self) -> tuple[Any, ...]:
        return Precondition, (self.message,)


THROTTLED = frozenset(
    {
        "SlowDown",
        "Slowdown",
        "SlowDownRead",
        "SlowDownWrite",
        "ServiceUnavailable",
        "TooManyRequests",
        "TooManyRequestsException",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "ServerBusy",
        "Busy",
    }
)
"""The store has carried out nothing and asks for fewer requests."""

STALE_CREDENTIALS = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "TokenRefreshRequired",
        "InvalidToken",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "AccessDenied",
        "403",
    }
)
"""Answers that other credentials may change."""

_DOWN = Trouble.DOWN
_REFUSED = Trouble.REFUSED

_CODES: Mapping[str, tuple[Trouble, int, str]] = {
    "RequestTimeTooSkewed": (
        _DOWN, 0, "the clocks of this machine and of the store are more than 15 minutes apart; set the clock",
    ),
    "RequestExpired": (_DOWN, 0, "the clocks of this machine and of the store differ; set the clock"),
    "RequestTimeout": (_DOWN, errno.ETIMEDOUT, "the store waited in vain for the bytes"),
    "IncompleteBody": (_DOWN, 0, "the store got only a part of the bytes"),
    "BadDigest": (_DOWN, errno.EIO, "the bytes were damaged on the way (checksum)"),
    "XAmzContentChecksumMismatch": (_DOWN, errno.EIO, "the bytes were damaged on the way (checksum)"),
    "XAmzContentSHA256Mismatch": (_DOWN, errno.EIO, "the bytes were damaged on the way (checksum)"),
    "OperationAborted": (_DOWN, 0, "another request about the same object is under way"),
    "ConditionalRequestConflict": (_DOWN, 0, "another request about the same object is under way"),
    "InsufficientStorage": (_DOWN, errno.ENOSPC, "the store is full; make room there"),
    "XMinioStorageFull": (_DOWN, errno.ENOSPC, "the store is full; make room there"),
    "XMinioStorageQuotaExceeded": (_REFUSED, errno.EDQUOT, "the bucket's quota is used up; raise it"),
    "XMinioAdminBucketQuotaExceeded": (_REFUSED, errno.EDQUOT, "the bucket's quota is used up; raise it"),
    "QuotaExceeded": (_REFUSED, errno.EDQUOT, "the bucket's quota is used up; raise it"),
    "NoSuchBucket": (_REFUSED, errno.ENOENT, "there is no such bucket; create it, or correct the URL"),
    "InvalidBucketName": (_REFUSED, errno.EINVAL, "the store does not take this bucket name"),
    "InvalidAccessKeyId": (
        _REFUSED, errno.EACCES, "the store does not know this access key; correct the credentials",
    ),
    "InvalidClientTokenId": (
        _REFUSED, errno.EACCES, "the store does not know this access key; correct the credentials",
    ),
    "SignatureDoesNotMatch": (
        _REFUSED, errno.EACCES, "the secret key does not fit the access key; correct the credentials",
    ),
    "ExpiredToken": (_REFUSED, errno.EACCES, "the credentials have expired; renew them"),
    "ExpiredTokenException": (_REFUSED, errno.EACCES, "the credentials have expired; renew them"),
    "TokenRefreshRequired": (_REFUSED, errno.EACCES, "the credentials have expired; renew them"),
    "InvalidToken": (_REFUSED, errno.EACCES, "the session token is not valid; correct the credentials"),
    "AccessDenied": (_REFUSED, errno.EACCES, "access is denied; let this user do it"),
    "AllAccessDisabled": (_REFUSED, errno.EACCES, "access is disabled; ask who runs the store"),
    "AccountProblem": (_REFUSED, errno.EACCES, "the account has a problem; ask who runs the store"),
    "InvalidObjectState": (_REFUSED, errno.EACCES, "the object is archived; restore it at the store first"),
    "AuthorizationHeaderMalformed": (
        _REFUSED, errno.EINVAL, "the store expects another region; name it with --region",
    ),
    "IllegalLocationConstraintException": (
        _REFUSED, errno.EINVAL, "the bucket lies in another region; name it with --region",
    ),
    "PermanentRedirect": (
        _REFUSED, errno.EINVAL, "the bucket lies in another region or at another endpoint; name that",
    ),
    "TemporaryRedirect": (_DOWN, 0, "the bucket is being moved or made"),
    "EntityTooLarge": (_REFUSED, errno.EFBIG, "the store does not take objects or parts of this size"),
    "EntityTooSmall": (_REFUSED, errno.EINVAL, "the store wants larger parts; raise chunk_size"),
    "KeyTooLongError": (_REFUSED, errno.ENAMETOOLONG, "the name is too long for the store"),
    "KeyTooLong": (_REFUSED, errno.ENAMETOOLONG, "the name is too long for the store"),
    "InvalidURI": (_REFUSED, errno.EINVAL, "the store does not take this name"),
    "XMinioInvalidObjectName": (_REFUSED, errno.EINVAL, "the store does not take this name"),
    "XMinioParentIsObject": (_REFUSED, errno.ENOTDIR, "an object has the name of this directory"),
    "MetadataTooLarge": (_REFUSED, errno.E2BIG, "the store does not take that much metadata"),
    "NoSuchUpload": (Trouble.REDO, errno.ENOENT, "the upload is gone"),
    "InvalidPart": (Trouble.REDO, errno.ENODATA, "a part of the upload is gone"),
    "InvalidPartOrder": (Trouble.REDO, errno.ENODATA, "the parts of the upload are not in order"),
    "InvalidRange": (Trouble.CHANGED, errno.EINVAL, "the object is shorter than this range"),
    "NotImplemented": (_REFUSED, errno.EOPNOTSUPP, "the store does not have this operation"),
    "MethodNotAllowed": (_REFUSED, errno.EOPNOTSUPP, "the store does not allow this operation"),
}  # fmt: skip

_STATUSES: Mapping[int, tuple[Trouble, int, str]] = {
    301: _CODES["PermanentRedirect"],
    307: _CODES["TemporaryRedirect"],
    400: (_REFUSED, errno.EINVAL, "the store does not understand the request"),
    401: (_REFUSED, errno.EACCES, "the store does not accept the credentials; correct them"),
    403: _CODES["AccessDenied"],
    405: _CODES["MethodNotAllowed"],
    408: _CODES["RequestTimeout"],
    409: _CODES["OperationAborted"],
    413: _CODES["EntityTooLarge"],
    416: _CODES["InvalidRange"],
    501: _CODES["NotImplemented"],
    507: _CODES["InsufficientStorage"],
}


def code_of(exc: ClientError) -> tuple[str, int]:
    """Error code and HTTP status of an answer; for a HEAD the code is the status as text."""
    response: Mapping[str, Any] = exc.response
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status or 0)


_CONNECTION = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    HTTPError,
    ConnectionError,
    TimeoutError,
)


def throttled(exc: BaseException) -> bool:
    """The store asks for fewer requests; it did nothing."""
    if not isinstance(exc, ClientError):
        return False
    code, status = code_of(exc)
    return code in THROTTLED or code in ("429", "503") or status in (429, 503)


def unreachable(exc: BaseException) -> bool:
    """The endpoint itself is at fault: no connection, none any more, or no answer in time."""
    if isinstance(exc, ClientError):
        return code_of(exc)[1] in (502, 504)
    if find_tier_error(exc) is not None:
        return False
    return isinstance(exc, _CONNECTION)


def never_sent(exc: BaseException) -> bool:
    """There was no connection, so the request has not left: it can be sent elsewhere at once."""
    return isinstance(exc, boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.SSLError)


def stale_credentials(exc: BaseException) -> bool:
    """Other credentials may help."""
    if isinstance(exc, ClientError):
        code, status = code_of(exc)
        return code in STALE_CREDENTIALS or status in (401, 403)
    return isinstance(exc, _CREDENTIALS)


_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.ConfigNotFound,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.UnknownCredentialError,
)


def find_tier_error(exc: BaseException | None) -> TierError | None:
    """The TierError that a request body raised, however deep the client has wrapped it."""
    seen = 0
    while exc is not None and seen < 8:
        if isinstance(exc, TierError):
            return exc
        inner = getattr(exc, "kwargs", {}).get("error") if isinstance(exc, BotoCoreError) else None
        exc = inner if isinstance(inner, BaseException) else exc.__cause__ or exc.__context__
        seen += 1
    return None


def tier_error(exc: Exception, what: str) -> TierError:
    """The `TierError` for what a client raised while `what`, like `sending part 3 of s3://b/k`."""
    if isinstance(exc, ClientError):
        return _answered(exc, what)
    found = find_tier_error(exc)
    if found is not None:
        return found
    if isinstance(exc, _CREDENTIALS):
        return TierError(_REFUSED, f"{what}: {_credentials(exc)}", errno.EACCES)
    if isinstance(exc, boto.ParamValidationError | ValueError | TypeError):
        return TierError(_REFUSED, f"{what}: the request can't be made: {_line(exc)}", errno.EINVAL)
    if isinstance(exc, boto.SSLError):
        hint = "; name its certificate authority with --ca-bundle" if "CERTIFICATE_VERIFY" in str(exc) else ""
        return TierError(_DOWN, f"{what}: no TLS connection{_to(exc)}{_reason(exc)}{hint}")
    if isinstance(exc, boto.ConnectTimeoutError | boto.ReadTimeoutError):
        return TierError(_DOWN, f"{what}: no answer in time{_to(exc, 'from')}", errno.ETIMEDOUT)
    if isinstance(exc, boto.EndpointConnectionError | boto.ProxyConnectionError):
        return TierError(_DOWN, f"{what}: no connection{_to(exc)}{_reason(exc)}", errno.ECONNREFUSED)
    if isinstance(exc, boto.ConnectionClosedError):
        return TierError(_DOWN, f"{what}: the connection was cut{_to(exc)}{_reason(exc)}", errno.ECONNRESET)
    if isinstance(exc, BotoCoreError | HTTPError | OSError):
        return TierError(_DOWN, f"{what}: {_line(exc)}", getattr(exc, "errno", None) or 0)
    return TierError(_DOWN, f"{what}: {type(exc).__name__}: {_line(exc)}")


def reason_of(exc: Exception) -> str:
    """The same without saying what was being done."""
    return tier_error(exc, "").message.removeprefix(": ")


def _answered(exc: ClientError, what: str) -> TierError:
    code, status = code_of(exc)
    known = _CODES.get(code)
    if (known is None and status in (404, 412)) or code in ("NoSuchKey", "PreconditionFailed"):
        if status == 412 or code == "PreconditionFailed":
            return Precondition(f"{what}: the object there is another one")
        return Missing(f"{what}: there is no such object")
    if throttled(exc):
        return TierError(_DOWN, f"{what}: the store asks for fewer requests ({code or status})", errno.EBUSY)
    if known is None:
        default = (_REFUSED, errno.EINVAL, "the store refuses it")
        if not 400 <= status < 500:
            default = (_DOWN, 0, "the store has a problem")
        known = _STATUSES.get(status, default)
    trouble, number, sentence = known
    said = _line(str(exc.response.get("Error", {}).get("Message", "")))
    shown = f"{code}: {said}" if said and said != code else code or f"HTTP {status}"
    return TierError(trouble, f"{what}: {sentence} ({shown})", number)


def _credentials(exc: Exception) -> str:
    if isinstance(exc, boto.NoCredentialsError):
        return (
            "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to"
            " ~/.aws/credentials and choose them with --profile"
        )
    return f"the credentials can't be used: {_line(exc)}"


def _to(exc: BotoCoreError, word: str = "to") -> str:
    """` to http://host:port`, where the exception tells."""
    parts = urlsplit(str(getattr(exc, "kwargs", {}).get("endpoint_url") or ""))
    return f" {word} {parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


def _reason(exc: BotoCoreError) -> str:
    """What the operating system said, in brackets; the texts of the libraries between repeat the request."""
    inner: BaseException | None = getattr(exc, "kwargs", {}).get("error")
    for _ in range(8):
        if inner is None:
            return ""
        if isinstance(inner, ssl.SSLError):
            return f" ({_line(getattr(inner, 'verify_message', '') or inner.reason or inner)})"
        if isinstance(inner, OSError) and inner.strerror:
            return f" ({inner.strerror})"
        further = [item for item in inner.args if isinstance(item, BaseException)]
        inner = further[0] if further else inner.__cause__ or inner.__context__
    return ""


def _line(text: object) -> str:
    """One line, at most 300 characters, without a full stop."""
    line = " ".join(str(text).split()).rstrip(".")
    return line if len(line) <= 300 else line[:297] + "..."
