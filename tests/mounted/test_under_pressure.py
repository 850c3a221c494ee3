"""Small cache, spill, evictions, rewrites and readers at once: the bytes stay right everywhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.mounted.harness import Mount, alive, wait_for
from tests.mounted.oracle import outcome

MIB = 1 << 20
NewMount = Callable[..., Mount]

STRESS = """
import os, random, sys
top, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
have = {}
def check(name):
    with open(f"{top}/{name}", "rb") as f:
        got = f.read()
    if got != have[name]:
        pairs = enumerate(zip(got, have[name]))
        at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(have[name])))
        sys.exit(f"seed {seed}: {name} differs at {at} of {len(have[name])} ({len(got)} found)")
for step in range(steps):
    name = f"{seed}-{rng.randrange(4)}"
    path = f"{top}/{name}"
    kind = rng.choice("write write patch append rdwr truncate rename unlink read read".split())
    if name not in have:
        kind = "write"
    data = (b"%08d" % step * (1 << 17)) * rng.randrange(1, 7) + rng.randbytes(rng.randrange(5000))
    if kind == "write":
        with open(path, "wb") as f:
            for at in range(0, len(data), 1 << 20):
                f.write(data[at:at + (1 << 20)])
        have[name] = data
    elif kind in ("patch", "rdwr"):
        fd = os.open(path, os.O_WRONLY if kind == "patch" else os.O_RDWR)
        at = rng.randrange(len(have[name]) + 1)
        piece = data[:rng.randrange(1, 300_000)]
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], at + done)
        os.close(fd)
        have[name] = have[name][:at] + piece + have[name][at + len(piece):]
    elif kind == "append":
        with open(path, "ab") as f:
            f.write(data[:400_000])
        have[name] += data[:400_000]
    elif kind == "truncate":
        size = rng.randrange(len(have[name]) + 300_000)
        os.truncate(path, size)
        have[name] = have[name][:size].ljust(size, b"\\0")
    elif kind == "rename":
        other = f"{seed}-{rng.randrange(4)}"
        os.rename(path, f"{top}/{other}")
        have[other] = have.pop(name)
    elif kind == "unlink":
        os.unlink(path)
        del have[name]
    else:
        check(name)
for name in have:
    check(name)
import hashlib
for name in sorted(have):
    print(name, hashlib.sha256(have[name]).hexdigest())
"""


def stress(top: Path, seed: int, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STRESS, str(top), str(seed), str(steps)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_writers_readers_spill_and_evictions_at_once(new_mount: NewMount) -> None:
    import hashlib

    mount = new_mount()
    mount.start("--cache-size", "24MiB", "--spill-size", "200MiB", config="settle_time = 0\n")
    workers = [stress(mount.point, seed, 40) for seed in range(4)]
    answers = [w.communicate(timeout=100) for w in workers]
    assert [err for _, err in answers] == [""] * 4
    mount.wait(timeout=60)
    wanted = dict(line.split() for out, _ in answers for line in out.splitlines())
    for top in (mount.tier, mount.point):
        assert {n for n in os.listdir(top) if n != ".ckptfs"} == set(wanted)
        for name, digest in wanted.items():
            assert hashlib.sha256((top / name).read_bytes()).hexdigest() == digest, (top, name)
    assert mount.status()["errors"] == 0
    mount.umount()
    assert list(mount.spill.iterdir()) == []


def test_truncation_by_one_process_while_another_writes(shared: Mount) -> None:
    """O_TRUNC does not wait for writers: whatever comes of it, size and bytes agree with each other."""
    path = shared.point / "both"
    path.write_bytes(b"x" * MIB)
    stop = threading.Event()

    def truncate() -> None:
        while not stop.is_set():
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))

    def read() -> None:
        while not stop.is_set():
            data = path.read_bytes()
            assert set(data) <= {0, ord("x")}

    threads = [threading.Thread(target=truncate), threading.Thread(target=read)]
    for t in threads:
        t.start()
    rng = random.Random(3)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        fd = os.open(path, rng.choice([os.O_WRONLY, os.O_RDWR]))
        for _ in range(5):
            os.pwrite(fd, b"x" * 5000, rng.randrange(MIB))
        os.close(fd)
    stop.set()
    for t in threads:
        t.join()
    path_bytes = path.read_bytes()
    assert len(path_bytes) == path.stat().st_size
    shared.wait(path)
    assert (shared.tier / "both").read_bytes() == path_bytes


def test_a_cold_file_is_truncated_and_patched_under_its_readers(new_mount: NewMount) -> None:
    mount = new_mount()
    for i in range(4):
        (mount.tier / f"cold{i}").write_bytes(b"c" * (20 * MIB))
    mount.start()
    errors: list[object] = []

    def read(i: int) -> None:
        for _ in range(3):
            got = outcome((mount.point / f"cold{i}").read_bytes)
            if not isinstance(got, bytes) or set(got) - set(b"cn\0"):
                errors.append(got if isinstance(got, str) else set(got))

    threads = [threading.Thread(target=read, args=(i % 4,)) for i in range(8)]
    for t in threads:
        t.start()
    (mount.point / "cold0").write_bytes(b"n" * MIB)
    os.truncate(mount.point / "cold1", 5)
    fd = os.open(mount.point / "cold2", os.O_WRONLY)
    os.pwrite(fd, b"n", 7)
    os.close(fd)
    os.unlink(mount.point / "cold3")
    (mount.point / "cold3").write_bytes(b"n")
    for t in threads:
        t.join(40)
        assert not t.is_alive(), "a reader hangs"
    assert set(errors) <= {"ENOENT"}
    mount.wait()
    assert (mount.tier / "cold0").read_bytes() == b"n" * MIB
    assert (mount.tier / "cold1").read_bytes() == b"c" * 5
    assert (mount.tier / "cold2").read_bytes() == b"c" * 7 + b"n" + b"c" * (20 * MIB - 8)
    assert (mount.tier / "cold3").read_bytes() == b"n"


def test_a_writer_that_needs_bytes_of_a_tier_that_is_down_can_be_killed(new_mount: NewMount) -> None:
    mount = new_mount()
    (mount.tier / "cold").write_bytes(b"c" * (20 * MIB))
    mount.start()
    assert (mount.point / "cold").exists()
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    script = "import os,sys\nfd=os.open(sys.argv[1],os.O_WRONLY)\nprint(flush=True)\nos.pwrite(fd,b'x',5)\n"
    p = subprocess.Popen(
        [sys.executable, "-c", script, str(mount.point / "cold")], stdout=subprocess.PIPE, text=True
    )
    assert p.stdout is not None
    p.stdout.readline()
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
    p.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(p.pid), "its end", 3)
    p.communicate()
    aside.rename(mount.tier)
    mount.wait()
    assert (mount.tier / "cold").read_bytes() == b"c" * (20 * MIB)
    assert (mount.point / "cold").read_bytes() == b"c" * (20 * MIB)
