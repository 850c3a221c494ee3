"""`make demo`: train on a ckptfs mount, prove that the tier has the same bytes, compare with plain fsync.

Everything lives in one temporary directory on local disk: the mount point, the embedded tier, the run and
data directories. Nothing is left behind, whatever happens. Exit code 0 only when everything held.
"""

from __future__ import annotations

import filecmp
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ckptfs import mountinfo, mountpoint
from ckptfs.cli.render import Renderer
from ckptfs.control import client
from ckptfs.errors import CkptfsError
from ckptfs.paths import MountPaths
from ckptfs.units import format_duration, format_rate, format_size

TRAIN = Path(__file__).with_name("train.py")
CKPTFS = [sys.executable, "-m", "ckptfs"]
SAVES = 8
WARM_UP = 3
"""Saves not counted: until rotation starts, each one touches memory that was never used before."""
console = Console()


def tell(text: str, style: str = "") -> None:
    """One line as it is, however long."""
    console.print(Text(text, style), soft_wrap=True)


class DemoError(Exception):
    """Something did not hold; one sentence."""


@dataclass
class Run:
    """What one run of the training script reported."""

    blocked: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, line: str) -> str:
        """Take in one line of output; returns what to show for it."""
        try:
            report = json.loads(line)
            self.blocked.append(float(report["blocked_s"]))
            self.sizes.append(int(report["bytes"]))
        except (ValueError, KeyError, TypeError):
            return line
        return (
            f"step {report['step']:>3}: saved {format_size(self.sizes[-1])}, "
            f"training stood still for {format_duration(self.blocked[-1])}"
        )

    @property
    def median(self) -> float:
        """Median seconds blocked, warm-up left out."""
        return statistics.median(self.blocked[WARM_UP:])


def make_base() -> Path:
    """A temporary directory on a disk, since a tier in memory would prove nothing."""
    for parent in ("/var/tmp", tempfile.gettempdir(), os.path.expanduser("~"), os.getcwd()):
        if (
            os.path.isdir(parent)
            and os.access(parent, os.W_OK)
            and _filesystem(parent) not in ("tmpfs", "ramfs")
        ):
            return Path(tempfile.mkdtemp(prefix="ckptfs-demo-", dir=parent)).resolve()
    raise DemoError("no writable directory on a disk found (tried /var/tmp, the temporary directory, home)")


def _filesystem(path: str) -> str:
    path = os.path.realpath(path)
    around = [mount for mount in mountinfo.read() if mountinfo.inside(path, mount.path)]
    return max(around, key=lambda mount: len(mount.path)).fstype if around else ""


def ckptfs(*arguments: str, check: bool = True) -> int:
    """Run a ckptfs command with its output shown; DemoError when it fails."""
    tell("$ ckptfs " + " ".join(arguments), "bold")
    code = subprocess.run([*CKPTFS, *arguments], check=False).returncode
    if check and code != 0:
        raise DemoError(f"ckptfs {arguments[0]} ended with exit code {code}")
    return code


def train(*arguments: str, paths: MountPaths | None = None) -> Run:
    """Run the training script; with `paths` show the mount's progress meanwhile."""
    command = [sys.executable, str(TRAIN), *arguments, "--saves", str(SAVES)]
    tell(f"$ python tools/train.py {' '.join(command[2:])}", "bold")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    run = Run()
    threading.Thread(target=read, daemon=True).start()
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            ended = False
            while not ended:
                try:
                    line = lines.get(timeout=0.3)
                    ended = line is None
                    if line is not None:
                        tell("  " + run.add(line))
                except queue.Empty:
                    pass
                if paths is not None and console.is_terminal:
                    live.update(picture(paths), refresh=True)
        if process.wait() != 0:
            raise DemoError(f"the training script ended with exit code {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if len(run.blocked) != SAVES:
        raise DemoError(f"the training script reported {len(run.blocked)} saves instead of {SAVES}")
    return run


def picture(paths: MountPaths) -> Panel:
    """The mount as `ckptfs status` shows it."""
    try:
        status = client.request(paths, "status")
    except CkptfsError as error:
        return Panel(Text(error.message, "yellow"))
    renderer = Renderer(console.width - 4)
    return Panel(
        Group(*renderer.lines(status, time.time())), title=renderer.title(status), title_align="left"
    )


def files_below(root: Path) -> set[str]:
    """Relative paths of all files and links, ckptfs's own left out."""
    found = set()
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".ckptfs")]
        found |= {os.path.relpath(os.path.join(directory, name), root) for name in files}
    return {name for name in found if not os.path.basename(name).startswith(".ckptfs")}


def verify(mounted: Path, tier: Path) -> None:
    """The tier holds exactly what the mount shows, and plain torch can load it from there."""
    shown, stored = files_below(mounted), files_below(tier)
    if shown != stored:
        raise DemoError(f"mount and tier differ in files: {sorted(shown ^ stored)}")
    _, different, unreadable = filecmp.cmpfiles(mounted, tier, sorted(shown), shallow=False)
    if different or unreadable:
        raise DemoError(f"not byte-identical on the tier: {sorted(different + unreadable)}")
    import torch

    checkpoints = sorted(name for name in stored if name.endswith(".pt"))
    newest = (tier / "run" / "latest").read_text().strip()
    if len(checkpoints) != 2 or f"run/{newest}" != checkpoints[-1]:
        raise DemoError(f"rotation or latest is wrong on the tier: {checkpoints}, latest is {newest!r}")
    for name in checkpoints:
        state = torch.load(tier / name)
        if f"step_{state['step']:05d}.pt" != os.path.basename(name) or not state["optimizer"]["state"]:
            raise DemoError(f"{name} loads from the tier but is not the checkpoint that was saved")
    console.print(
        f"  {len(stored)} files byte-identical on the tier; torch.load takes {', '.join(checkpoints)}"
    )


