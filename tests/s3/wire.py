"""HTTP/1.1 as far as a proxy for S3 needs it, and which operation of S3 a request is."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

BLOCK = 1 << 18


class Stream:
    """A connection, read message by message. `ConnectionError` when it ends inside of one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pending = b""

    def until(self, mark: bytes) -> bytes:
        """Everything up to and with a mark; empty when the connection ended before the first byte."""
        while mark not in self.pending:
            more = self.sock.recv(BLOCK)
            if not more:
                if self.pending:
                    raise ConnectionError("the connection ended inside of a message")
                return b""
            self.pending += more
        at = self.pending.index(mark) + len(mark)
        found, self.pending = self.pending[:at], self.pending[at:]
        return found

    def some(self, limit: int) -> bytes:
        """Between 1 and `limit` bytes; empty at the end."""
        if self.pending:
            found, self.pending = self.pending[:limit], self.pending[limit:]
            return found
        return self.sock.recv(min(limit, BLOCK))

    def exactly(self, count: int) -> Iterator[bytes]:
        """`count` bytes, in pieces as they come."""
        while count:
            piece = self.some(count)
            if not piece:
                raise ConnectionError("the connection ended inside of a body")
            count -= len(piece)
            yield piece

    def idle(self) -> bool:
        """Nothing came and the other end has not closed it: fit for another request."""
        return not self.pending and not select.select([self.sock], [], [], 0)[0]


@dataclass
class Head:
    """Start line and header lines."""

    start: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        start, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        return cls(start, [(name, value.strip()) for name, _, value in (x.partition(":") for x in lines)])

    def get(self, name: str) -> str:
        """A header, empty when it is not there."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def without(self, *names: str) -> Head:
        return Head(self.start, [(key, value) for key, value in self.headers if key.lower() not in names])

    def __bytes__(self) -> bytes:
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.start.split()[1])


def body(stream: Stream, head: Head, *, to_the_end: bool = False) -> Iterator[bytes]:
    """The body as it is on the wire, in pieces (with its framing where it is chunked)."""
    if "chunked" in head.get("transfer-encoding").lower():
        while True:
            line = stream.until(b"\r\n")
            yield line
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            yield from stream.exactly(size + 2)
        while (line := stream.until(b"\r\n")) != b"\r\n":
            yield line
        yield line
    elif head.get("content-length"):
        yield from stream.exactly(int(head.get("content-length")))
    elif to_the_end:
        while piece := stream.some(BLOCK):
            yield piece


@dataclass
class Request:
    """What a client wants of the store, path-style."""

    head: Head
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    operation: str
    """As the S3 API names it: `PutObject`, `UploadPart`, ..."""

    @classmethod
    def parse(cls, raw: bytes) -> Request:
        head = Head.parse(raw)
        method, target, _ = head.start.split(" ", 2)
        url = urlsplit(target)
        bucket, _, key = url.path.lstrip("/").partition("/")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        copies = bool(head.get("x-amz-copy-source"))
        return cls(
            head, method, unquote(bucket), unquote(key), query, operation_of(method, key, query, copies)
        )

    @property
    def upload(self) -> str:
        return self.query.get("uploadId", "")

    @property
    def expects(self) -> bool:
        """The client waits for a `100 Continue` before it sends the body."""
        return self.head.get("expect").lower() == "100-continue"


def operation_of(method: str, key: str, query: dict[str, str], copies: bool) -> str:
    """The name of the operation in the S3 API."""
    if not key:
        if method == "GET":
            listing = "ListObjectsV2" if "list-type" in query else "GetBucket"
            return "ListMultipartUploads" if "uploads" in query else listing
        return "DeleteObjects" if method == "POST" and "delete" in query else method.title() + "Bucket"
    if "uploadId" in query:
        if method == "PUT":
            return "UploadPartCopy" if copies else "UploadPart"
        return {
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
            "GET": "ListParts",
        }.get(method, method)
    if method == "POST" and "uploads" in query:
        return "CreateMultipartUpload"
    if method == "PUT" and copies:
        return "CopyObject"
    return method.title() + "Object"
