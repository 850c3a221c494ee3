"""How fast the mount absorbs, as ratios against limits measured in the same run.

    python tools/bench_absorb.py [--size-mib 1024] [--runs 5] [--tier-dir DIR]

Needs root (mounts a tmpfs to compare with), torch, and /dev/fuse. Prints one table; medians, after
a warm-up. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table


class Bench:
    """One mount, one plain tmpfs, one directory on the tier's file system."""

    def __init__(self, base: Path, tier: Path, cache_mib: int, settle_s: float = 2.0) -> None:
        self.base = base
        self.settle_s = settle_s
        self.mount = base / "mnt"
        self.plain = base / "tmpfs"
        self.warm = base / "warm"
        self.tier = tier
        self.cache_mib = cache_mib
        self.env = {**os.environ, "CKPTFS_RUN_DIR": str(base / "run"), "CKPTFS_DATA_DIR": str(base / "data")}

    def ckptfs(self, *args: str) -> None:
        """Run a command; its failure ends the benchmark."""
        subprocess.run(
            [sys.executable, "-m", "ckptfs", *args], env=self.env, check=True, stdout=subprocess.DEVNULL
        )

    def __enter__(self) -> Bench:
        self.base.mkdir(exist_ok=True)
        self.tier.mkdir(exist_ok=True)
        self.mount.mkdir()
        self.plain.mkdir()
        self.warm.mkdir()
        for dir, options in ((self.plain, "size=80%"), (self.warm, "size=80%,huge=within_size")):
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "bench", str(dir)], check=True)
        config = self.base / "ckptfs.toml"
        lines = (
            f'tier = "file://{self.tier}"',
            f'cache_size = "{self.cache_mib}MiB"',
            f"settle_time = {self.settle_s}",
        )
        config.write_text("\n".join(lines) + "\n")
        self.ckptfs("mount", str(self.mount), "--config", str(config))
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run([sys.executable, "-m", "ckptfs", "umount", str(self.mount)], env=self.env, check=False)
        subprocess.run(["umount", "-l", str(self.mount)], check=False, stderr=subprocess.DEVNULL)
        for dir in (self.plain, self.warm):
            subprocess.run(["umount", "-l", str(dir)], check=False)

    def settle(self) -> None:
        """Nothing on its way to the tier."""
        self.ckptfs("wait", "--mount", str(self.mount))


def touch_memory(warm: Path, mib: int) -> None:
    """Touch as much memory as is about to be used, and give it back.

    On virtual machines the first touch is many times slower, also of what the guest has used before
    and given back to the host a few seconds after it was freed: without this whoever comes first,
    or pauses, is charged for it.
    """
    block = b"\1" * (1 << 20)
    with (warm / "touched").open("wb", buffering=0) as f:
        for _ in range(mib):
            f.write(block)
    (warm / "touched").unlink()