def table(mounted: Run, direct: Run, durable_after: float, otherwise: str) -> Table:
    """The one result: how long training stood still per checkpoint."""
    size = statistics.median(mounted.sizes)
    result = Table(
        title=f"Training blocked per {format_size(size)} checkpoint (median of {SAVES - WARM_UP} saves)"
    )
    for heading in ("", "blocked", "fastest", "slowest", "rate"):
        result.add_column(heading, justify="left" if not heading else "right")
    for label, run in (("with ckptfs", mounted), (otherwise, direct)):
        shown = [
            format_duration(seconds)
            for seconds in (run.median, min(run.blocked[WARM_UP:]), max(run.blocked[WARM_UP:]))
        ]
        result.add_row(label, *shown, format_rate(statistics.median(run.sizes) / run.median))
    result.add_row("ratio", f"{direct.median / mounted.median:.1f}x", "", "", "")
    result.caption = f"durable {format_duration(durable_after)} after the last save"
    return result


def demonstrate(base: Path) -> None:
    """The whole demonstration, in and below `base`."""
    mount, tier = base / "mnt", base / "data" / "tier"
    mount.mkdir()
    paths = MountPaths(str(mount))
    ckptfs("mount", "--config", os.devnull, str(mount))
    mounted = train("--dir", str(mount / "run"), paths=paths)
    start = time.monotonic()
    ckptfs("wait", str(mount))
    durable_after = time.monotonic() - start
    verify(mount, tier)
    os.sync()  # so that the direct run does not pay for what the first one left in the page cache
    direct = train("--dir", str(base / "direct"), "--fsync")
    ckptfs("umount", str(mount))
    console.print(table(mounted, direct, durable_after, "fsync to the tier directly"))


def clean_up(base: Path) -> tuple[list[str], list[str]]:
    """Take everything away; returns what had to be forced, and what is still there."""
    forced = []
    paths = MountPaths(str(base / "mnt"))
    if client.alive(paths):
        ckptfs("umount", "--no-drain", str(base / "mnt"), check=False)
    if not _gone(lambda: _processes(base), 15.0):
        for pid in _processes(base):
            forced.append(f"process {pid} was still there and was killed")
            os.kill(pid, signal.SIGKILL)
        _gone(lambda: _processes(base), 5.0)
    for mount in reversed(mountinfo.read()):
        if mountinfo.inside(mount.path, str(base)):
            forced.append(f"{mount.path} ({mount.fstype}) was still mounted")
            mountpoint.lazy_unmount(mount.path)
    left = [f"process {pid} cannot be ended" for pid in _processes(base)]
    left += [
        f"{mount.path} is still mounted"
        for mount in mountinfo.read()
        if mountinfo.inside(mount.path, str(base))
    ]
    if not left:  # never delete through a mount
        shutil.rmtree(base, ignore_errors=True)
    if base.exists():
        left.append(f"{base} is still there")
    return forced, left


def _gone(find: Callable[[], object], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while find():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _processes(base: Path) -> list[int]:
    """Processes started with our run directory in their environment."""
    mark = b"CKPTFS_RUN_DIR=" + os.fsencode(base)
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environment = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if any(entry.startswith(mark) for entry in environment.split(b"\0")):
                found.append(int(name))
    return found


def show_log(base: Path) -> None:
    """The end of the daemon's log, which is about to be removed."""
    for log in sorted((base / "data" / "logs").glob("*.log")):
        for line in log.read_text(errors="replace").splitlines()[-15:]:
            tell(f"  log: {line}")


def _terminate(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(demonstrate: Callable[[Path], None] = demonstrate) -> int:
    """Run a demonstration in a directory of its own; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    code = 0
    try:
        base = make_base()
    except DemoError as error:
        tell(f"demo: {error}", "red")
        return 1
    os.environ["CKPTFS_RUN_DIR"] = str(base / "run")
    os.environ["CKPTFS_DATA_DIR"] = str(base / "data")
    try:
        demonstrate(base)
    except (DemoError, CkptfsError) as error:
        show_log(base)
        tell(f"demo: {error}", "red")
        code = 1
    except KeyboardInterrupt:
        tell("demo: interrupted", "yellow")
        code = 130
    finally:
        # A second Ctrl-C must not leave a mount behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forced, left = clean_up(base)
    # After a failure there is something to force; after a success that is itself a failure.
    problems = left if code else forced + left
    for problem in problems:
        tell(f"demo: {problem}", "red")
    if problems:
        return code or 1
    tell("nothing left behind: no mount, no tmpfs, no process, no file")
    return code


if __name__ == "__main__":
    sys.exit(main())
