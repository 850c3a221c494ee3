"""The fixtures of tests/mounted, and campaigns, that leave nothing behind whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign
from tests.mounted.harness import Mount, wait_for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.path.exists("/dev/fuse") and os.geteuid() == 0
    for item in items:
        if "tests/crash" in str(item.path) and not usable:
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse and root"))


PATIENCE_S = 120.0
"""A short test that takes longer than this hangs."""


def processes_of(base: Path) -> list[int]:
    """Daemons and trainers with this directory in their command line, and workers of such daemons."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for task in Path("/proc").iterdir():
        if task.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if str(base).encode() in (task / "cmdline").read_bytes():
                    found.add(int(task.name))
                parents[int(task.name)] = int((task / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {os.getpid()})


def end(base: Path) -> None:
    """Kill what runs for a test's directory, and take all mounts below it away."""
    for pid in processes_of(base):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        target = line.split()[1].replace("\\040", " ")
        if target.startswith(str(base) + "/"):
            subprocess.run(["umount", "-l", target], check=False, capture_output=True)
    wait_for(lambda: not processes_of(base), "the end of the test's processes")


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory on local disk, gone afterwards with everything that lives in it."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-crash-", dir="/var/tmp"))
    base.chmod(0o755)
    # A call into a mount that does not answer can't be interrupted, but it ends with the daemon.
    watchdog = threading.Timer(PATIENCE_S, end, [base])
    if request.node.get_closest_marker("long") is None:
        watchdog.start()
    yield base
    watchdog.cancel()
    end(base)
    subprocess.run(["chattr", "-R", "-i", str(base)], check=False, capture_output=True)
    shutil.rmtree(base)


@pytest.fixture
def new_mount(disk: Path) -> Callable[..., Mount]:
    """Makes mounts (not started)."""

    def make(name: str = "m", tier: Path | None = None) -> Mount:
        return Mount(disk, name, tier)

    return make


@pytest.fixture
def campaign(new_mount: Callable[..., Mount]) -> Iterator[Callable[..., Campaign]]:
    """Makes campaigns (not started), on a mount of their own started with the given TOML if none is given."""
    made: list[Campaign] = []

    def make(seed: int, mount: Mount | None = None, config: str = QUICK, **options: int) -> Campaign:
        if mount is None:
            mount = new_mount()
            mount.start(config=config)
        made.append(Campaign(mount, seed, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


QUICK = "settle_time = 0.3\n"
"""So that short tests see uploads, not only files that wait to be sent."""