def timed(action: Callable[[], None]) -> float:
    """Seconds an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def medians(runs: int, *actions: Callable[[], float]) -> list[float]:
    """Median of each, taken in turn (so that drift hits all alike), after one warm-up of each."""
    for action in actions:
        action()
    rows = [[action() for action in actions] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def bench_save(b: Bench, size_mib: int, runs: int, table: Table) -> None:
    """torch.save on the mount, on a plain tmpfs, and to the tier's file system with fsync."""
    import torch

    state = {f"w{i}": torch.rand(4 << 20) for i in range(max(1, size_mib // 16))}

    def save(path: Path, *, sync: bool) -> float:
        def run() -> None:
            torch.save(state, path)
            if sync:
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

        touch_memory(b.warm, size_mib * 5 // 4)
        seconds = timed(run)
        path.unlink()
        return seconds

    direct = b.tier.parent / "direct"
    direct.mkdir(exist_ok=True)
    mount, plain = medians(
        runs, lambda: save(b.mount / "m.pt", sync=False), lambda: save(b.plain / "m.pt", sync=False)
    )
    (tier,) = medians(max(2, runs // 2), lambda: save(direct / "m.pt", sync=True))
    shutil.rmtree(direct)
    table.add_row(
        f"torch.save {size_mib} MiB", f"{mount:.2f} s", f"plain tmpfs {plain:.2f} s", f"{plain / mount:.2f}"
    )
    table.add_row("", f"{mount:.2f} s", f"fsync to the tier {tier:.2f} s", f"{tier / mount:.1f}x less stall")


def small_files(dir: Path, count: int) -> float:
    """Files per second: create, 4 KiB, close."""
    block = b"x" * 4096

    def run() -> None:
        for i in range(count):
            fd = os.open(dir / f"f{i}", os.O_CREAT | os.O_WRONLY | os.O_EXCL)
            os.write(fd, block)
            os.close(fd)

    return count / timed(run)


def bench_small(b: Bench, runs: int, table: Table) -> None:
    """Small files, created in a fresh directory each time, while those of earlier runs go to the tier."""
    number = iter(range(1000))
    made: list[Path] = []

    def on(top: Path) -> float:
        dir = top / f"small{next(number)}"
        dir.mkdir()
        made.append(dir)
        return small_files(dir, 2000)

    mount, plain = medians(2 * runs, lambda: on(b.mount), lambda: on(b.plain))
    for dir in made:
        shutil.rmtree(dir)
    table.add_row(
        "create + 4 KiB + close", f"{mount:.0f}/s", f"plain tmpfs {plain:.0f}/s", f"{mount / plain:.3f}"
    )


def bench_rename(b: Bench, runs: int, table: Table) -> None:
    """rename(2) of a directory with 10,000 files that the tier does not have."""
    dir = b.mount / "many"
    dir.mkdir()
    small_files(dir, 10_000)
    seconds = []
    for i in range(runs + 1):
        target = b.mount / f"many{i}"
        seconds.append(timed(lambda d=dir, t=target: os.rename(d, t)))  # type: ignore[misc]
        dir = target
    shutil.rmtree(dir)
    table.add_row(
        "rename of a directory, 10,000 dirty files", f"{statistics.median(seconds) * 1000:.1f} ms", "", ""
    )


def bench_under_flush(b: Bench, size_mib: int, runs: int, table: Table) -> None:
    """Writing while a flush runs, against writing while nothing does."""
    block = os.urandom(1 << 20)

    def write(path: Path) -> float:
        def run() -> None:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            for _ in range(size_mib):
                os.write(fd, block)
            os.close(fd)

        return timed(run)

    idle, busy = [], []
    for i in range(runs + 1):
        b.settle()
        touch_memory(b.warm, 4 * size_mib)
        idle.append(write(b.mount / "idle"))
        (b.mount / "idle").unlink()
        b.settle()
        touch_memory(b.warm, 4 * size_mib)
        for k in range(2):
            write(b.mount / f"load{k}")
        waiter = subprocess.Popen(
            [sys.executable, "-m", "ckptfs", "wait", "--mount", str(b.mount), "--timeout", "300"],
            env=b.env, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wanted = b.tier / ".ckptfs" / "uploads"
        while not any(p.is_file() and p.stat().st_blocks for p in wanted.rglob("*")):
            time.sleep(0.005)
        busy.append(write(b.mount / "busy"))
        waiter.wait()
        for name in ("busy", "load0", "load1"):
            (b.mount / name).unlink()
        if i == 0:
            idle.clear()
            busy.clear()
    a, c = statistics.median(idle), statistics.median(busy)
    table.add_row(f"write {size_mib} MiB while a flush runs", f"{c:.2f} s", f"idle {a:.2f} s", f"{a / c:.2f}")


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tier-dir", default="/var/tmp")
    parser.add_argument("--only", choices=["save", "small", "rename", "flush"], action="append")
    args = parser.parse_args()
    table = Table(title="ckptfs absorb, medians of one run")
    for column in ("what", "ckptfs", "against", "ratio"):
        table.add_column(column)
    base = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=args.tier_dir))
    parts = {
        "save": lambda b: bench_save(b, args.size_mib, args.runs, table),
        "small": lambda b: bench_small(b, args.runs, table),
        "rename": lambda b: bench_rename(b, args.runs, table),
        "flush": lambda b: bench_under_flush(b, args.size_mib, args.runs, table),
    }
    try:
        for name, part in parts.items():
            if args.only and name not in args.only:
                continue
            # What is renamed must not have reached the tier.
            settle_s = 3600.0 if name == "rename" else 2.0
            with Bench(base / name, base / f"{name}-tier", args.size_mib * 5, settle_s) as bench:
                part(bench)
                bench.settle()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    Console().print(table)


if __name__ == "__main__":
    main()
