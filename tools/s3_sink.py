"""An endpoint that answers as an object store does and throws away what it gets, without even looking.

    python tools/s3_sink.py [--tls DIRECTORY]

Prints its port. For measuring what a client costs: over http the kernel drops the bodies without copying
them. With `--tls` it makes a certificate there, `ca.pem` is its authority. Ends with its standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import ssl
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

AT_ONCE = 4 << 20
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_EXPECT = re.compile(rb"\r\nexpect: *100", re.IGNORECASE)
_BEGUN = (
    b"<?xml version='1.0'?><InitiateMultipartUploadResult><UploadId>sink</UploadId>"
    b"</InitiateMultipartUploadResult>"
)
_DONE = (
    b"<?xml version='1.0'?><CompleteMultipartUploadResult><ETag>sink</ETag></CompleteMultipartUploadResult>"
)


def answer(head: bytes) -> bytes:
    """What there is to say to a request."""
    method, target = head.split(b" ", 2)[:2]
    body = b""
    if method == b"POST":
        body = _BEGUN if target.endswith(b"uploads") else _DONE
    return b'HTTP/1.1 200 OK\r\nETag: "sink"\r\nContent-Length: %d\r\n\r\n' % len(body) + body


def serve(connection: socket.socket) -> None:
    """Answer the requests of one connection until it ends."""
    space = bytearray(AT_ONCE)
    # TCP drops bytes in the kernel where it is told to cut them off (tcp(7)).
    flags = () if isinstance(connection, ssl.SSLSocket) else (socket.MSG_TRUNC,)
    got = b""
    with connection, contextlib.suppress(OSError):
        while True:
            while b"\r\n\r\n" not in got:
                more = connection.recv(65536)
                if not more:
                    return
                got += more
            head, _, got = got.partition(b"\r\n\r\n")
            if _EXPECT.search(head):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            found = _LENGTH.search(head)
            left = int(found.group(1)) if found else 0
            took = min(left, len(got))
            got, left = got[took:], left - took
            while left:
                count = connection.recv_into(space, min(left, AT_ONCE), *flags)
                if not count:
                    return
                left -= count
            connection.sendall(answer(head))


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tls", type=Path)
    args = parser.parse_args()
    context = None
    if args.tls is not None:
        from tests.s3.certificates import make_tls

        context = make_tls(args.tls).server
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            try:
                connection = context.wrap_socket(connection, server_side=True)
            except OSError:
                continue
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
