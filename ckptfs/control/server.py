"""The daemon's end of the control socket (docs/CONTROL.md)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import trio

from ckptfs.core import Inode
from ckptfs.engine.hub import Hub
from ckptfs.engine.publisher import Publisher
from ckptfs.engine.report import Report
from ckptfs.engine.view import View
from ckptfs.errors import CkptfsError, Exit
from ckptfs.paths import socket_address

log = logging.getLogger("ckptfs")

LINE_MAX = 1 << 20
PROGRESS_S = 0.5


class ControlServer:
    """Answers commands, also while the mount is blocked, the tier is down, or the mount is gone.

    `unmount` takes the mount away from the kernel (CkptfsError BUSY when it is in use);
    `forget_name` makes the kernel look a name up again.
    """

    def __init__(
        self,
        hub: Hub,
        publisher: Publisher,
        view: View,
        report: Report,
        unmount: Callable[[], Awaitable[None]],
        forget_name: Callable[[Inode, bytes, Inode], Awaitable[None]],
    ) -> None:
        self.hub = hub
        self.publisher = publisher
        self.view = view
        self.report = report
        self.unmount = unmount
        self.forget_name = forget_name
        self.give_up_at: float | None = None
        """When the drain ends even if something is left (trio time); None: never."""
        self.answering = 0
        """Requests whose last line is not sent yet."""

    async def run(self, path: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen on `path` for ever."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(path) as address:
            old = os.umask(0o177)
            try:
                await sock.bind(address)
            finally:
                os.umask(old)
        sock.listen(64)
        task_status.started()
        await trio.serve_listeners(self._connection, [trio.SocketListener(sock)])

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                async for request in _lines(stream):
                    self.answering += 1
                    try:
                        async with contextlib.aclosing(self._answer(request)) as answers:
                            async for answer in answers:
                                await stream.send_all(json.dumps(answer).encode() + b"\n")
                    finally:
                        self.answering -= 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone

    async def _answer(self, line: bytes) -> AsyncGenerator[dict[str, Any]]:
        try:
            request = json.loads(line)
            command = request.get("command") if isinstance(request, dict) else None
            if command == "status":
                yield {**self.report.status(), "done": True}
            elif command == "wait":
                async for event in self._wait(request):
                    yield event
            elif command == "umount":
                async for event in self._umount(request):
                    yield event
            elif command in ("publish", "discard", "skip"):
                action = {"publish": self._publish, "discard": self._discard, "skip": self._skip}[command]
                await action(str(request.get("path", "")))
                yield {"done": True}
            else:
                raise CkptfsError(f"the daemon does not know the command {command!r}", Exit.USAGE)
        except CkptfsError as e:
            yield {"done": True, "error": e.message, "code": int(e.code)}
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            yield {"done": True, "error": f"a request the daemon can't read ({e})", "code": int(Exit.USAGE)}
        except OSError as e:
            yield {"done": True, "error": str(e.strerror or e), "code": int(Exit.FAILED)}
        except Exception as e:
            self.hub.counters.errors += 1
            log.exception("internal error answering %r", line[:200])
            yield {"done": True, "error": f"internal error: {e!r}; see the log", "code": int(Exit.FAILED)}

    # -- paths -------------------------------------------------------------------------------

    def _parts(self, path: str) -> list[bytes]:
        """Components below the mount point."""
        if path.startswith("/"):
            top = self.report.mountpoint.rstrip("/")
            if path != top and not path.startswith(top + "/"):
                raise CkptfsError(f"{path} is not in the mount {self.report.mountpoint}", Exit.USAGE)
            path = path[len(top) :]
        parts = [p for p in os.fsencode(path).split(b"/") if p not in (b"", b".")]
        if b".." in parts:
            raise CkptfsError(f"give the path {path} without `..`", Exit.USAGE)
        return parts

    async def _find(self, path: str) -> Inode:
        inode = self.hub.core.state.root
        for part in self._parts(path):
            child = inode.children.get(part)
            if child is None:
                child = await self.view.lookup(inode, part)
            if child is None:
                raise CkptfsError(f"there is no {path} in the mount", Exit.USAGE)
            inode = child
        return inode

    # -- waiting -----------------------------------------------------------------------------

    async def _wait(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        tops = [await self._find(str(p)) for p in request.get("paths") or []] or [self.hub.core.state.root]
        timeout = request.get("timeout_s")
        deadline = trio.current_time() + float(timeout) if timeout is not None else None
        async for event in self._follow(tops, lambda: deadline):
            yield event

    async def _follow(
        self, tops: list[Inode], deadline: Callable[[], float | None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Progress until all of `tops` is durable, stuck, or the time is up."""
        hub = self.hub
        hub.waiting_for_durable += 1
        hub.work.beat()
        said = 0.0
        try:
            while True:
                paths, hopeless, held = self.report.remaining(tops)
                at = deadline()
                late = at is not None and trio.current_time() >= at
                if not paths or hopeless or late:
                    break
                if time.monotonic() - said >= PROGRESS_S:
                    said = time.monotonic()
                    yield {"pending": self.report.pending(), "eta_s": self.report.eta_s()}
                pause = PROGRESS_S if at is None else max(0.0, min(PROGRESS_S, at - trio.current_time()))
                await hub.changed.wait(pause)
            code = Exit.OK
            if paths:
                code = Exit.STUCK if hopeless else Exit.TIMEOUT
            elif held:
                code = Exit.INTERRUPTED
            yield {
                "done": True,
                "durable": code == Exit.OK,
                "code": int(code),
                "remaining": paths + [os.fsdecode(i.path()) for i in held],
                "pending": self.report.pending(),
            }
        finally:
            hub.waiting_for_durable -= 1

    async def _umount(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        timeout = 0.0 if request.get("drain") is False else request.get("timeout_s")
        seconds = None if timeout is None else float(timeout)  # judged before anything is done
        await self.unmount()
        if seconds is not None:
            self.give_up_at = trio.current_time() + seconds
        self.hub.changed.beat()
        async for event in self._follow([self.hub.core.state.root], lambda: self.give_up_at):
            yield event

    # -- decisions ---------------------------------------------------------------------------

    async def _held(self, path: str) -> Inode:
        inode = await self._find(path)
        if not inode.held:
            raise CkptfsError(f"{path} is not interrupted: there is nothing to decide", Exit.USAGE)
        if inode.writers:
            raise CkptfsError(f"{path} is open for writing; close it first", Exit.BUSY)
        return inode

    async def _publish(self, path: str) -> None:
        inode = await self._held(path)
        self.hub.core.content.publish_held(inode, time.time())
        self.hub.commit()
        self.hub.work.beat()
        log.info("%s is published on request", path)

    async def _discard(self, path: str) -> None:
        inode = await self._held(path)
        parent, name = inode.parent, inode.name
        revert = self.hub.core.content.discard(inode)
        self.hub.commit()
        if revert is not None:
            blob = self.hub.staging.blobs.get(revert.data)
            if blob is not None and not blob.clean and blob.size > revert.length:
                await self.hub.staging.truncate(blob, revert.length)
        self.hub.work.beat()
        self.hub.changed.beat()
        if parent is not None and name is not None:
            self.view.expire(parent)
            await self.forget_name(parent, name, inode)
        log.info("%s is discarded on request", path)

    async def _skip(self, path: str) -> None:
        wanted = b"/".join(self._parts(path))
        order = self.hub.core.order
        for e in list(self.hub.core.state.log.values()):
            if e.stuck and e.path() == wanted:
                order.skip(e, time.time())
                self.hub.commit()
                self.publisher.retry_at = 0.0
                self.hub.work.beat()
                self.hub.changed.beat()
                log.warning("%s of %s is skipped on request", e.kind.name, path)
                return
        for node, _, _ in list(self.publisher.stuck_removals.values()):
            if node.path() == wanted:
                order.give_up_removal(node)
                self.publisher.forget_removal(node)
                self.hub.commit()
                self.hub.changed.beat()
                log.warning("the removal of %s from the tier is skipped on request", path)
                return
        raise CkptfsError(f"{path} is not stuck: there is nothing to skip", Exit.USAGE)


async def _lines(stream: trio.SocketStream) -> AsyncIterator[bytes]:
    buffer = b""
    while True:
        data = await stream.receive_some(65536)
        if not data:
            return
        buffer += data
        if len(buffer) > LINE_MAX:
            return
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            yield line
