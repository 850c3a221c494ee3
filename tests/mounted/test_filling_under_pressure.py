"""Staging files that a worker is still filling (copies of versions in flight, files from the tier) while
others need room: what is not there yet must not be spilled as the hole that it is."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from tests.mounted.harness import Mount, wait_for

MIB = 1 << 20

NewMount = Callable[..., Mount]


def zeros(got: bytes, want: bytes) -> list[int]:
    """Which MiB differ."""
    assert len(got) == len(want)
    return [i // MIB for i in range(0, len(want), MIB) if got[i : i + MIB] != want[i : i + MIB]]


@pytest.mark.parametrize(("writers", "size_mib"), [(12, 64), (20, 100)])
def test_a_file_from_the_tier_larger_than_the_cache_is_patched(
    new_mount: NewMount, writers: int, size_mib: int
) -> None:
    mount = new_mount()
    want = bytearray(random.Random(5).randbytes(size_mib * MIB))
    (mount.tier / "f").write_bytes(want)
    mount.start("--cache-size", "64MiB", "--spill-size", "2GiB")
    files = [open(mount.point / f"small{i}", "wb", buffering=0) for i in range(writers)]  # noqa: SIM115
    try:
        for f in files:
            f.write(b"s" * (2 * MIB))
        fd = os.open(mount.point / "f", os.O_WRONLY)
        os.pwrite(fd, b"X", 7)
        os.close(fd)
        want[7:8] = b"X"
        assert zeros((mount.point / "f").read_bytes(), want) == []
    finally:
        for f in files:
            f.close()
    mount.wait(timeout=60)
    assert zeros((mount.tier / "f").read_bytes(), want) == []
    assert mount.status()["errors"] == 0


def test_versions_in_flight_are_patched_while_others_need_the_room(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start("--cache-size", "64MiB", "--spill-size", "3GiB", config="settle_time = 0.1\n")
    away = mount.tier.with_name("away")
    mount.tier.rename(away)
    stop = threading.Event()

    def others(k: int) -> None:
        held = []
        for i in range(100):
            if stop.is_set():
                break
            f = open(mount.point / f"s{k}.{i}", "wb", buffering=0)  # noqa: SIM115
            f.write(bytes([65 + k]) * (3 * MIB))
            held.append(f)
            if len(held) > 6:
                held.pop(0).close()
        for f in held:
            f.close()

    threads = [threading.Thread(target=others, args=(k,)) for k in range(3)]
    wanted = {}
    try:
        for t in threads:
            t.start()
        for r in range(4):
            want = bytearray(random.Random(r).randbytes(20 * MIB))
            path = mount.point / f"big{r}"
            path.write_bytes(want)
            fd = os.open(path, os.O_WRONLY)
            os.pwrite(fd, b"X" * 10, len(want) - 100)
            os.close(fd)
            want[-100:-90] = b"X" * 10
            wanted[path.name] = bytes(want)
            assert zeros(path.read_bytes(), want) == []
    finally:
        stop.set()
        for t in threads:
            t.join()
        away.rename(mount.tier)
    mount.wait(timeout=60)
    for name, content in wanted.items():
        assert zeros((mount.tier / name).read_bytes(), content) == []


def test_the_spill_waits_for_the_journal(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start("--cache-size", "64MiB", "--spill-size", "1GiB")
    journal = next(mount.run_dir.glob("*/journal"))

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(journal)], check=True)

    written, failed = [0], []

    def fill() -> None:
        try:
            while written[0] < 150 * MIB:
                written[0] += f.write(b"z" * MIB)
        except OSError as e:
            failed.append(e)

    with open(mount.point / "a", "wb", buffering=0) as f:
        f.write(b"z")
        st = os.statvfs(journal)
        resize((st.f_blocks - st.f_bfree) * st.f_frsize)
        thread = threading.Thread(target=fill)
        thread.start()
        try:
            wait_for(lambda: mount.status()["journal_error"] or not thread.is_alive(), "a full journal")
            time.sleep(1)
            assert thread.is_alive()
        finally:
            resize(256 * MIB)
            thread.join()
    assert failed == []
    mount.wait(timeout=60)
    assert (mount.tier / "a").read_bytes() == b"z" * (written[0] + 1)
