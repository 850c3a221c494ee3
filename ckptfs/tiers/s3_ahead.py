"""Small objects in a row: the request for the next one is made while the store works on the one before.

Small objects are published one after the other, each after the answer about the one before (R2), so the
time between two requests counts. Half of it goes into making a request: botocore resolves, serialises and
signs. That is done ahead here, in another thread; nothing is *sent* ahead. What does not go smoothly is asked
for once more in the ordinary way, which says what is wrong: a PutObject that was done is recognised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
"""Of `put_object`."""

_FRESH = 60.0
"""Seconds that a signature is used for; stores take it for 15 minutes."""
_making = threading.local()


class _Made(Exception):
    """Carries a finished request out of botocore, before it is sent."""

    def __init__(self, request: Any) -> None:
        super().__init__("made, not sent")
        self.request = request


def _hold(request: Any, **_: Any) -> None:
    """botocore's event `before-send`."""
    if getattr(_making, "ahead", False):
        raise _Made(request)


def _make(client: Any, following: Callable[[], Arguments | None]) -> tuple[Arguments, Any] | None:
    """What is to be put next, and the signed request for it, not sent."""
    arguments = following()
    if arguments is None:
        return None
    client.meta.events.register("before-send.s3.PutObject", _hold, unique_id="ckptfs-ahead")
    _making.ahead = True
    try:
        client.put_object(**arguments)
    except _Made as made:
        return arguments, made.request
    finally:
        _making.ahead = False
    return None


@dataclass(slots=True)
class _Waiting:
    """A request that is being made for later."""

    client: Any
    made: Future[tuple[Arguments, Any] | None]
    since: float


class Ahead:
    """PutObject for one thread that makes many of them one after the other."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._waiting: _Waiting | None = None

    def put(
        self, client: Any, arguments: Arguments, following: Callable[[], Arguments | None]
    ) -> Mapping[str, Any]:
        """The answer of `put_object`. `following` tells, in another thread, what will be put next."""
        request = self._made(client, arguments)
        self._waiting = _Waiting(client, self._pool.submit(_make, client, following), time.monotonic())
        answer = _send(client, request) if request is not None else None
        if answer is not None:
            return answer
        plain: Mapping[str, Any] = client.put_object(**arguments)
        return plain

    def wait(self) -> None:
        """Until the other thread is done with what was to be put next."""
        if self._waiting is not None:
            wait([self._waiting.made])

    def _made(self, client: Any, arguments: Arguments) -> Any:
        """The request that was made for exactly this, or None."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        try:
            made = waiting.made.result()
        except Exception:
            return None  # the ordinary way says what is wrong
        fresh = waiting.client is client and time.monotonic() - waiting.since < _FRESH
        return made[1] if fresh and made is not None and made[0] == arguments else None


def _send(client: Any, request: Any) -> Mapping[str, Any] | None:
    """Send a finished request; None unless the store took the object. Raises what botocore raises when
    there is no answer."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    if session is None:
        return None
    response = session.send(request)
    headers = response.headers
    if response.status_code != 200 or "etag" not in headers:
        return None
    return {
        "ETag": headers["etag"],
        "ServerSideEncryption": headers.get("x-amz-server-side-encryption", ""),
        "SSECustomerAlgorithm": headers.get("x-amz-server-side-encryption-customer-algorithm", ""),
    }
