"""Where a mount's files are, and that finding out never asks the mount."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptfs import memory, mountinfo
from ckptfs.errors import CkptfsError
from ckptfs.paths import MountPaths, mount_id, private_dir, resolve, run_dir, socket_address


def test_layout_of_one_mount(tmp_path: Path) -> None:
    paths = MountPaths(str(tmp_path / "mnt"))
    assert paths.id == xxhash.xxh3_64(os.fsencode(tmp_path / "mnt")).hexdigest()
    assert paths.run == str(tmp_path / "run" / paths.id)
    assert paths.control == paths.run + "/control.sock"
    assert paths.log == str(tmp_path / "data" / "logs" / f"{paths.id}.log")
    assert not os.path.exists(paths.run)
    paths.create()
    assert stat.S_IMODE(os.stat(paths.run).st_mode) == 0o700
    assert os.path.isdir(os.path.dirname(paths.uuid))


def test_all_spellings_of_a_mount_point_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("mnt")
    monkeypatch.chdir(tmp_path / "mnt")
    spellings = [tmp_path / "mnt", tmp_path / "link", f"{tmp_path}//mnt/./", ".", "../mnt", "../link/x/.."]
    assert {MountPaths(str(spelling)).id for spelling in spellings} == {mount_id(str(tmp_path / "mnt"))}


def test_resolve_agrees_with_realpath(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/usr/bin/..")
    (tmp_path / "b").symlink_to("a/lib")
    for path in ("a", "b", "b/../x", "missing/../mnt", "/", "///tmp"):
        assert resolve(str(tmp_path / path)) == os.path.realpath(tmp_path / path)


def test_links_inside_a_mount_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mnt" / "latest").symlink_to("/etc")
    inside = str(tmp_path / "mnt" / "latest")
    assert resolve(inside, frozenset([str(tmp_path / "mnt")])) == inside
    assert resolve(inside) == "/etc"


def test_paths_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in ("", "a\0b", str(tmp_path / "loop" / "x")):
        with pytest.raises(CkptfsError):
            resolve(path)


def test_a_run_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    for name in ("open", "link"):
        with pytest.raises(CkptfsError):
            private_dir(str(tmp_path / name))


@pytest.mark.parametrize("length", [107, 108, 300])
def test_sockets_work_at_any_path_length(tmp_path: Path, length: int) -> None:
    directory = tmp_path / ("d" * (length - len(str(tmp_path)) - len("//control.sock")))
    directory.mkdir()
    path = str(directory / "control.sock")
    assert len(path) == length
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with socket_address(path) as address:
            server.bind(address)
        server.listen()
        with socket_address(path) as address:
            client.connect(address)
    assert os.path.exists(path)


def test_relative_xdg_directories_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTFS_RUN_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert run_dir() == "/tmp/ckptfs-1234"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert run_dir() == "/run/user/1234/ckptfs"


def test_mountinfo() -> None:
    line = (
        rb"36 35 98:0 /r /mnt\040a\011b rw,noatime master:1 shared:2 - fuse.ckptfs ckptfs rw,errors=continue"
    )
    (mount,) = mountinfo.parse(line + b"\nnonsense\n")
    assert (mount.path, mount.fstype, mount.device, mount.ours) == ("/mnt a\tb", "fuse.ckptfs", "98:0", True)
    assert "/proc" in {mount.path for mount in mountinfo.read()}


def test_the_topmost_of_stacked_mounts() -> None:
    def at(mount_id: int, parent: int, path: str = "/m") -> mountinfo.Mount:
        return mountinfo.Mount(mount_id, parent, "0:1", path, "tmpfs", "x")

    top = mountinfo.top_at("/m", [at(1, 0, "/"), at(3, 2), at(2, 1), at(4, 1, "/other")])
    assert top is not None
    assert top.mount_id == 3


@given(st.binary(max_size=200))
def test_any_mountinfo_can_be_read(data: bytes) -> None:
    mountinfo.parse(data)
    mountinfo.parse(b"1 2 0:1 / " + data.replace(b"\n", b"") + b" rw - fuse.ckptfs x rw")


def test_memory_of_the_tightest_control_group(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (groups / "a" / "b").mkdir(parents=True)
    assert memory.available(str(proc), str(groups)) == 1000 << 10
    (groups / "a" / "memory.max").write_text("500000\n")
    (groups / "a" / "memory.current").write_text("300000\n")
    (groups / "a" / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert memory.available(str(proc), str(groups)) == 300000
    assert memory.available() > 0
