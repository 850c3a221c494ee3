"""The daemon of one mount: `python -m ckptfs.daemon --ready-fd N MOUNTPOINT`, configuration as JSON on stdin.

Answers one line of JSON on the ready descriptor when the mount is usable, or why it can't be. Then
serves until unmounted, drains, and exits 0 only when everything is durable.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import time

import trio

from ckptfs.config import Config
from ckptfs.errors import CkptfsError, Exit
from ckptfs.paths import MountPaths
from ckptfs.session import MountSession

log = logging.getLogger("ckptfs")


class Ready:
    """The one answer to the command that started us."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, answer: dict[str, object]) -> None:
        """Answer, once."""
        if self._fd >= 0:
            try:
                os.write(self._fd, json.dumps(answer).encode() + b"\n")
            except OSError as e:
                log.debug("nobody waits for us: %s", e)
            os.close(self._fd)
            self._fd = -1


GC_THRESHOLDS = 50_000, 20, 20
"""Inodes and entries live long and die by reference counting; looking for cycles among hundreds of
thousands of them at the interpreter's default (every 700 new objects) takes a tenth of the time."""


def _logging(level: str) -> None:
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    logging.getLogger("pyfuse3").setLevel(logging.WARNING)


def main() -> int:
    """Run the daemon; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ckptfs.daemon")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("mountpoint")
    args = parser.parse_args()
    ready = Ready(args.ready_fd)
    if args.ready_fd >= 0:
        os.set_inheritable(args.ready_fd, False)
    try:
        config = Config.from_json(sys.stdin.readline())
        _logging(config.log_level)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        gc.set_threshold(*GC_THRESHOLDS)
        session = MountSession(config, MountPaths(args.mountpoint))
        code = trio.run(session.run, ready.say)
    except BaseException as e:
        error = _only_cause(e)
        if isinstance(error, CkptfsError):
            log.error("%s", error.message)
            ready.say({"ok": False, "error": error.message, "code": int(error.code)})
            return error.code
        log.exception("the daemon ends on an internal error; what is staged stays for the next mount")
        ready.say({"ok": False, "error": f"internal error: {error!r}; see the log", "code": 1})
        return Exit.FAILED
    return code


def _only_cause(e: BaseException) -> BaseException:
    """What is inside exception groups, when it is a single exception."""
    while True:
        inner = getattr(e, "exceptions", None)
        if not inner or len(inner) != 1:
            return e
        e = inner[0]


if __name__ == "__main__":
    sys.exit(main())
