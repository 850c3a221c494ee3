"""Invariant 1, names: the namespace looks as on a local disk, errno included."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mounted.harness import Mount
from tests.mounted.oracle import EXCHANGE, NOREPLACE, WHITEOUT, agree, outcome, rename2


def directories(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "a").mkdir(mode=0o750)
    out += [outcome(os.mkdir, d / "a"), outcome(os.rmdir, d / "none"), outcome(os.unlink, d / "a")]
    (d / "a" / "b").mkdir()
    (d / "a" / "f").write_bytes(b"f")
    out += [
        outcome(os.rmdir, d / "a"),
        outcome(os.rmdir, d / "a" / "f"),
        outcome(os.mkdir, d / "a" / "f" / "g"),
    ]
    os.rmdir(d / "a" / "b")
    os.unlink(d / "a" / "f")
    os.rmdir(d / "a")
    out += [os.listdir(d), outcome(os.listdir, d / "a")]
    return out


def removed_under_a_process(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "a").mkdir()
    fd = os.open(d / "a", os.O_RDONLY)
    os.rmdir(d / "a")
    out.append(outcome(os.open, "f", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    out.append(outcome(os.mkdir, "g", dir_fd=fd))
    out.append(os.listdir(fd))
    out.append(stat.S_IFMT(os.fstat(fd).st_mode))
    os.close(fd)
    return out


def renames_of_files(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "a").write_bytes(b"a")
    (d / "b").write_bytes(b"b")
    (d / "dir").mkdir()
    os.rename(d / "a", d / "c")
    os.rename(d / "c", d / "b")
    out.append((d / "b").read_bytes())
    os.rename(d / "b", d / "dir" / "b")
    os.rename(d / "dir" / "b", d / "dir" / "b")
    out += [os.listdir(d), outcome(os.rename, d / "none", d / "x")]
    (d / "e").write_bytes(b"e")
    out += [
        outcome(os.rename, d / "e", d / "dir"), outcome(os.rename, d / "dir", d / "e"),
        outcome(os.rename, d / "e", d / "none" / "e"), outcome(os.rename, d / "e", d / "e" / "x"),
    ]  # fmt: skip
    out.append(outcome(rename2, d / "e", d / "dir" / "b", NOREPLACE))
    out.append(outcome(rename2, d / "e", d / "new", NOREPLACE))
    out.append(sorted(os.listdir(d)))
    return out


def renames_of_directories(d: Path) -> list[Any]:
    out: list[Any] = []
    for name in ("full", "empty", "other"):
        (d / name).mkdir()
    (d / "full" / "sub").mkdir()
    for i in range(5):
        (d / "full" / "sub" / f"f{i}").write_bytes(b"%d" % i)
        (d / "other" / f"f{i}").write_bytes(b"o%d" % i)
    inside = os.open(d / "full" / "sub", os.O_RDONLY)
    writer = os.open(d / "full" / "sub" / "f0", os.O_WRONLY | os.O_APPEND)
    os.rename(d / "full", d / "empty")
    os.write(writer, b"more")
    out += [sorted(os.listdir(inside)), outcome(os.rename, d / "empty", d / "other")]
    out += [
        outcome(os.rename, d / "empty", d / "empty" / "sub" / "x"),
        outcome(rename2, d / "other", d / "empty", 1),
    ]
    os.rename(d / "other", d / "empty" / "sub" / "other")
    os.mkdir(d / "full")
    (d / "full" / "fresh").write_bytes(b"fresh")
    fd = os.open("f9", os.O_WRONLY | os.O_CREAT, dir_fd=inside)
    os.write(fd, b"9")
    os.close(fd)
    os.close(writer)
    os.close(inside)
    out.append(outcome(os.stat, d / "other"))
    return out


def renames_of_open_dirty_files(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "final").write_bytes(b"old")
    fd = os.open(d / "tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 100)
    os.pwrite(fd, b"half", 0)
    old = os.open(d / "final", os.O_RDONLY)
    os.rename(d / "tmp", d / "final")
    os.pwrite(fd, b"rest", 50)
    out += [os.read(old, 10), (d / "final").read_bytes(), os.fstat(old).st_nlink]
    os.close(fd)
    os.close(old)
    out.append((d / "final").read_bytes())
    return out


def links(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "f").write_bytes(b"data")
    os.symlink("f", d / "l")
    os.symlink("/nowhere/at/all", d / "broken")
    os.symlink(b"x" * 1000, d / "long")
    out += [
        os.readlink(d / "l"),
        (d / "l").read_bytes(),
        os.lstat(d / "l").st_size,
        outcome(os.stat, d / "broken"),
    ]
    out += [outcome(os.symlink, "f", d / "l"), outcome(os.readlink, d / "f"), len(os.readlink(d / "long"))]
    os.symlink("g", d / "l2")
    os.rename(d / "l2", d / "l")
    out += [os.readlink(d / "l"), outcome(os.open, d / "l", os.O_RDONLY | os.O_NOFOLLOW)]
    (d / "l").write_bytes(b"through")
    os.unlink(d / "l")
    os.rename(d / "f", d / "broken")
    return out


def odd_names(d: Path) -> list[Any]:
    out: list[Any] = []
    base = os.fsencode(d)
    for name in (b"\xff\xfe not utf-8", b"n" * 255, b"new\nline", b" ", b"a\\b", b"-rf", b"...", b"\x01\x7f"):
        with open(base + b"/" + name, "wb") as f:
            f.write(name)
    out.append(sorted(os.listdir(base)))
    out.append(outcome(open, base + b"/" + b"n" * 256, "wb"))
    out.append(outcome(os.mkdir, base + b"/" + b"n" * 256))
    out.append(outcome(os.symlink, b"x", base + b"/" + b"n" * 256))
    out.append(outcome(os.rename, base + b"/ ", base + b"/" + b"n" * 256))
    out.append(outcome(os.stat, base + b"/" + b"n" * 256))
    deep = base
    for _ in range(30):
        deep += b"/" + b"d" * 100
        os.mkdir(deep)
    out.append(os.listdir(deep))
    return out


def modes_and_umask(d: Path) -> list[Any]:
    out: list[Any] = []
    for mask in (0o000, 0o022, 0o077):
        old = os.umask(mask)
        try:
            os.close(os.open(d / f"f{mask:o}", os.O_CREAT | os.O_WRONLY, 0o666))
            os.mkdir(d / f"d{mask:o}", 0o777)
            os.mknod(d / f"n{mask:o}", 0o666 | stat.S_IFREG)
        finally:
            os.umask(old)
    for mode in (0o4755, 0o2755, 0o1777, 0o000, 0o444):
        os.chmod(d / "f0", mode)
        out.append(oct((d / "f0").stat().st_mode))
    os.chown(d / "f0", 1234, 5678)
    os.chown(d / "d0", -1, 4321)
    os.chmod(d / "d0", 0o2775)
    (d / "d0" / "sub").mkdir()
    (d / "d0" / "file").write_bytes(b"")
    for p in (d / "f0", d / "d0" / "sub", d / "d0" / "file"):
        st = p.stat()
        out.append((st.st_uid, st.st_gid, oct(st.st_mode)))
    return out


def times(d: Path) -> list[Any]:
    out: list[Any] = []
    (d / "f").write_bytes(b"x")
    os.utime(d / "f", ns=(1_111_111_111_222_333_444, 1_555_555_555_666_777_888))
    out += [(d / "f").stat().st_mtime_ns, (d / "f").stat().st_atime_ns]
    fd = os.open(d / "f", os.O_WRONLY)
    os.utime(fd, ns=(5, 10**18 + 1))
    out.append(os.fstat(fd).st_mtime_ns)
    os.write(fd, b"y")
    out.append(os.fstat(fd).st_mtime_ns > 10**18 + 1)
    os.close(fd)
    before = d.stat().st_mtime_ns
    time.sleep(0.02)  # the local disk's clock goes in steps
    (d / "g").write_bytes(b"")
    out.append(d.stat().st_mtime_ns > before)
    os.utime(d, ns=(1, 2))
    out += [d.stat().st_mtime_ns, d.stat().st_atime_ns]
    os.symlink("f", d / "l")
    os.utime(d / "l", ns=(7, 8), follow_symlinks=False)
    out += [(d / "l").lstat().st_mtime_ns, outcome(os.utime, d / "none")]
    os.utime(d / "f")
    out.append((d / "f").stat().st_mtime_ns > 10**18 + 1)
    os.utime(d / "f", ns=(3, 4))
    os.truncate(d / "f", 1)
    out.append((d / "f").stat().st_mtime_ns > 4)
    return out


SCRIPTS = [
    directories, removed_under_a_process, renames_of_files, renames_of_directories,
    renames_of_open_dirty_files, links, odd_names, modes_and_umask, times,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_names_are_as_on_a_local_disk_and_on_the_tier(
    shared: Mount, local: Path, script: Callable[[Path], Any]
) -> None:
    from tests.mounted.oracle import shape

    agree(script, shared.point, local)
    shared.wait()
    assert shape(shared.tier / script.__name__) == shape(local / script.__name__)


def test_what_is_refused(shared: Mount) -> None:
    d = shared.point / "refused"
    d.mkdir()
    (d / "a").write_bytes(b"a")
    (d / "b").write_bytes(b"b")
    assert outcome(os.link, d / "a", d / "c") == "EPERM"
    assert outcome(os.mkfifo, d / "p") == "EPERM"
    assert outcome(os.mknod, d / "p", 0o600 | stat.S_IFSOCK) == "EPERM"
    assert outcome(rename2, d / "a", d / "b", EXCHANGE) == "EINVAL"
    assert outcome(rename2, d / "a", d / "b", WHITEOUT) == "EINVAL"
    for name in (".ckptfs", ".ckptfs-anything", ".ckptfsx"):
        assert outcome(open, d / name, "wb") == "EPERM"
        assert outcome(os.mkdir, d / name) == "EPERM"
        assert outcome(os.symlink, "x", d / name) == "EPERM"
        assert outcome(os.rename, d / "a", d / name) == "EPERM"
        assert outcome(os.stat, d / name) == "ENOENT"
    assert outcome(open, shared.point / ".ckptfs", "wb") == "EPERM"
    assert sorted(os.listdir(d)) == ["a", "b"]


def test_a_listing_is_stable_while_thousands_of_names_come_and_go(shared: Mount) -> None:
    d = shared.point / "many"
    d.mkdir()
    names = {f"stays-{i:04}" for i in range(600)} | {f"goes-{i:04}" for i in range(600)}
    for name in names:
        os.close(os.open(d / name, os.O_WRONLY | os.O_CREAT))
    seen: list[str] = []
    with os.scandir(d) as entries:
        for n, entry in enumerate(entries):
            seen.append(entry.name)
            if n < 600:
                if n % 2:
                    os.unlink(d / f"goes-{n:04}")
                os.close(os.open(d / f"comes-{n:04}", os.O_WRONLY | os.O_CREAT))
            if n % 100 == 7:  # replaced, never absent
                (d / "replacement").write_bytes(b"new")
                os.rename(d / "replacement", d / f"stays-{n % 600:04}")
    assert len(seen) == len(set(seen))
    assert {f"stays-{i:04}" for i in range(600)} <= set(seen)
    left = {n for n in names if not (n.startswith("goes") and int(n[-4:]) % 2)}
    assert set(os.listdir(d)) == left | {f"comes-{i:04}" for i in range(600)}


def test_statfs_is_that_of_the_tier(shared: Mount) -> None:
    mounted, tier = os.statvfs(shared.point), os.statvfs(shared.tier)
    total = tier.f_blocks * tier.f_frsize
    assert mounted.f_blocks * mounted.f_frsize == total
    assert 0 < mounted.f_bavail * mounted.f_frsize <= tier.f_bfree * tier.f_frsize + (8 << 30)
    assert mounted.f_namemax == 255


def test_what_stat_says_and_a_local_disk_does_not(shared: Mount) -> None:
    """docs/SEMANTICS.md names these differences."""
    d = shared.point / "differs"
    d.mkdir()
    (d / "sub").mkdir()
    (d / "f").write_bytes(b"f")
    with open(d / "sparse", "wb") as f:
        f.truncate(1 << 20)
    assert (d.stat().st_nlink, d.stat().st_size) == (1, 0)
    assert (d / "sparse").stat().st_blocks * 512 == 1 << 20
    before = (d / "f").stat().st_atime_ns
    (d / "f").read_bytes()
    shared.wait(d)
    assert (d / "f").stat().st_atime_ns == before


def test_a_file_needs_a_name(shared: Mount) -> None:
    d = shared.point / "nameless"
    d.mkdir()
    assert outcome(os.open, d, os.O_TMPFILE | os.O_RDWR, 0o600) == "ENOTSUP"
    dir_fd = os.open(d, os.O_PATH)
    os.close(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=dir_fd))
    os.close(dir_fd)
    assert os.listdir(d) == ["f"]
