"""A proxy between clients and a real store, which counts requests and makes things go wrong on demand.

It passes bytes on as they come, both ways. The `Host` header stays the client's, so signatures hold.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.s3.faults import Fault, Faults, Ranking, error
from tests.s3.servers import Server
from tests.s3.wire import Head, Request, Stream, body

WRITES = frozenset(("PutObject", "CopyObject", "DeleteObject", "DeleteObjects", "CompleteMultipartUpload"))
"""Operations that change what a key holds."""
BUFFERED = frozenset(("DeleteObjects", "CompleteMultipartUpload"))
"""Operations whose small request bodies are read whole first."""


class Cut(Exception):
    """The connection to the client is to be reset."""


@dataclass(frozen=True)
class Seen:
    """One request that was answered; `status` 0 when the client got no answer."""

    at: float
    operation: str
    key: str
    status: int
    upload: str


class Proxy:
    """One listening port in front of a store. With `tls`, clients speak https to it.

    Several proxies of one store share `faults` and `ranking` if they are given the same.
    """

    def __init__(
        self,
        server: Server,
        *,
        tls: ssl.SSLContext | None = None,
        faults: Faults | None = None,
        ranking: Ranking | None = None,
    ) -> None:
        url = urlsplit(server.endpoint)
        self.upstream = (str(url.hostname), int(url.port or 80))
        self.tls = tls
        self.faults = faults or Faults()
        self.ranking = ranking
        self.counts: Counter[str] = Counter()
        """Requests by operation."""
        self.part_bytes = 0
        """Bytes of the bodies of UploadPart that came in."""
        self.seen: deque[Seen] = deque(maxlen=200_000)
        self.rate = 0.0
        """Bytes per second and connection each way, 0 for as fast as it goes."""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.up()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.down()

    # -- up and down -------------------------------------------------------------------------------

    def up(self) -> None:
        """Listen, on the same port as before."""
        if self._listener is not None:
            return
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen(256)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        """Like a machine that lost its power: no connection is left, no new one is taken."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._open)
        for one in connections:
            reset(one)

    def clear(self) -> None:
        """Forget what was counted."""
        self.counts.clear()
        self.seen.clear()
        self.part_bytes = 0

    # -- connections -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        raw = sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                sock.settimeout(30)
                sock = self.tls.wrap_socket(sock, server_side=True)
                sock.settimeout(None)
        except OSError:
            raw.close()
            return
        with self._lock:
            self._open.add(sock)
        line = Line(self, Stream(sock))
        try:
            while line.one():
                pass
        except Cut:
            reset(sock)
        except (OSError, ValueError):  # either end went away, maybe in the middle of a line
            reset(sock)
        finally:
            with self._lock:
                self._open.discard(sock)
            line.close()
            sock.close()

    def count(self, request: Request) -> None:
        with self._lock:
            self.counts[request.operation] += 1

    def note(self, request: Request, status: int) -> None:
        self.seen.append(Seen(time.time(), request.operation, request.key, status, request.upload))

    def count_part(self, size: int) -> None:
        with self._lock:
            self.part_bytes += size


