"""A worker process: `python -m ckptfs.flush.worker FD PARENT_PID`.

It inherits one end of a socket pair as FD, is told by `Setup` which tier to open, and then answers
every `Call` with one `Reply` until the other end closes. It holds no state worth keeping: it may
be killed at any time. Byte-moving calls, local jobs and all others have a thread pool each, so that
a publish or a listing never queues behind bytes, and a spill or a clone never behind a tier that hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ckptfs.errors import CkptfsError
from ckptfs.flush import local
from ckptfs.flush.wire import HEADER, Call, Reply, Setup, decode, encode
from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.linux import die_with_parent

if TYPE_CHECKING:
    from ckptfs.tiers.base import Tier

DATA_METHODS = frozenset({"send", "send_small", "fetch", *local.JOBS})
"""Calls that move bytes."""
TIER_METHODS = DATA_METHODS - frozenset(local.JOBS) | frozenset(
    {
        "probe",
        "begin",
        "apply",
        "listdir",
        "stat",
        "digests",
        "read",
        "space",
        "abandon",
        "sweep",
    }
)
OTHER_THREADS = 8

_log = logging.getLogger("ckptfs.worker")


class Worker:
    """Serves one connection. `run` returns at its end; calls may then still be running."""

    def __init__(self, connection: socket.socket, setup: Setup) -> None:
        self._connection = connection
        self._setup = setup
        self._options = dict(setup.options)
        self._tier: Tier | None = None
        self._tier_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._data = ThreadPoolExecutor(max(1, setup.threads), "data")
        self._local = ThreadPoolExecutor(max(1, setup.threads), "local")
        self._other = ThreadPoolExecutor(OTHER_THREADS, "other")

    def run(self) -> None:
        """Take calls until the connection ends."""
        while (body := receive(self._connection)) is not None:
            call = decode(body)
            if call.method in local.JOBS:
                pool = self._local
            else:
                pool = self._data if call.method in DATA_METHODS else self._other
            pool.submit(self._answer, call)

    def _answer(self, call: Call) -> None:
        try:
            frame = encode(Reply(call.id, self._do(call)))
        except TierError as exc:
            frame = encode(Reply(call.id, error=exc))
        except BaseException as exc:
            _log.exception("call %s failed", call.method)
            frame = encode(Reply(call.id, error=_unexpected(call.method, exc)))
        try:
            with self._send_lock:
                self._connection.sendall(frame)
        except OSError:
            pass  # main is gone; `run` sees the end of the connection

    def _do(self, call: Call) -> Any:
        job = local.JOBS.get(call.method)
        if job is not None:
            return job(*call.args)
        if call.method == "ping":
            return os.getpid()
        if call.method == "bind":
            return self._bind(*call.args)
        if call.method not in TIER_METHODS:
            raise TierError(Trouble.REFUSED, f"a worker has no method {call.method!r}")
        return getattr(self._opened(), call.method)(*call.args)

    def _bind(self, tier_id: str, caps: str) -> None:
        """From now on accept only the tier with this identity, and use it as its probe found it."""
        found = {"tier_id": tier_id, "caps": caps}
        with self._tier_lock:
            if found.items() - self._options.items():
                self._options.update(found)
                self._tier = None

    def _opened(self) -> Tier:
        """The tier; one that cannot be opened is tried again at the next call."""
        with self._tier_lock:
            if self._tier is None:
                from ckptfs.tiers import open_tier

                try:
                    self._tier = open_tier(self._setup.url, self._setup.mount_uuid, self._options)
                except CkptfsError as exc:
                    raise TierError(Trouble.DOWN, exc.message) from exc
            return self._tier


def _unexpected(method: str, exc: BaseException) -> TierError:
    code = exc.errno or 0 if isinstance(exc, OSError) else 0
    return TierError(Trouble.DOWN, f"{method} failed in a worker: {type(exc).__name__}: {exc}", code)


def receive(connection: socket.socket) -> bytes | None:
    """The body of the next frame, or None at the end of the connection."""
    head = _exactly(connection, HEADER.size)
    return None if head is None else _exactly(connection, HEADER.unpack(head)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    with memoryview(data) as view:
        got = 0
        while got < size:
            try:
                count = connection.recv_into(view[got:])
            except OSError:
                return None
            if count == 0:
                return None
            got += count
    return bytes(data)


def main() -> None:
    """Entry of the process."""
    # Ends come from main alone: Ctrl-C and a service manager's SIGTERM reach the whole group, while
    # main may need its workers to drain.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr, format=f"%(asctime)s worker[{os.getpid()}] %(levelname)s %(name)s: %(message)s"
    )
    with socket.socket(fileno=fd) as connection:
        body = receive(connection)
        if body is None:
            return
        setup = decode(body)
        try:
            os.nice(setup.niceness)
        except OSError as exc:
            _log.warning("niceness %d cannot be set: %s", setup.niceness, exc.strerror)
        Worker(connection, setup).run()
    # Threads may be stuck in a tier that does not answer: do not wait for them.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
