"""Invariant 1, content: reads and writes look as on a local disk, errno included."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mounted.harness import Mount
from tests.mounted.oracle import agree, outcome


def create_exclusive_truncate_append(d: Path) -> list[Any]:
    out: list[Any] = []
    fd = os.open(d / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    out += [os.write(fd, b"0123456789"), outcome(os.read, fd, 1), os.fstat(fd).st_size]
    os.close(fd)
    out.append(outcome(os.open, d / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    fd = os.open(d / "f", os.O_WRONLY | os.O_APPEND)
    os.lseek(fd, 3, os.SEEK_SET)
    out += [os.write(fd, b"ab"), os.fstat(fd).st_size]
    os.close(fd)
    fd = os.open(d / "f", os.O_RDWR | os.O_APPEND)
    out += [os.pwrite(fd, b"X", 0), os.pread(fd, 100, 0)]
    os.close(fd)
    fd = os.open(d / "f", os.O_RDWR)
    out += [os.pwrite(fd, b"YY", 4), os.pread(fd, 3, 3), os.lseek(fd, 0, os.SEEK_END), os.read(fd, 5)]
    os.close(fd)
    fd = os.open(d / "f", os.O_RDONLY)
    out += [outcome(os.write, fd, b"x"), outcome(os.ftruncate, fd, 0), os.read(fd, 1000)]
    os.close(fd)
    fd = os.open(d / "f", os.O_RDWR | os.O_TRUNC)
    out += [os.fstat(fd).st_size, os.read(fd, 10), os.write(fd, b"new")]
    os.close(fd)
    out.append(outcome(os.open, d / "f" / "g", os.O_WRONLY | os.O_CREAT))
    out.append(outcome(os.open, d / "none" / "g", os.O_WRONLY | os.O_CREAT))
    out.append(outcome(os.open, d, os.O_WRONLY))
    out.append(outcome(os.open, d / "none", os.O_RDONLY))
    return out


def any_offset_and_sparse(d: Path) -> list[Any]:
    out: list[Any] = []
    with open(d / "f", "w+b", buffering=0) as f:
        for offset in (5_000_000, 0, 4095, 4096, 1 << 20, (4 << 20) - 1, 9_999_999, 17):
            f.seek(offset)
            out.append(f.write(b"%d" % offset * 7))
        out.append(os.fstat(f.fileno()).st_size)
        for offset in (0, 10, 4090, (1 << 20) - 5, (4 << 20) - 10, 4_999_990, 9_999_990, 20_000_000):
            out.append(os.pread(f.fileno(), 64, offset))
    with open(d / "big", "w+b", buffering=0) as f:
        f.truncate(10 << 30)
        out += [os.fstat(f.fileno()).st_size, os.pwrite(f.fileno(), b"end", (10 << 30) - 3)]
        out += [os.pread(f.fileno(), 10, (10 << 30) - 5), os.pread(f.fileno(), 3, 5 << 30)]
        f.truncate(3)
    return out


def truncate_both_ways(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "f").write_bytes(b"0123456789" * 1000)
    os.truncate(d / "f", 15)
    out.append((d / "f").read_bytes())
    os.truncate(d / "f", 30)
    out.append((d / "f").read_bytes())
    with open(d / "f", "r+b", buffering=0) as writer, open(d / "f", "rb", buffering=0) as reader:
        out += [reader.read(5), writer.truncate(3), os.fstat(reader.fileno()).st_size, reader.read(5)]
        out += [writer.seek(0, os.SEEK_END), writer.write(b"abc"), writer.truncate(100), reader.read()]
        os.truncate(d / "f", 0)
        out += [os.fstat(writer.fileno()).st_size, writer.seek(0), writer.write(b"last")]
    out.append((d / "f").read_bytes())
    out += [
        outcome(os.truncate, d, 0),
        outcome(os.truncate, d / "none", 0),
        outcome(os.truncate, d / "f", -1),
    ]
    return out


def unlinked_while_open(d: Path) -> list[Any]:
    out: list[Any] = []
    with open(d / "f", "w+b", buffering=0) as f:
        f.write(b"kept until close")
        os.unlink(d / "f")
        out += [os.fstat(f.fileno()).st_nlink, (d / "f").exists(), os.pread(f.fileno(), 4, 0)]
        out += [f.write(b"!"), os.fstat(f.fileno()).st_size, os.listdir(d)]
        f.truncate(4)
        out.append(os.pread(f.fileno(), 100, 0))
        os.fchmod(f.fileno(), 0o600)
        out.append(os.fstat(f.fileno()).st_mode)
    return out


def several_handles(d: Path) -> list[Any]:
    out: list[Any] = []
    a = os.open(d / "f", os.O_WRONLY | os.O_CREAT)
    b = os.open(d / "f", os.O_RDWR)
    c = os.open(d / "f", os.O_WRONLY | os.O_APPEND)
    os.write(a, b"aaaaa")
    out.append(os.read(b, 100))
    os.write(c, b"ccc")
    out.append(os.pread(b, 100, 0))
    os.pwrite(b, b"B", 1)
    os.close(b)
    os.write(a, b"A")
    os.close(a)
    out.append((d / "f").read_bytes())
    os.write(c, b"z")
    os.close(c)
    out.append((d / "f").read_bytes())
    return out


def mappings(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "f").write_bytes(b"x" * 10_000)
    with open(d / "f", "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        m[5000:5005] = b"mmap!"
        out.append(os.pread(f.fileno(), 7, 4999))
        fd = os.open(d / "f", os.O_WRONLY)
        os.pwrite(fd, b"direct", 100)
        os.close(fd)
        out.append(m[99:107])
        m.flush()
    with open(d / "f", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        out.append(bytes(m[:]))
    return out


def seeks_and_copies(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "a").write_bytes(os.urandom(0) + b"copy" * 50_000)
    with open(d / "a", "rb") as src, open(d / "b", "wb") as dst:
        left = 200_000
        while left:
            n = os.sendfile(dst.fileno(), src.fileno(), None, left)
            left -= n
    with open(d / "a", "rb") as src, open(d / "c", "wb") as dst:
        out.append(os.copy_file_range(src.fileno(), dst.fileno(), 1000, offset_src=10))
    fd = os.open(d / "d", os.O_RDWR | os.O_CREAT)
    out.append(os.writev(fd, [b"one", b"", b"two" * 100_000]))
    out.append(os.lseek(fd, 0, os.SEEK_CUR))
    os.posix_fallocate(fd, 0, 400_000)
    out.append(os.fstat(fd).st_size)
    os.fsync(fd)
    os.fdatasync(fd)
    os.close(fd)
    fd = os.open(d / "e", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(fd, 100, 10_000)
    os.close(fd)
    fd = os.open(d, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return out


SCRIPTS = [
    create_exclusive_truncate_append, any_offset_and_sparse, truncate_both_ways, unlinked_while_open,
    several_handles, mappings, seeks_and_copies,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_content_is_as_on_a_local_disk(shared: Mount, local: Path, script: Callable[[Path], Any]) -> None:
    agree(script, shared.point, local)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_content_is_as_on_a_local_disk_after_publishing_too(
    shared: Mount, local: Path, script: Callable[[Path], Any]
) -> None:
    """The same files again where the first versions are on the tier or on their way."""
    done = local / script.__name__
    shared.wait()
    where = shared.tier / script.__name__
    for path in done.rglob("*"):
        assert (where / path.relative_to(done)).read_bytes() == path.read_bytes()


def test_random_operations_leave_the_same_bytes_on_disk_mount_and_tier(shared: Mount, local: Path) -> None:
    """Writes, truncations and reopenings at random places, with versions in flight all along."""
    import random

    rng = random.Random(4711)
    a, b = local / "random", shared.point / "random"
    a.write_bytes(b"")
    b.write_bytes(b"")
    for step in range(150):
        size = a.stat().st_size
        kind = rng.choice(["write", "write", "append", "truncate", "fresh", "rdwr", "read"])
        offset, data = rng.randrange(size + 100_000), rng.randbytes(rng.choice([1, 100, 5000, 300_000]))
        for path in (a, b):
            if kind == "write":
                fd = os.open(path, os.O_WRONLY)
                os.pwrite(fd, data, offset)
                os.close(fd)
            elif kind == "rdwr":
                fd = os.open(path, os.O_RDWR)
                os.pwrite(fd, data, offset)
                os.close(fd)
            elif kind == "append":
                with open(path, "ab") as f:
                    f.write(data)
            elif kind == "truncate":
                os.truncate(path, offset)
            elif kind == "fresh":
                path.write_bytes(data)
        if kind == "read":
            assert b.read_bytes() == a.read_bytes(), step
        if step % 40 == 10:
            shared.wait(b)
            assert (shared.tier / "random").read_bytes() == a.read_bytes(), step
    assert b.read_bytes() == a.read_bytes()
    shared.wait(b)
    assert (shared.tier / "random").read_bytes() == a.read_bytes()


def test_what_a_local_disk_does_and_this_does_not(shared: Mount) -> None:
    """docs/SEMANTICS.md names these differences."""
    import ctypes
    import errno
    import fcntl

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    path = shared.point / "differs"
    path.write_bytes(b"x" * 10_000)
    fd = os.open(path, os.O_RDWR)
    for mode in (0, 1, 3):
        assert libc.fallocate(fd, mode, 0, 100) == -1
        assert ctypes.get_errno() == errno.ENOTSUP
    os.ftruncate(fd, 1 << 20)
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 1 << 20  # all of a file is data
    assert os.lseek(fd, 500_000, os.SEEK_DATA) == 500_000
    with open("/proc/self/exe", "rb") as other:
        assert outcome(os.copy_file_range, other.fileno(), fd, 100) == "EXDEV"
        assert outcome(fcntl.ioctl, fd, 0x40049409, other.fileno()) in ("ENOTSUP", "EXDEV")  # FICLONE
    os.close(fd)


def test_locks_are_between_processes_of_this_machine(shared: Mount) -> None:
    import fcntl

    path = shared.point / "locked"
    a, b = os.open(path, os.O_RDWR | os.O_CREAT), os.open(path, os.O_RDWR)
    fcntl.flock(a, fcntl.LOCK_EX)
    assert outcome(fcntl.flock, b, fcntl.LOCK_EX | fcntl.LOCK_NB) == "EAGAIN"
    fcntl.flock(a, fcntl.LOCK_UN)
    fcntl.lockf(a, fcntl.LOCK_EX)
    pid = os.fork()
    if pid == 0:
        other = os.open(path, os.O_RDWR)
        os._exit(outcome(fcntl.lockf, other, fcntl.LOCK_EX | fcntl.LOCK_NB) not in ("EAGAIN", "EACCES"))
    assert os.waitpid(pid, 0)[1] == 0
    os.close(a)
    os.close(b)


def test_private_mappings_and_mappings_of_write_only_files(shared: Mount) -> None:
    path = shared.point / "private"
    path.write_bytes(b"x" * 10_000)
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE) as m:
        m[0:4] = b"mine"
        assert f.read(4) == b"xxxx"
    fd = os.open(path, os.O_WRONLY)
    assert outcome(mmap.mmap, fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE) == "EACCES"
    os.close(fd)
    shared.wait(path)
    assert path.read_bytes() == b"x" * 10_000
