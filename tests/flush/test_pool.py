"""Real worker processes."""

# Blocking file calls are all right in these loops, which serve nobody else, and what other processes
# do can only be polled for.
# ruff: noqa: ASYNC110, ASYNC230, ASYNC240

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash

import ckptfs
from ckptfs.flush.pool import PoolSettings, WorkerDied, WorkerPool
from ckptfs.tiers.base import LARGEST, Attrs, Digest, Draft, Put, Source, TierError, TierInfo, Trouble

LIMIT = 30.0
"""Seconds after which a test that hangs is ended."""


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """trio.run with a deadline."""

    async def limited() -> Any:
        with trio.fail_after(LIMIT):
            return await main()

    return trio.run(limited)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[PoolSettings]:
    (tmp_path / "tier").mkdir()
    with open(tmp_path / "stderr", "w") as stderr:
        yield PoolSettings(f"file://{tmp_path}/tier", "0000-mount", count=2, threads=4, stderr=stderr)


@contextlib.asynccontextmanager
async def running(settings: PoolSettings) -> AsyncIterator[WorkerPool]:
    """A pool whose workers are all gone afterwards."""
    pids: set[int] = set()
    async with trio.open_nursery() as nursery:
        pool = WorkerPool(settings, nursery)
        await pool.start()
        try:
            yield pool
        finally:
            pids.update(pool.pids)
            await pool.close()
    assert pool.pids == []
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()  # dead and reaped


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something another process does."""
    while not condition():
        await trio.sleep(0.005)


def staged(tmp_path: Path, data: bytes, name: str = "staged") -> Source:
    path = tmp_path / name
    path.write_bytes(data)
    return Source(str(path), 0, len(data))


def state(pid: int) -> str:
    """The process state letter of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_calls_reach_the_tier_and_its_errors_come_back(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(settings) as pool:
            info = await pool.call("probe")
            assert isinstance(info, TierInfo)
            data = random.Random(1).randbytes(1 << 20)
            upload = await pool.call(
                "begin", Draft("v1", b"run/f", len(data), 1 << 20, Attrs(0o644, 0, 0, 1, 2))
            )
            digest = await pool.call("send", upload, 0, staged(tmp_path, data))
            assert digest == xxhash.xxh3_128_digest(data)
            digests = (Digest(0, len(data), digest),)
            put = Put(b"run/f", upload, len(data), Attrs(0o644, 0, 0, 1, 2), digests, None, "v1")
            outcome = await pool.call("apply", [put])
            assert outcome.failed is None
            assert (tmp_path / "tier/run/f").read_bytes() == data
            assert await pool.call("read", b"run/f", outcome.applied[0].token, 0, len(data)) == data
            assert [found.name for found in await pool.call("listdir", b"run")] == [b"f"]
            with pytest.raises(TierError) as caught:
                await pool.call("listdir", b"none")
            assert (caught.value.trouble, caught.value.errno) == (Trouble.CHANGED, errno.ENOENT)
            assert type(caught.value) is TierError
            assert pool.in_flight == 0

    run(main)


def test_unexpected_exceptions_are_wrapped_and_logged(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(settings) as pool:
            await pool.call("probe")
            with pytest.raises(TierError) as caught:
                await pool.call("listdir", 42)
            assert caught.value.trouble is Trouble.DOWN
            with pytest.raises(TierError) as caught:
                await pool.call("__init__")
            assert caught.value.trouble is Trouble.REFUSED
            assert await pool.call("ping") in pool.pids
            assert pool.restarts == 0

    run(main)
    log = (tmp_path / "stderr").read_text()
    assert "Traceback" in log
    assert "listdir" in log


def test_a_tier_that_cannot_be_opened_fails_calls_not_workers(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        bad = PoolSettings("nonsense://x", "0000-mount", count=1, stderr=settings.stderr)
        async with running(bad) as pool:
            for _ in range(2):
                with pytest.raises(TierError) as caught:
                    await pool.call("probe")
                assert caught.value.trouble is Trouble.DOWN
                assert "nonsense" in str(caught.value)
            data = b"local jobs need no tier"
            assert await pool.call("digest", staged(tmp_path, data)) == xxhash.xxh3_128_digest(data)
            assert pool.restarts == 0

    run(main)


def test_local_jobs(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(settings) as pool:
            data = random.Random(2).randbytes(5 << 20)
            source = staged(tmp_path, data)
            ram, spill = source.ram_path, str(tmp_path / "spill")

            assert await pool.call("spill", ram, spill, 1 << 20, 1 << 20) == 1 << 20
            assert os.stat(spill).st_size == 2 << 20
            assert os.stat(spill).st_blocks * 512 < 2 << 20
            assert Path(spill).read_bytes()[1 << 20 :] == data[1 << 20 : 2 << 20]
            assert await pool.call("spill", ram, spill, 4 << 20, 4 << 20) == 1 << 20
            assert await pool.call("spill", ram, spill, 9 << 20, 1 << 20) == 0

            mixed = Source(ram, 0, len(data), spill, 1 << 20, frozenset({1, 4}))
            with open(ram, "r+b") as file:  # what staging does once an extent is spilled
                for extent in (1, 4):
                    file.seek(extent << 20)
                    file.write(bytes(1 << 20))
            assert await pool.call("digest", mixed) == xxhash.xxh3_128_digest(data)
            chunks = await pool.call("digest_chunks", mixed, 2 << 20)
            assert [(item.offset, item.length) for item in chunks] == [
                (0, 2 << 20),
                (2 << 20, 2 << 20),
                (4 << 20, 1 << 20),
            ]
            assert chunks[1].xxh3 == xxhash.xxh3_128_digest(data[2 << 20 : 4 << 20])

            into = str(tmp_path / "clone")
            assert await pool.call("clone", mixed, into) == len(data)
            assert Path(into).read_bytes() == data

            # A spill again after the extent became a hole: no bytes of before are left.
            with open(ram, "r+b") as file:
                file.truncate(1 << 20)
                file.truncate(2 << 20)
            assert await pool.call("spill", ram, spill, 1 << 20, 1 << 20) == 0
            assert Path(spill).read_bytes()[1 << 20 : 2 << 20] == bytes(1 << 20)

            for call in (("digest", Source("/none", 0, 1)), ("spill", "/none", spill, 0, 1)):
                with pytest.raises(TierError) as caught:
                    await pool.call(*call)
                assert (caught.value.trouble, caught.value.errno) == (Trouble.REDO, errno.ENOENT)

    run(main)


def test_holes_are_kept_and_not_filled_by_looking(settings: PoolSettings, tmp_path: Path) -> None:
    """A mapping of a hole of a tmpfs file allocates pages when touched; the budget must not see any."""
    tmpfs = Path("/dev/shm")
    if not os.access(tmpfs, os.W_OK):
        pytest.skip("no /dev/shm")
    ram, into = tmpfs / f"ckptfs-test-{os.getpid()}", tmpfs / f"ckptfs-test-{os.getpid()}-clone"

    async def main() -> None:
        with open(ram, "wb") as file:
            file.truncate(256 << 20)
            file.seek(100 << 20)
            file.write(b"x" * 4096)
        before = os.stat(ram).st_blocks
        async with running(settings) as pool:
            source = Source(str(ram), 0, 256 << 20)
            expected = xxhash.xxh3_128_digest(ram.read_bytes())
            assert await pool.call("digest", source) == expected
            assert await pool.call("clone", source, str(into)) <= 2 << 20
            assert await pool.call("digest", Source(str(into), 0, 256 << 20)) == expected
        assert os.stat(ram).st_blocks == before
        assert os.stat(into).st_blocks * 512 <= 4 << 20

    try:
        run(main)
    finally:
        for path in (ram, into):
            path.unlink(missing_ok=True)


def test_calls_run_at_the_same_time_in_all_workers(settings: PoolSettings, tmp_path: Path) -> None:
    """Eight data calls hang on pipes without a writer: all are in flight, and none keeps metadata waiting."""

    async def main() -> None:
        pipes = [tmp_path / f"pipe{n}" for n in range(8)]
        for pipe in pipes:
            os.mkfifo(pipe)
        results: list[TierError] = []

        async def digest(pool: WorkerPool, pipe: Path) -> None:
            with pytest.raises(TierError) as caught:
                await pool.call("digest", Source(str(pipe), 0, 1))
            results.append(caught.value)

        async with running(settings) as pool:
            await pool.call("probe")
            async with trio.open_nursery() as nursery:
                for pipe in pipes:
                    nursery.start_soon(digest, pool, pipe)
                opened = []
                for pipe in pipes:  # each has its reader in a worker by then
                    opened.append(await _writer(pipe))
                    assert await pool.call("listdir", b"") == []
                for fd in opened:
                    os.close(fd)
            assert len(results) == 8
            assert {await pool.call("ping") for _ in range(20)} <= set(pool.pids)

    run(main)


def test_the_least_loaded_worker_is_taken(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        os.mkfifo(tmp_path / "pipe")
        async with running(settings) as pool, trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(_ignoring, pool, "digest", Source(str(tmp_path / "pipe"), 0, 1))
            await until(lambda: pool.in_flight == 2)
            assert [len(process.running) for process in pool._live] == [1, 1]
            fd = await _writer(tmp_path / "pipe")
            await until(lambda: pool.in_flight == 0)
            os.close(fd)

    run(main)


async def _ignoring(pool: WorkerPool, method: str, *args: Any) -> None:
    with contextlib.suppress(TierError):
        await pool.call(method, *args)


async def _writer(pipe: Path) -> int:
    """A writer's descriptor, as soon as the pipe has a reader."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            await trio.sleep(0.005)


def test_a_killed_worker_is_reaped_before_its_calls_fail_and_is_replaced(
    settings: PoolSettings, tmp_path: Path
) -> None:
    async def main() -> None:
        os.mkfifo(tmp_path / "pipe")
        one = PoolSettings(settings.url, "0000-mount", count=1, stderr=settings.stderr)
        async with running(one) as pool:
            info = await pool.call("probe")
            (pid,) = pool.pids
            died: list[WorkerDied] = []

            async def victim() -> None:
                with pytest.raises(WorkerDied) as caught:
                    await pool.call("digest", Source(str(tmp_path / "pipe"), 0, 1))
                assert not Path(f"/proc/{pid}").exists()
                died.append(caught.value)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(victim)
                await until(lambda: pool.in_flight == 3)
                os.kill(pid, signal.SIGKILL)
            assert [(error.trouble, error.pid) for error in died] == [(Trouble.DOWN, pid)] * 3
            # The next call waits for the successor, which knows the tier that was probed.
            assert await pool.call("listdir", b"") == []
            assert pool.pids != [pid]
            assert pool.restarts == 1
            assert (await pool.call("probe")).tier_id == info.tier_id

    run(main)


def test_what_a_probe_found_is_handed_to_all_workers(
    settings: PoolSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to those that start later. The workers run a tier of this test."""
    package = tmp_path / "site" / "sitecustomize.py"
    package.parent.mkdir()
    package.write_text(
        "import sys, types, ckptfs.tiers\n"
        "from ckptfs.tiers.base import TierInfo\n"
        "class T:\n"
        "    def __init__(self, options): self.options = dict(options)\n"
        "    def probe(self): return TierInfo('x', 'id', notes=('note',), largest=7, caps='able')\n"
        "    def stat(self, path): return self.options\n"
        "ckptfs.tiers.open_tier = lambda url, mount, options: T(options)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    found = {**settings.options, "tier_id": "id", "caps": "able"}

    async def main() -> None:
        async with running(settings) as pool:
            assert await pool.call("stat", b"") == settings.options
            assert (pool.notes, pool.largest) == ((), LARGEST)
            await pool.call("probe")
            assert (pool.notes, pool.largest) == (("note",), 7)
            for _ in range(8):
                assert await pool.call("stat", b"") == found
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: pool.restarts == 2)
            assert await pool.call("stat", b"") == found

    run(main)


def test_a_successor_accepts_no_other_tier(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(settings) as pool:
            await pool.call("probe")
            (tmp_path / "tier").rename(tmp_path / "away")
            (tmp_path / "tier").mkdir()
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: pool.restarts == 2)
            with pytest.raises(TierError) as caught:
                await pool.call("probe")
            assert caught.value.trouble is Trouble.DOWN
            assert list((tmp_path / "tier").iterdir()) == []

    run(main)


def test_workers_that_die_at_once_are_replaced_more_and_more_slowly(
    settings: PoolSettings, tmp_path: Path
) -> None:
    async def main() -> None:
        one = PoolSettings(settings.url, "0000-mount", count=1, stderr=settings.stderr)
        async with running(one) as pool:
            gaps = []
            for _ in range(4):
                await until(lambda: len(pool.pids) == 1)
                killed = trio.current_time()
                os.kill(pool.pids[0], signal.SIGKILL)
                await until(lambda: not pool.pids)
                await until(lambda: len(pool.pids) == 1)
                gaps.append(trio.current_time() - killed)
            assert gaps[-1] > gaps[0]
            assert gaps[-1] >= 0.4
            assert await pool.call("ping") == pool.pids[0]

    run(main)


def test_a_cancelled_call_runs_on_and_its_reply_is_dropped(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        os.mkfifo(tmp_path / "pipe")
        async with running(settings) as pool:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_ignoring, pool, "digest", Source(str(tmp_path / "pipe"), 0, 1))
                    await until(lambda: pool.in_flight == 1)
                    scope.cancel()
            assert pool.in_flight == 1
            os.close(await _writer(tmp_path / "pipe"))
            await until(lambda: pool.in_flight == 0)
            for _ in range(10):
                assert await pool.call("ping") in pool.pids
            assert pool.restarts == 0

    run(main)


def test_close_ends_calls_and_refuses_new_ones(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        os.mkfifo(tmp_path / "pipe")
        async with running(settings) as pool:
            async with trio.open_nursery() as nursery:

                async def victim() -> None:
                    with pytest.raises(WorkerDied):
                        await pool.call("digest", Source(str(tmp_path / "pipe"), 0, 1))

                nursery.start_soon(victim)
                await until(lambda: pool.in_flight == 1)
                await pool.close()
            with pytest.raises(WorkerDied):
                await pool.call("ping")
            await pool.close()

    run(main)


def test_cancelling_the_nursery_leaves_no_process(settings: PoolSettings) -> None:
    async def main() -> list[int]:
        pids: list[int] = []
        async with trio.open_nursery() as nursery:
            pool = WorkerPool(settings, nursery)
            await pool.start()
            pids = pool.pids
            nursery.cancel_scope.cancel()
        return pids

    pids = run(main)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_ignore_the_signals_of_the_terminal_and_the_service_manager(settings: PoolSettings) -> None:
    async def main() -> None:
        async with running(settings) as pool:
            for pid in [await pool.call("ping") for _ in range(2)] + pool.pids:
                # SigIgn is set first thing in a worker, which has answered or will.
                await until(lambda pid=pid: _ignores(pid, signal.SIGTERM))  # type: ignore[misc]
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    os.kill(pid, number)
            assert await pool.call("ping") in pool.pids
            assert pool.restarts == 0

    run(main)


def _ignores(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) & 1 << (number - 1))
    return False


def test_workers_inherit_only_what_they_are_given(settings: PoolSettings, tmp_path: Path) -> None:
    async def main() -> None:
        lock, secret = (tmp_path / name for name in ("lock", "secret"))
        with open(lock, "w") as lock_file, open(secret, "w") as secret_file:
            os.set_inheritable(secret_file.fileno(), True)
            one = PoolSettings(
                settings.url, "m", count=1, niceness=3, pass_fds=(lock_file.fileno(),), stderr=settings.stderr
            )
            async with running(one) as pool:
                pid = await pool.call("ping")
                links = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
                assert str(lock) in links
                assert str(secret) not in links
                assert os.readlink(f"/proc/{pid}/cwd") == "/"
                assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 3

    run(main)


PARENT = """
import sys, trio
from ckptfs.flush.pool import PoolSettings, WorkerPool
from ckptfs.tiers.base import Source

async def main():
    async with trio.open_nursery() as nursery:
        pool = WorkerPool(PoolSettings(sys.argv[1], "m", count=2), nursery)
        await pool.start()
        await pool.call("ping")
        nursery.start_soon(pool.call, "digest", Source(sys.argv[2], 0, 1))
        print(*pool.pids, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_workers_die_with_their_parent(settings: PoolSettings, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    package = str(Path(ckptfs.__file__).resolve().parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, settings.url, str(tmp_path / "pipe")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": package},
    ) as parent:
        assert parent.stdout is not None
        pids = [int(text) for text in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + LIMIT
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.005)


def _lives(pid: int) -> bool:
    try:
        return state(pid) not in "ZX"
    except FileNotFoundError:
        return False


def test_importing_a_worker_is_cheap() -> None:
    code = (
        "import sys, ckptfs.flush.worker, ckptfs.tiers.file;"
        "print([m for m in ('boto3', 'botocore', 'torch', 'numpy', 'pyfuse3', 'trio') if m in sys.modules])"
    )
    package = str(Path(ckptfs.__file__).resolve().parent.parent)
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": package},
    )
    assert out.stdout.strip() == "[]"