class Line:
    """One client's connection and ours to the store behind it."""

    def __init__(self, proxy: Proxy, client: Stream) -> None:
        self.proxy, self.client = proxy, client
        self.store: Stream | None = None

    def close(self) -> None:
        if self.store is not None:
            self.store.sock.close()

    def one(self) -> bool:
        """One request and its answer. Whether another may follow."""
        raw = self.client.until(b"\r\n\r\n")
        if not raw:
            return False
        request = Request.parse(raw)
        self.proxy.count(request)
        fault = self.proxy.faults.strike(request)
        if fault.delay:
            time.sleep(fault.delay)
        if fault.answer is not None:
            return self.refuse(request, *error(*fault.answer))
        ranking = self.proxy.ranking
        rank = ranking.now() if ranking is not None else 0
        sent = self.read_small(request)
        if ranking is not None and request.operation == "CompleteMultipartUpload":
            late = ranking.discards(request, sent)
            if late is not None:
                return self.tell(request, fault, *late)
        store = self.connect()
        self.pass_on(store, request, fault, sent)
        head = self.answer_of(store)
        got = b""
        small = request.operation == "CreateMultipartUpload"
        if small:
            got = b"".join(body(store, head))
        if ranking is not None and head.status < 300 and (small or request.operation in WRITES):
            ranking.done(request, rank, sent, got)
        self.pass_back(store, request, fault, head, got if small else None)
        closing = "close" in (head.get("connection").lower(), request.head.get("connection").lower())
        if closing:
            store.sock.close()
            self.store = None
        return not closing

    # -- answers of our own ------------------------------------------------------------------------

    def refuse(self, request: Request, head: Head, data: bytes) -> bool:
        """Answer without the store, and without the body where the client waits before it sends it."""
        if not request.expects:
            for _ in body(self.client, request.head):
                pass
        return self.tell(request, Fault(), head, data, close=request.expects)

    def tell(self, request: Request, fault: Fault, head: Head, data: bytes, *, close: bool = False) -> bool:
        if fault.lose_answer:
            self.proxy.note(request, 0)
            raise Cut
        if close:
            head.headers.append(("Connection", "close"))
        self.proxy.note(request, head.status)
        self.client.sock.sendall(bytes(head) + (b"" if request.method == "HEAD" else data))
        return not close

    # -- passing on --------------------------------------------------------------------------------

    def connect(self) -> Stream:
        """A connection to the store that is fit for a request."""
        if self.store is not None and not self.store.idle():
            self.store.sock.close()
            self.store = None
        if self.store is None:
            sock = socket.create_connection(self.proxy.upstream)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.store = Stream(sock)
        return self.store

    def continue_(self, request: Request) -> None:
        if request.expects:
            self.client.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def read_small(self, request: Request) -> bytes:
        """The body of a request whose content matters here."""
        if request.operation not in BUFFERED:
            return b""
        self.continue_(request)
        return b"".join(body(self.client, request.head))

    def pass_on(self, store: Stream, request: Request, fault: Fault, sent: bytes) -> None:
        """The request, to the store."""
        # We said `100 Continue` ourselves; the header is no part of what is signed.
        store.sock.sendall(bytes(request.head.without("expect")))
        if request.operation in BUFFERED:
            pieces = iter((sent,) if sent else ())
        else:
            self.continue_(request)
            pieces = body(self.client, request.head)
        deaf = False
        for piece in self.harmed(pieces, fault.flip, fault.cut):
            if request.operation == "UploadPart":
                self.proxy.count_part(len(piece))
            try:
                if not deaf:
                    store.sock.sendall(piece)
            except OSError:
                deaf = True  # it has answered already; the client must be rid of the rest to hear it

    def answer_of(self, store: Stream) -> Head:
        """The answer's head, without those that only announce it."""
        while True:
            raw = store.until(b"\r\n\r\n")
            if not raw:
                raise Cut
            head = Head.parse(raw)
            if head.status >= 200:
                return head

    def pass_back(self, store: Stream, request: Request, fault: Fault, head: Head, got: bytes | None) -> None:
        """The answer, to the client. `got` is its body where it was read already."""
        empty = request.method == "HEAD" or head.status in (204, 304)
        pieces: Iterator[bytes] = iter((got,)) if got is not None else body(store, head, to_the_end=True)
        if empty:
            pieces = iter(())
        if fault.lose_answer:
            for _ in pieces:
                pass
            self.proxy.note(request, 0)
            raise Cut
        self.proxy.note(request, head.status)
        self.client.sock.sendall(bytes(head))
        for piece in self.harmed(pieces, fault.flip_answer, fault.cut_answer):
            self.client.sock.sendall(piece)

    def harmed(self, pieces: Iterator[bytes], flip: int | None, cut: int | None) -> Iterator[bytes]:
        """The pieces of a body, with one bit changed, or ended early, or slow."""
        at = 0
        for piece in pieces:
            if self.proxy.rate:
                time.sleep(len(piece) / self.proxy.rate)
            if cut is not None and at + len(piece) > cut:
                yield piece[: cut - at]
                raise Cut
            if flip is not None and at <= flip < at + len(piece):
                changed = bytearray(piece)
                changed[flip - at] ^= 1
                piece = bytes(changed)
            yield piece
            at += len(piece)


def reset(sock: socket.socket) -> None:
    """End a connection so that the other end sees an error, not an end. Wakes who waits for it here."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RD)
    with contextlib.suppress(OSError):
        sock.close()


def ranking_of(server: Server) -> Ranking:
    """A ranking for proxies of a store."""

    def abort(bucket: str, key: str, upload: str) -> Any:
        return server.client().abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)

    return Ranking(abort)
