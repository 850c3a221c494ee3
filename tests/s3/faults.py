"""What a proxy makes go wrong, on demand."""

from __future__ import annotations

import hashlib
import html
import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.s3.wire import Head, Request


@dataclass
class Fault:
    """One thing that goes wrong with requests that match. Nothing of it is set by default.

    Byte positions count from the start of a body.
    """

    operation: str = ""
    """Regular expression for the whole name of the operation; empty for all."""
    key: str = ""
    """Regular expression found in the key."""
    times: int = -1
    """So often; -1 for ever."""
    skip: int = 0
    """Not the first ones."""

    answer: tuple[int, str] | None = None
    """Answer with this status and error code; the store hears nothing of it."""
    lose_answer: bool = False
    """The store does it; the client gets a reset connection instead of the answer."""
    cut: int | None = None
    """The connection is reset after so many bytes of the request's body."""
    cut_answer: int | None = None
    """The connection is reset after so many bytes of the answer's body."""
    flip: int | None = None
    """One bit of this byte of the request's body changes on the way."""
    flip_answer: int | None = None
    """One bit of this byte of the answer's body changes on the way."""
    delay: float = 0.0
    """Seconds before the request is passed on."""

    hits: int = 0
    before: Callable[[Request], Any] | None = None
    """Called when it strikes, before anything else."""

    def matches(self, request: Request) -> bool:
        return re.fullmatch(self.operation or ".*", request.operation) is not None and (
            re.search(self.key, request.key) is not None
        )


NONE = Fault()


class Faults:
    """The faults in force, of one proxy or of several together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Fault] = []

    def add(self, **what: Any) -> Fault:
        """Make something go wrong from now on. `.hits` of the result counts how often it did."""
        fault = Fault(**what)
        with self._lock:
            self._all.append(fault)
        return fault

    def end(self, fault: Fault | None = None) -> None:
        """Nothing goes wrong in this way any more, or at all."""
        with self._lock:
            self._all = [one for one in self._all if fault is not None and one is not fault]

    def strike(self, request: Request) -> Fault:
        """What goes wrong with this request."""
        with self._lock:
            for fault in self._all:
                if fault.matches(request) and fault.times != fault.hits:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.hits += 1
                    break
            else:
                return NONE
        if fault.before is not None:
            fault.before(request)
        return fault


def error(status: int, code: str) -> tuple[Head, bytes]:
    """An answer as S3 gives it when it refuses."""
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>'
        f"<Message>{code}, says the proxy</Message><RequestId>1</RequestId></Error>"
    )
    return answer(status, text.encode())


def answer(status: int, data: bytes) -> tuple[Head, bytes]:
    """An answer with an XML body."""
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(data)))]
    return Head(f"HTTP/1.1 {status} Whatever", headers), data


@dataclass
class Ranking:
    """Ranks writes to a key as AWS does: a multipart upload by its *creation*.

    A Complete after a later PUT, DELETE or Complete of the same key answers 200, and the object that the
    later one made stays (https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html,
    "Concurrent multipart upload operations"; the same in Garage). SeaweedFS keeps the last Complete.
    """

    abort: Callable[[str, str, str], Any]
    """Drops an upload of (bucket, key, id) at the store."""
    trapped: list[str] = field(default_factory=list)
    """Keys of objects that were discarded."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clock: Any = field(default_factory=lambda: itertools.count(1))
    _created: dict[str, int] = field(default_factory=dict)
    _written: dict[tuple[str, str], int] = field(default_factory=dict)

    def now(self) -> int:
        """The rank of a request that comes in now."""
        with self._lock:
            return int(next(self._clock))

    def discards(self, request: Request, data: bytes) -> tuple[Head, bytes] | None:
        """The answer to a Complete that comes too late, None for one that counts."""
        where = (request.bucket, request.key)
        with self._lock:
            created = self._created.get(request.upload)
            if created is None or created > self._written.get(where, 0):
                return None
            self.trapped.append(request.key)
            del self._created[request.upload]
        self.abort(request.bucket, request.key, request.upload)
        etags = re.findall(rb"<ETag>(?:&quot;|&#34;|\")?([0-9a-f]{32})(?:&quot;|&#34;|\")?</ETag>", data)
        whole = hashlib.md5(b"".join(bytes.fromhex(etag.decode()) for etag in etags)).hexdigest()
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>\n<CompleteMultipartUploadResult>'
            f"<Bucket>{request.bucket}</Bucket><ETag>&quot;{whole}-{len(etags)}&quot;</ETag>"
            "</CompleteMultipartUploadResult>"
        )
        return answer(200, text.encode())

    def done(self, request: Request, rank: int, sent: bytes, got: bytes) -> None:
        """A write that the store has confirmed; `rank` is its `now()` when it came in."""
        keys = [request.key]
        if request.operation == "CreateMultipartUpload":
            found = re.search(rb"<UploadId>([^<]+)</UploadId>", got)
            if found is not None:
                with self._lock:
                    self._created[found[1].decode()] = rank
            return
        if request.operation == "DeleteObjects":
            keys = [html.unescape(key.decode()) for key in re.findall(rb"<Key>([^<]*)</Key>", sent)]
        with self._lock:
            if request.operation == "CompleteMultipartUpload":
                rank = self._created.pop(request.upload, rank)
            for key in keys:
                where = (request.bucket, key)
                self._written[where] = max(rank, self._written.get(where, 0))
