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

LINE_MAX = 16 << 20
"""The longest request, in bytes: more paths than fit into a command line."""

SECONDS_MAX = 1_000_000_000
"""The longest time-out, as for the commands' --timeout; more is a mistake."""

BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel allows no more than net.core.somaxconn."""

PROGRESS_S = 0.5

UNMOUNT_S = 10.0
"""How long an unmount without drain may take."""


class ControlServer:
    """Answers commands, also while the mount is blocked, the tier is down, or the mount is gone.

    `unmount` takes the mount away from the kernel (CkptfsError BUSY when it is in use), `unmounted` tells
    when it is gone, which it is not while another mount namespace has a copy of it;
    `forget_name` makes the kernel look a name up again.
    """

    def __init__(
        self,
        hub: Hub,
        publisher: Publisher,
        view: View,
        report: Report,
        unmount: Callable[[], Awaitable[None]],
        unmounted: trio.Event,
        forget_name: Callable[[Inode, bytes, Inode], Awaitable[None]],
    ) -> None:
        self.hub = hub
        self.publisher = publisher
        self.view = view
        self.report = report
        self.unmount = unmount
        self.unmounted = unmounted
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
        sock.listen(BACKLOG)
        task_status.started()
        await trio.serve_listeners(self._connection, [trio.SocketListener(sock)])

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                try:
                    async for request in _lines(stream):
                        self.answering += 1
                        try:
                            async with contextlib.aclosing(self._answer(request)) as answers:
                                async for answer in answers:
                                    await _send(stream, answer)
                        finally:
                            self.answering -= 1
                except CkptfsError as e:
                    await _send(stream, _error(e))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone

    async def _answer(self, line: bytes) -> AsyncGenerator[dict[str, Any]]:
        try:
            request, command = _request(line)
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
                await action(_text(request.get("path"), "path"))
                yield {"done": True}
            else:
                raise CkptfsError(f"the daemon does not know the command {command!r}", Exit.USAGE)
        except CkptfsError as e:
            yield _error(e)
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
        seconds, paths = _seconds(request), _paths(request)
        deadline = None if seconds is None else trio.current_time() + seconds
        tops = [await self._find(path) for path in paths] or [self.hub.core.state.root]

        def until() -> float | None:
            # A daemon that gives up its drain makes nothing durable any more, and ends.
            return min((at for at in (deadline, self.give_up_at) if at is not None), default=None)

        async for event in self._follow(tops, until):
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
                    yield {
                        "pending": self.report.pending(),
                        "eta_s": self.report.eta_s(),
                        "tier": self.report.tier(),
                    }
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
                "tier": self.report.tier(),
                "ending": self.give_up_at is not None and trio.current_time() >= self.give_up_at,
            }
        finally:
            hub.waiting_for_durable -= 1

    async def _umount(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        seconds, drain = _seconds(request), _drain(request)  # judged before anything is done
        started = trio.current_time()
        await self.unmount()
        until = None if seconds is None else started + seconds
        if not drain:
            until, seconds = started + UNMOUNT_S, 0.0
        while not self.unmounted.is_set():
            if until is not None and trio.current_time() >= until:
                raise CkptfsError(
                    f"{self.report.mountpoint} is unmounted here, but something still holds it: a copy in"
                    " another mount namespace, or a call that has not returned; the daemon drains when it is"
                    " let go",
                    Exit.TIMEOUT,
                )
            with trio.move_on_after(PROGRESS_S):
                await self.unmounted.wait()
                break
            yield {"pending": self.report.pending(), "eta_s": self.report.eta_s()}
        if seconds is not None:
            self.give_up_at = max(trio.current_time(), started + seconds)
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
        await self.hub.committed()
        self.hub.work.beat()
        log.info("%s is published on request", path)

    async def _discard(self, path: str) -> None:
        inode = await self._held(path)
        parent, name = inode.parent, inode.name
        revert = self.hub.core.content.discard(inode)
        await self.hub.committed()
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
                await self.hub.committed()
                self.publisher.retry_at = 0.0
                self.hub.work.beat()
                self.hub.changed.beat()
                log.warning("%s of %s is skipped on request", e.kind.name, path)
                return
        for node, _, _ in list(self.publisher.stuck_removals.values()):
            if node.path() == wanted:
                order.give_up_removal(node)
                self.publisher.forget_removal(node)
                await self.hub.committed()
                self.hub.changed.beat()
                log.warning("the removal of %s from the tier is skipped on request", path)
                return
        raise CkptfsError(f"{path} is not stuck: there is nothing to skip", Exit.USAGE)


async def _send(stream: trio.SocketStream, answer: dict[str, Any]) -> None:
    await stream.send_all(json.dumps(answer).encode() + b"\n")


def _error(e: CkptfsError) -> dict[str, Any]:
    return {"done": True, "error": e.message, "code": int(e.code)}


# -- requests ----------------------------------------------------------------------------------


def _wrong(reason: str) -> CkptfsError:
    return CkptfsError(f"{reason}; see docs/CONTROL.md", Exit.USAGE)


def _request(line: bytes) -> tuple[dict[str, Any], str]:
    """The request and its command. CkptfsError (USAGE) for anything else than an object that names one."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise _wrong(f"the request is not JSON ({e})") from None
    if not isinstance(request, dict):
        raise _wrong("the request is not a JSON object")
    return request, _text(request.get("command"), "command")


def _text(value: object, field: str) -> str:
    """A text that can be (part of) a path."""
    if not isinstance(value, str) or not value:
        raise _wrong(f"{field} is {_show(value)}, not a text in quotes")
    try:
        usable = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise _wrong(f"{field} {_show(value)} holds a character that no path can have")
    return value


def _paths(request: dict[str, Any]) -> list[str]:
    paths = request.get("paths")
    if paths is None:
        return []
    if not isinstance(paths, list):
        raise _wrong(f"paths is {_show(paths)}, not a list of texts")
    return [_text(path, "a path") for path in paths]


def _seconds(request: dict[str, Any]) -> float | None:
    """`timeout_s`; None waits for ever. A NaN would too, as every comparison with it is false."""
    value = request.get("timeout_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= SECONDS_MAX:
        raise _wrong(
            f"timeout_s is {_show(value)}: give seconds from 0 to {SECONDS_MAX:,}, or null to wait for ever"
        )
    return float(value)


def _drain(request: dict[str, Any]) -> bool:
    value = request.get("drain", True)
    if not isinstance(value, bool):
        raise _wrong(f"drain is {_show(value)}, neither true nor false")
    return value


def _show(value: object) -> str:
    """A value as it was written, short enough for one sentence."""
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


async def _lines(stream: trio.SocketStream) -> AsyncIterator[bytes]:
    """Complete lines. CkptfsError (USAGE) for one that is too long to be kept."""
    buffer = bytearray()
    while True:
        data = await stream.receive_some(65536)
        if not data:
            return
        if b"\n" not in data:
            buffer += data
        else:
            first, *lines = data.split(b"\n")
            lines.insert(0, bytes(buffer) + first)
            buffer = bytearray(lines.pop())
            for line in lines:
                yield line
        if len(buffer) > LINE_MAX:
            raise CkptfsError(
                f"the request is longer than {LINE_MAX >> 20} MiB; wait for fewer paths at a time, or for"
                " their directory",
                Exit.USAGE,
            )
