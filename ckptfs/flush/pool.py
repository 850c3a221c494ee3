"""The main process's side of the workers: one awaitable call that runs in one of them.

    async with trio.open_nursery() as nursery:
        pool = WorkerPool(PoolSettings(url, uuid, count=2, threads=4), nursery)
        await pool.start()
        info = await pool.call("probe")
        ...
        await pool.close()

Workers are exec'ed, never forked alone: a forked child would hold /dev/fuse open, and the mount of
a dead daemon would hang instead of failing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import trio

import ckptfs
from ckptfs.flush import local
from ckptfs.flush.wire import HEADER, Call, Reply, Setup, decode, encode
from ckptfs.flush.worker import DATA_METHODS
from ckptfs.tiers.base import LARGEST, TierError, TierInfo, Trouble

_log = logging.getLogger(__name__)

_SHORT_LIFE = 5.0
"""Seconds; a worker that dies sooner makes the next one wait."""
_FIRST_DELAY = 0.1
_LAST_DELAY = 10.0
_GENTLE = 2.0
"""Seconds a worker gets to end by itself once its connection is closed."""
_REAP = 5.0
"""Seconds to wait at close for a killed worker that a hung tier keeps in the kernel."""
_HURRIED_REAP = 0.3
"""The same after `hurry`."""


class WorkerDied(TierError):
    """The worker of this call is dead and reaped: nothing of the call runs any more.

    What it did before is unknown. `pid` is the worker's, 0 when the pool was closed.
    """

    def __init__(self, message: str, pid: int = 0) -> None:
        super().__init__(Trouble.DOWN, message)
        self.pid = pid


@dataclass(frozen=True)
class PoolSettings:
    """How to run the workers.

    `count` processes with `threads` byte-moving threads each; `pass_fds` are inherited besides the
    connection (the lock of the staging directory); `stderr` is where they log, None: as main.
    """

    url: str
    mount_uuid: str
    count: int = 2
    threads: int = 4
    niceness: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    stderr: int | IO[Any] | None = None


class _Answer:
    """One awaited reply."""

    __slots__ = ("error", "event", "value")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.value: Any = None
        self.error: TierError | None = None

    def set(self, value: Any, error: TierError | None) -> None:
        self.value, self.error = value, error
        self.event.set()


class _Process:
    """One living worker process.

    Attributes: `running`: calls it has not answered yet, also cancelled ones, by id with whether
    they move bytes; `waiting`: those of them somebody still waits for; `asking`: when those that ask the
    tier began.
    """

    def __init__(self, popen: subprocess.Popen[bytes], stream: trio.SocketStream) -> None:
        self.popen = popen
        self.stream = stream
        self.write_lock = trio.Lock()
        self.running: dict[int, bool] = {}
        self.waiting: dict[int, _Answer] = {}
        self.asking: dict[int, float] = {}
        self.since = trio.current_time()
        self._buffer = bytearray()

    def load(self, data: bool) -> tuple[int, int]:
        """Sort key: calls of the same sort first, since each sort has its own threads."""
        return sum(kind is data for kind in self.running.values()), len(self.running)

    async def write(self, frame: bytes) -> None:
        """Send one frame whole. A broken connection is left to the reader to find."""
        async with self.write_lock:
            # Half a frame would garble all that follows; frames are small and workers always read.
            with trio.CancelScope(shield=True):
                try:
                    await self.stream.send_all(frame)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return

    async def reply(self) -> Reply | None:
        """The next reply, or None at the end of the connection."""
        while True:
            if len(self._buffer) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    body = bytes(memoryview(self._buffer)[HEADER.size : end])
                    del self._buffer[:end]
                    reply: Reply = decode(body)
                    return reply
            try:
                data = await self.stream.receive_some(1 << 18)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._buffer += data


class WorkerPool:
    """Worker processes and the calls in them.

    Concurrency: all methods are for one trio thread. Worker *processes* must be started by a
    thread that lives as long as the daemon (the kernel's parent-death signal goes by thread), so
    `start` is to be awaited in the process and thread that stay: after any daemonizing fork.
    """

    def __init__(self, settings: PoolSettings, nursery: trio.Nursery) -> None:
        self._settings = settings
        self._options = dict(settings.options)
        self._nursery = nursery
        self._live: list[_Process] = []
        self._changed = trio.Event()
        self._tasks: set[trio.CancelScope] = set()
        self._gentle: set[trio.CancelScope] = set()
        self._reaping: set[trio.CancelScope] = set()
        self._ended = trio.Event()
        self._closed = False
        self._hurried = False
        self._next_id = 1
        self._restarts = 0
        self._reapers = trio.CapacityLimiter(math.inf)
        self.largest = LARGEST
        """Bytes of the largest file the tier can hold, as far as a probe has found out."""
        self.notes: tuple[str, ...] = ()
        """What the last probe found worth saying."""

    # -- for the rest of the program -------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [process.popen.pid for process in self._live]

    @property
    def in_flight(self) -> int:
        """Calls that run in workers now, those whose caller was cancelled included."""
        return sum(len(process.running) for process in self._live)

    @property
    def oldest_tier_call_s(self) -> float:
        """How long the longest unanswered call of the tier is running, in seconds; 0 when there is none."""
        since = min((t for p in self._live for t in p.asking.values()), default=math.inf)
        return max(0.0, trio.current_time() - since)

    @property
    def restarts(self) -> int:
        """How often a worker died unasked."""
        return self._restarts

    async def start(self) -> None:
        """Start the workers; returns when all processes exist. OSError when one cannot be started."""
        for _ in range(self._settings.count):
            await self._nursery.start(self._tend)

    async def call(self, method: str, *args: Any) -> Any:
        """Run a `Tier` method, or a job of `flush/local.py`, in the least loaded worker.

        Raises what the call raised (`TierError`), or `WorkerDied` after its worker was reaped.
        While no worker lives it waits for one. When cancelled, the call runs on in the worker and
        its reply is dropped.
        """
        data = method in DATA_METHODS
        while not self._live:
            if self._closed:
                raise WorkerDied("the workers are shut down")
            await self._changed.wait()
        process = min(self._live, key=lambda one: one.load(data))
        value = await self._call_in(process, method, args, data)
        if method == "probe" and isinstance(value, TierInfo):
            self.largest, self.notes = value.largest, value.notes
            if value.tier_id:
                await self._bind(value.tier_id, value.caps)
        return value

    async def close(self) -> None:
        """End all workers and reap them; calls still waiting get `WorkerDied`. Never cancelled."""
        self._closed = True
        self._wake()
        for scope in self._tasks:
            scope.cancel()
        self._bound_reaping()
        if self._tasks:
            with trio.CancelScope(shield=True):
                await self._ended.wait()

    def hurry(self) -> None:
        """Let `close`, now or later, kill the workers at once: one that hangs in the tier must not hold up
        the end. They may be killed at any time; what they had not answered is done again."""
        self._hurried = True
        for scope in self._gentle:
            scope.cancel()
        if self._closed:
            self._bound_reaping()

    @property
    def _reap_s(self) -> float:
        return _HURRIED_REAP if self._hurried else _REAP

    def _bound_reaping(self) -> None:
        for scope in self._reaping:
            scope.deadline = min(scope.deadline, trio.current_time() + self._reap_s)

    # -- calls -----------------------------------------------------------------------------------

    async def _call_in(self, process: _Process, method: str, args: tuple[Any, ...], data: bool) -> Any:
        call_id = self._next_id
        self._next_id += 1
        frame = encode(Call(call_id, method, args))
        answer = _Answer()
        process.running[call_id] = data
        process.waiting[call_id] = answer
        if method not in local.JOBS:
            process.asking[call_id] = trio.current_time()
        written = False
        try:
            await process.write(frame)
            written = True
            await answer.event.wait()
        finally:
            process.waiting.pop(call_id, None)
            if not written:
                process.running.pop(call_id, None)
                process.asking.pop(call_id, None)
        if answer.error is not None:
            raise answer.error
        return answer.value

    async def _bind(self, tier_id: str, caps: str) -> None:
        """Tell all workers, also later ones, which tier the probe found, and what it can do."""
        found = {"tier_id": tier_id, "caps": caps}
        if not found.items() - self._options.items():
            return
        self._options.update(found)
        for process in list(self._live):
            try:
                await self._call_in(process, "bind", (tier_id, caps), False)
            except WorkerDied:
                continue  # its successor is started with the option

    # -- processes -------------------------------------------------------------------------------

    async def _tend(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep one worker running."""
        scope = trio.CancelScope()
        self._tasks.add(scope)
        try:
            with scope:
                process = await self._spawn()
                task_status.started()
                failures = 0
                while True:
                    await self._serve(process)
                    self._restarts += 1
                    lived = trio.current_time() - process.since
                    failures = failures + 1 if lived < _SHORT_LIFE else 0
                    process = await self._respawn(failures)
        finally:
            self._tasks.remove(scope)
            if not self._tasks:
                self._ended.set()

    async def _respawn(self, failures: int) -> _Process:
        while True:
            if failures:
                delay = min(_LAST_DELAY, _FIRST_DELAY * 2.0 ** min(failures - 1, 20))
                await trio.sleep(delay * random.uniform(0.5, 1.0))
            try:
                return await self._spawn()
            except OSError as exc:
                _log.error("a worker cannot be started: %s", exc)
                failures += 1

    async def _spawn(self) -> _Process:
        settings = self._settings
        process = self._exec()
        setup = Setup(
            settings.url, settings.mount_uuid, settings.threads, settings.niceness, dict(self._options)
        )
        await process.write(encode(setup))
        self._live.append(process)
        self._wake()
        return process

    def _exec(self) -> _Process:
        """Start one process. Blocks the loop for the milliseconds of an exec, on purpose: a helper
        thread would be the parent of the process, and its end would kill it."""
        settings = self._settings
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                popen = subprocess.Popen(
                    [sys.executable, "-m", "ckptfs.flush.worker", str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=settings.stderr,
                    stderr=settings.stderr,
                    close_fds=True,
                    pass_fds=(theirs.fileno(), *settings.pass_fds),
                    cwd="/",  # a worker must not keep a directory busy
                    env=_environment(),
                )
            except BaseException:
                ours.close()
                raise
        return _Process(popen, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))

    async def _serve(self, process: _Process) -> None:
        """Take replies until the worker dies or the pool is closed; it is reaped on return."""
        try:
            while (reply := await process.reply()) is not None:
                process.running.pop(reply.id, None)
                process.asking.pop(reply.id, None)
                answer = process.waiting.get(reply.id)
                if answer is not None:
                    answer.set(reply.value, reply.error)
        finally:
            self._live.remove(process)
            # Closed, or the nursery around it cancelled.
            closing = self._closed or trio.current_effective_deadline() == -math.inf
            with trio.CancelScope(shield=True):
                await self._end(process, closing)
            pid, status = process.popen.pid, process.popen.returncode
            if not closing:
                _log.warning("worker %d died (status %s) with %d calls", pid, status, len(process.running))
            for answer in process.waiting.values():
                answer.set(None, WorkerDied(f"worker {pid} died (status {status})", pid))

    async def _end(self, process: _Process, closing: bool) -> None:
        """Close the connection and reap the process, killing it when it does not end by itself."""
        await trio.aclose_forcefully(process.stream)
        if closing and not self._hurried:
            with trio.move_on_after(_GENTLE) as gentle:
                self._gentle.add(gentle)
                try:
                    await self._reap(process)
                    return
                finally:
                    self._gentle.discard(gentle)
        process.popen.kill()
        # No deadline before close: calls may be repeated only when this process can do nothing more.
        with trio.move_on_after(self._reap_s if closing or self._closed else math.inf) as scope:
            self._reaping.add(scope)
            try:
                await self._reap(process)
            finally:
                self._reaping.discard(scope)
        if scope.cancelled_caught:
            _log.error("worker %d does not end: the tier holds it in the kernel", process.popen.pid)

    async def _reap(self, process: _Process) -> None:
        await trio.to_thread.run_sync(process.popen.wait, abandon_on_cancel=True, limiter=self._reapers)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _environment() -> dict[str, str]:
    """The environment of workers: as ours, and able to import this very package."""
    root = str(Path(ckptfs.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.asynccontextmanager
async def open_pool(settings: PoolSettings) -> AsyncIterator[WorkerPool]:
    """A started pool that is closed at the end of the block.

    What the block raises comes out in an exception group, as from any nursery.
    """
    async with trio.open_nursery() as nursery:
        pool = WorkerPool(settings, nursery)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()
