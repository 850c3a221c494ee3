"""A fake daemon: the control protocol of docs/CONTROL.md with scripted answers, served by a thread."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from ckptfs.paths import MountPaths, socket_address

SAMPLE: dict[str, Any] = {
    "mountpoint": "",
    "pid": 0,
    "log_file": "/var/lib/ckptfs/logs/x.log",
    "version": "0.1.0",
    "draining": False,
    "uptime_s": 75.0,
    "tier": {"url": "file:///mnt/nfs", "state": "up", "error": None, "since": 0, "notes": ["a note"]},
    "fsync": "cache",
    "fsync_rules": [["*.meta", "tier"]],
    "cache": {
        "limit_bytes": 8 << 30,
        "dirty_bytes": 2 << 30,
        "clean_bytes": 1 << 30,
        "spilled_bytes": 0,
        "spill_limit_bytes": 32 << 30,
        "used_bytes": 3 << 30,
    },
    "pending": {"entries": 4, "files": 3, "bytes": 2 << 30, "oldest_age_s": 4.2},
    "absorb_bytes_per_s": float(1 << 30),
    "flush_bytes_per_s": float(512 << 20),
    "eta_s": 4.0,
    "files": [
        {"path": "run/step_1.pt", "size": 1 << 30, "sent_bytes": 512 << 20, "state": "sending"},
        {"path": "run/step_2.pt", "size": 1 << 30, "sent_bytes": 0, "state": "waiting"},
    ],
    "files_total": 3,
    "interrupted": [],
    "stuck": [],
    "skipped": [],
    "held_back_s": 1.5,
    "writers_waiting": 0,
    "conflicts": 0,
    "reuploaded_bytes": 0,
    "errors": 0,
    "last_durable": {"path": "run/step_0.pt", "time": 0},
    "recovered": None,
}


def dead_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


class FakeDaemon:
    """Serves one mount point; `answers[command]` is the list of objects sent for it."""

    def __init__(self, mountpoint: Path, staged: int = 0) -> None:
        self.paths = MountPaths(str(mountpoint))
        self.paths.create()
        self.pid = dead_pid()
        self.requests: list[dict[str, Any]] = []
        self.status = {**SAMPLE, "mountpoint": self.paths.mountpoint, "pid": self.pid}
        self.answers: dict[str, list[dict[str, Any] | bytes]] = {}
        self.delay = 0.0
        write_state(self.paths, self.pid, staged)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(self.paths.control) as address:
            self._listener.bind(address)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                line = lines.readline()
                if not line:
                    return  # somebody looked whether we listen
                request = json.loads(line)
                self.requests.append(request)
                default = (
                    [{**self.status, "done": True}] if request["command"] == "status" else [{"done": True}]
                )
                for answer in self.answers.get(request["command"], default):
                    time.sleep(self.delay)
                    connection.sendall(
                        answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"
                    )
            except OSError:
                pass  # the client went away

    def stop(self, keep_state: bool = True) -> None:
        """End as a killed daemon does (the socket file stays), or as a drained one."""
        # shutdown() wakes the thread in accept(), close() alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        if not keep_state:
            os.unlink(self.paths.state)
            os.unlink(self.paths.control)


def write_state(paths: MountPaths, pid: int, staged: int, *flags: str) -> None:
    """A mount.json as the daemon writes it, of a mount with these flags."""
    state = {"mountpoint": paths.mountpoint, "tier": "file:///mnt/nfs", "pid": pid, "log_file": paths.log}
    resume = ["mount", paths.mountpoint, *flags]
    Path(paths.state).write_text(json.dumps({**state, "started": 1.0, "staged": staged, "resume": resume}))
