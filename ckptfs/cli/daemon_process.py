"""Starting the daemon: configuration in on stdin, one line of JSON back on a pipe when it is usable."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO

from ..config import Config
from ..control.client import exit_code
from ..errors import CkptfsError, Exit
from ..paths import data_dir, run_dir
from .output import complain, say

DAEMON = ("-m", "ckptfs.daemon")
"""What the interpreter is told to run."""

_PATIENCE = 10.0
"""Seconds after which the user is told that starting takes long (recovery, a slow tier)."""

_LOG_LIMIT = 16 << 20
"""A log larger than this is set aside (to `.1`) before the daemon starts."""

_TAIL_LINES = 8
_TAIL_BYTES = 4096
_LONGEST_ANSWER = 1 << 20


def start_background(config: Config, log: str) -> list[str]:
    """Start the daemon with its output going to `log`; returns its lines once the mount is usable.

    CkptfsError with the daemon's sentence and code when it refuses or ends.
    """
    with _open_log(log) as output:
        before = os.fstat(output.fileno()).st_size
        process, ready = _spawn(config, output)
    try:
        try:
            return _answer(process, ready, log)
        except _Ended:
            tail = _log_tail(log, before)
            raise CkptfsError(_how_it_ended(process, f"; see {log}") + tail, Exit.FAILED) from None
    finally:
        os.close(ready)


def run_foreground(config: Config) -> int:
    """Run the daemon as a child that shares our stderr until it ends; returns its exit code.

    SIGTERM, SIGINT and SIGHUP are handed on to it.
    """
    children: list[subprocess.Popen[bytes]] = []
    with _forwarding(children):
        process, ready = _spawn(config, None)
        children.append(process)
        try:
            for line in _answer(process, ready, "stderr"):
                say(line)
        except _Ended:
            raise CkptfsError(_how_it_ended(process, ""), Exit.FAILED) from None
        finally:
            os.close(ready)
        code = process.wait()
    return code if code >= 0 else 128 - code


class _Ended(Exception):
    """The pipe was closed without an answer."""


def _spawn(config: Config, output: IO[bytes] | None) -> tuple[subprocess.Popen[bytes], int]:
    """The process and the read end of its ready pipe."""
    ready, ready_write = os.pipe()
    try:
        process = subprocess.Popen(
            # The mount point stands in the command line so that ps tells the daemons apart.
            [sys.executable, *DAEMON, "--ready-fd", str(ready_write), config.mountpoint],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd="/",
            env=_environment(),
            pass_fds=(ready_write,),
            start_new_session=True,
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_write)
    assert process.stdin is not None
    try:
        process.stdin.write(config.to_json().encode("ascii") + b"\n")
        process.stdin.close()
    except OSError:
        pass  # it ended before it read: the ready pipe tells
    return process, ready


def _environment() -> dict[str, str]:
    """Ours, credentials included; paths made absolute, since the daemon's current directory is another."""
    found = {**os.environ, "CKPTFS_RUN_DIR": run_dir(), "CKPTFS_DATA_DIR": data_dir()}
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE"):
        if found.get(name):
            found[name] = os.path.abspath(os.path.expanduser(found[name]))
    return found


def _answer(process: subprocess.Popen[bytes], ready: int, log: str) -> list[str]:
    """Wait for the daemon's one line; an interrupt ends the daemon too."""
    buffer = b""
    try:
        told = False
        while b"\n" not in buffer and len(buffer) < _LONGEST_ANSWER:
            readable, _, _ = select.select([ready], [], [], None if told else _PATIENCE)
            if not readable:
                told = True
                complain(f"ckptfs: still starting (pid {process.pid}, log: {log})")
                continue
            data = os.read(ready, 65536)
            if not data:
                break
            buffer += data
    except BaseException:
        _end(process)
        raise
    try:
        answer = json.loads(buffer)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _Ended
    if not answer.get("ok"):
        _wait_briefly(process)
        raise CkptfsError(
            str(answer.get("error", "the daemon gave no reason")), exit_code(answer.get("code"))
        )
    return [str(line) for line in answer.get("lines", [])]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a daemon that is still starting; what it recovered stays staged."""
    process.terminate()
    if not _wait_briefly(process):
        process.kill()


def _wait_briefly(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return False
    return True


def _how_it_ended(process: subprocess.Popen[bytes], where: str) -> str:
    how = ""
    if _wait_briefly(process):
        code = process.returncode
        how = f" (exit code {code})" if code >= 0 else f" ({signal.Signals(-code).name})"
    return f"the daemon ended while starting{how}{where}"


def _open_log(log: str) -> IO[bytes]:
    try:
        if os.path.exists(log) and os.path.isfile(log) and os.path.getsize(log) > _LOG_LIMIT:
            os.replace(log, log + ".1")
        return open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
    except OSError as error:
        raise CkptfsError(f"cannot write the log file {log}: {error.strerror}", Exit.USAGE) from None


def _log_tail(log: str, since: int) -> str:
    """The last lines that were written after position `since`, indented, as an appendix to an error."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines if line.strip())


@contextmanager
def _forwarding(children: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Hand signals on to the child; one that comes before there is a child ends us as usual."""

    def forward(number: int, frame: FrameType | None) -> None:
        if not children:
            raise KeyboardInterrupt
        children[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
