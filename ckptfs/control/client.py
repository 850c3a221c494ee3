"""Talks to the daemon of a mount over its control socket (docs/CONTROL.md), without an event loop."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from ..errors import CkptfsError, Exit
from ..paths import MountPaths, socket_address
from ..resume import resume_command

ANSWER_TIMEOUT = 15.0
"""Seconds the daemon may be silent before it counts as not answering."""

_QUEUE_STEP = 0.02
"""Seconds between two tries for a place in the daemon's queue."""

_READ_SIZE = 1 << 16
_LONGEST_LINE = 64 << 20
"""A status answer is a few kilobytes; more than this is not one of ours."""

Event = dict[str, Any]


class DaemonEnded(CkptfsError):
    """The daemon ended before its last answer: killed, or it had nothing left to do."""


def no_daemon(paths: MountPaths) -> CkptfsError:
    """The error for a mount point that nobody serves."""
    return CkptfsError(
        f"no ckptfs daemon serves {paths.mountpoint}; run {resume_command(paths)}", Exit.NOT_MOUNTED
    )


def connect(paths: MountPaths, timeout: float = ANSWER_TIMEOUT) -> socket.socket:
    """A connection to the daemon. CkptfsError: NOT_MOUNTED when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout
    try:
        connection.settimeout(timeout)
        with socket_address(paths.control) as address:
            while True:
                try:
                    connection.connect(address)
                    break
                except BlockingIOError:
                    # Many came at once: with a time-out set, connect(2) does not wait for a place in the
                    # queue.
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                    time.sleep(_QUEUE_STEP)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        connection.close()
        raise no_daemon(paths) from None
    except TimeoutError:
        connection.close()
        raise _silent(paths, timeout) from None
    except OSError as error:
        connection.close()
        raise CkptfsError(
            f"cannot reach the daemon of {paths.mountpoint} ({paths.control}): {error.strerror}", Exit.FAILED
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def alive(paths: MountPaths) -> bool:
    """Whether a daemon listens; does not wait for it to answer."""
    try:
        connect(paths, timeout=1.0).close()
    except CkptfsError as error:
        return error.code is not Exit.NOT_MOUNTED
    return True


def events(
    paths: MountPaths, command: str, idle_timeout: float = ANSWER_TIMEOUT, /, **arguments: object
) -> Iterator[Event]:
    """Send one command and give every object answered; the last has `done`.

    CkptfsError: the daemon's own sentence and code when it refuses; NOT_MOUNTED without a daemon; FAILED
    when it is silent for `idle_timeout` seconds or ends before it is done.
    """
    connection = connect(paths, idle_timeout)
    with connection:
        request = json.dumps({"command": command, **arguments}) + "\n"
        try:
            connection.sendall(request.encode("ascii"))
        except TimeoutError:
            raise _silent(paths, idle_timeout) from None
        except OSError:
            raise _ended(paths) from None
        buffer = bytearray()
        while True:
            event = _parse(paths, _line(paths, connection, buffer, idle_timeout))
            if "error" in event and event.get("done"):
                raise CkptfsError(str(event["error"]), exit_code(event.get("code")))
            yield event
            if event.get("done"):
                return


def request(
    paths: MountPaths, command: str, idle_timeout: float = ANSWER_TIMEOUT, /, **arguments: object
) -> Event:
    """Send one command and return its last answer. Errors as `events`."""
    *_, last = events(paths, command, idle_timeout, **arguments)
    return last


def exit_code(value: object) -> Exit:
    """A code from the wire; one that this version does not know is FAILED."""
    try:
        return Exit(int(str(value)))
    except ValueError:
        return Exit.FAILED


def _line(paths: MountPaths, connection: socket.socket, buffer: bytearray, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    while (end := buffer.find(b"\n")) < 0:
        if len(buffer) > _LONGEST_LINE:
            raise CkptfsError(f"what answers at {paths.control} is no ckptfs daemon", Exit.FAILED)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            data = connection.recv(_READ_SIZE)
        except TimeoutError:
            raise _silent(paths, timeout) from None
        except OSError:
            raise _ended(paths) from None
        if not data:
            raise _ended(paths)
        buffer += data
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line


def _parse(paths: MountPaths, line: bytes) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise CkptfsError(f"the daemon of {paths.mountpoint} answered something that is no JSON object")
    return event


def _silent(paths: MountPaths, timeout: float) -> CkptfsError:
    return CkptfsError(f"the daemon of {paths.mountpoint} did not answer within {timeout:g} seconds")


def _ended(paths: MountPaths) -> DaemonEnded:
    return DaemonEnded(
        f"the daemon of {paths.mountpoint} ended before it answered; what is staged is kept: "
        f"run {resume_command(paths)}"
    )


class Watched:
    """A process to be waited for, held from before it is asked to end, so that its id can't be reused."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:
            pass  # gone already, or a kernel without pidfd

    def wait(self, timeout: float) -> bool:
        """Wait until it ended, at most `timeout` seconds; False when it is still there."""
        if self._descriptor >= 0:
            readable, _, _ = select.select([self._descriptor], [], [], timeout)
            return bool(readable)
        deadline = time.monotonic() + timeout
        while os.path.exists(f"/proc/{self._pid}"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
