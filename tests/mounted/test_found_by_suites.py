"""What suites from outside found wrong once."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pyfuse3
import pytest

from ckptfs.fuse.guard import HANDLERS
from ckptfs.fuse.operations import Operations
from tests.mounted.harness import Mount
from tests.mounted.oracle import outcome, run_as


def test_every_handler_is_guarded() -> None:
    for name in HANDLERS:
        handler = getattr(Operations, name)
        assert handler is getattr(pyfuse3.Operations, name) or hasattr(handler, "__wrapped__"), name


@pytest.mark.parametrize("call", ["open", "stat", "unlink", "rmdir", "mkdir", "truncate", "create"])
def test_a_name_that_is_too_long(shared: Mount, call: str) -> None:
    path = shared.point / ("n" * 256)
    calls = {
        "open": lambda: os.open(path, os.O_RDONLY),
        "create": lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o600),
        "truncate": lambda: os.truncate(path, 1),
    }
    assert outcome(calls.get(call, lambda: getattr(os, call)(path))) == "ENAMETOOLONG"
    os.listdir(shared.point)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_a_write_by_somebody_else_ends_set_user_id(shared: Mount, flags: int) -> None:
    path = shared.point / f"set-id-{flags}"
    path.write_bytes(b"#!")
    os.chmod(path, 0o6777)

    def write() -> int:
        fd = os.open(path, flags)
        os.write(fd, b"x")
        os.close(fd)
        return stat.S_IMODE(os.stat(path).st_mode)

    shared.base.chmod(0o755)
    assert run_as(65534, 65534, write) == repr(0o777)


def test_time_does_not_run_backwards(shared: Mount) -> None:
    path: Path = shared.point / "clock"
    path.write_bytes(b"")
    for _ in range(50):
        path.write_bytes(b"x")
        written = path.stat().st_mtime_ns
        os.utime(path)  # the kernel's own clock
        assert path.stat().st_mtime_ns >= written
        time.sleep(0.001)


def test_a_sparse_file_that_waits_for_its_upload_costs_no_cache_to_truncate(mount: Mount) -> None:
    path = mount.point / "sparse"
    with path.open("wb") as f:
        f.write(b"head")
        f.truncate(3 << 30)
    os.truncate(path, 2 << 30)  # within the settle time: needs a copy of its own, larger than the cache
    assert path.stat().st_size == 2 << 30
    assert path.open("rb").read(6) == b"head\0\0"
