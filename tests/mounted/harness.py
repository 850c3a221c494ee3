"""Real mounts for tests: start, look at, kill and clean up a daemon and all that belongs to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
    """The first true value of `condition`, tried often; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for {what}")
        time.sleep(0.02)


class Mount:
    """One mount point with its own run, data, tier and spill directories below `base`."""

    def __init__(self, base: Path, name: str = "m", tier: Path | None = None) -> None:
        self.base = base / name
        self.point = self.base / "mnt"
        self.tier = tier or self.base / "tier"
        self.url = f"file://{self.tier}"
        self.run_dir = self.base / "run"
        self.spill = self.base / "spill"
        for d in (self.point, self.tier, self.run_dir, self.base / "data", self.spill):
            d.mkdir(parents=True, exist_ok=True)
        self.env = {
            **os.environ,
            "CKPTFS_RUN_DIR": str(self.run_dir),
            "CKPTFS_DATA_DIR": str(self.base / "data"),
            "PYTHONFAULTHANDLER": "1",
        }
        self.options: list[str] = []
        self.pid = 0

    # -- commands ----------------------------------------------------------------------------

    def cli(
        self, *args: str | Path, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a ckptfs command in this mount's environment."""
        done = subprocess.run(
            [sys.executable, "-m", "ckptfs", *map(str, args)],
            env=self.env, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(
                f"ckptfs {args} exited {done.returncode}: {done.stdout}{done.stderr}\n{self.log()}"
            )
        return done

    def start(self, *options: str, config: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """`ckptfs mount`, with small defaults; `config` is the text of a TOML file."""
        if options or not self.options:
            self.options = ["--cache-size", "256MiB", "--spill-dir", str(self.spill), *options]
        if config:
            path = self.base / "ckptfs.toml"
            path.write_text(config)
            self.options += ["--config", str(path)]
        done = self.cli("mount", self.point, "--tier", self.url, *self.options, check=check)
        if done.returncode == 0:
            self.pid = int(self.status()["pid"])
        return done

    def ask(self, command: str, timeout: float = 60, **arguments: Any) -> dict[str, Any]:
        """The last answer of the daemon to a command on its control socket."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(timeout)
            s.connect(str(next(self.run_dir.glob("*/control.sock"))))
            s.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with s.makefile("rb") as lines:
                for line in lines:
                    answer: dict[str, Any] = json.loads(line)
                    if answer.get("done"):
                        return answer
        raise AssertionError(f"no answer to {command}\n{self.log()}")

    def status(self) -> dict[str, Any]:
        """The object of `ckptfs status --json`, straight from the daemon."""
        return self.ask("status")

    def state(self, path: str | Path) -> str:
        """The state attribute of a path below the mount point."""
        return os.getxattr(self.point / path, "user.ckptfs.state").decode()

    def wait(self, *paths: str | Path, timeout: float = 20) -> None:
        """Until durable."""
        answer = self.ask("wait", timeout + 30, paths=[str(p) for p in paths], timeout_s=timeout)
        if answer.get("code") != 0:
            raise AssertionError(f"wait {paths} gave {answer}\n{self.log()}")

    def umount(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`ckptfs umount`; waits for the daemon to be gone."""
        pid = self.pid
        done = self.cli("umount", self.point, *options, check=check)
        wait_for(lambda: not alive(pid), "the daemon's end")
        return done

    # -- looking -----------------------------------------------------------------------------

    def log(self) -> str:
        """The daemon's log."""
        return "".join(p.read_text(errors="replace") for p in (self.base / "data" / "logs").glob("*.log"))

    def tier_names(self) -> set[str]:
        """Relative paths of everything a reader of the tier sees."""
        return {
            str(p.relative_to(self.tier))
            for p in self.tier.rglob("*")
            if not p.relative_to(self.tier).parts[0].startswith(".ckptfs")
        }

    def workers(self) -> list[int]:
        """Process ids of the daemon's workers."""
        found = []
        for task in Path("/proc").iterdir():
            if task.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    stat = (task / "stat").read_text()
                    ours = int(stat.rsplit(")", 1)[1].split()[1]) == self.pid
                    if ours and b"ckptfs.flush.worker" in (task / "cmdline").read_bytes():
                        found.append(int(task.name))
        return found

    # -- violence ----------------------------------------------------------------------------

    def kill(self, *, workers: bool = False) -> None:
        """kill -9 of the daemon (and its workers); returns when they are gone."""
        pids = ([*self.workers()] if workers else []) + [self.pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(p) for p in pids), "the killed processes' end")

    def cleanup(self) -> None:
        """Leave nothing: no mount, no process, no tmpfs."""
        if self.pid and alive(self.pid):
            self.kill(workers=True)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            target = line.split()[1].replace("\\040", " ")
            if target.startswith(str(self.base) + "/"):
                subprocess.run(["umount", "-l", target], check=False, capture_output=True)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False
