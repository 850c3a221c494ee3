"""Which directories may be mounted on, with real mounts where there is the permission for them."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptfs import mountinfo, mountpoint
from ckptfs.errors import CkptfsError, Exit

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextmanager
def bare_fuse_mount(path: Path, fstype: str = "fuse.ckptfs") -> Iterator[int]:
    """A FUSE mount whose daemon is nobody: hung while the descriptor is open, dead afterwards."""
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    try:
        if libc.mount(b"ckptfs", os.fsencode(path), fstype.encode(), 0, options) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        try:
            yield device
        finally:
            libc.umount2(os.fsencode(path), 2)
    finally:
        try:
            os.close(device)
        except OSError:
            pass  # the test closed it


@contextmanager
def dead_mount(path: Path, fstype: str = "fuse.ckptfs") -> Iterator[None]:
    """A FUSE mount whose daemon has been killed."""
    with bare_fuse_mount(path, fstype) as device:
        os.close(device)
        yield


def refusal(path: Path, pid: int | None = None) -> CkptfsError:
    with pytest.raises(CkptfsError) as caught:
        mountpoint.prepare(str(path), pid)
    assert str(path) in caught.value.message
    return caught.value


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    mountpoint.prepare(str(tmp_path / "mnt"))


def test_what_is_no_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for name, reason in (
        ("missing", "does not exist"),
        ("file", "not a directory"),
        ("full", "not empty (it has 'x')"),
    ):
        error = refusal(tmp_path / name)
        assert error.code is Exit.USAGE
        assert reason in error.message


@needs_root
def test_a_mount_of_something_else_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "mnt"
    subprocess.run(["mount", "-t", "tmpfs", "something", str(target)], check=True)
    try:
        error = refusal(target)
        assert error.code is Exit.BUSY
        assert "something (tmpfs) is mounted there" in error.message
        assert mountpoint.clean_stale(str(target)) == 0
        assert os.path.ismount(target)
        (target / "sub").mkdir()
        mountpoint.prepare(str(target / "sub"))
    finally:
        subprocess.run(["umount", str(target)], check=True)


@needs_root
def test_dead_mounts_are_cleaned_also_stacked(tmp_path: Path) -> None:
    target = tmp_path / "mnt"
    with dead_mount(target):
        with pytest.raises(OSError, match="not connected"):
            os.listdir(target)
        with dead_mount(target):
            assert sum(mount.path == str(target) for mount in mountinfo.read()) == 2
            mountpoint.prepare(str(target))
            # There till the new one is ready.
            assert sum(mount.path == str(target) for mount in mountinfo.read()) == 2
            said = mountpoint.take_over(str(target))
            assert said == [f"unmounted what an ended daemon had left at {target}"]
    assert os.listdir(target) == []
    assert mountinfo.top_at(str(target), mountinfo.read()) is None


@needs_root
def test_what_lies_beneath_a_dead_mount_is_said_and_does_not_hinder(tmp_path: Path) -> None:
    target = tmp_path / "mnt"
    (target / "stray").touch()
    with dead_mount(target):
        mountpoint.prepare(str(target))
        _, beneath = mountpoint.take_over(str(target))
    assert "'stray'" in beneath
    assert mountpoint.take_over(str(target)) == []


@needs_root
def test_a_dead_mount_of_another_file_system_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "mnt"
    with dead_mount(target, "fuse.other"):
        assert mountpoint.clean_stale(str(target)) == 0
        assert refusal(target).code is Exit.BUSY


@needs_root
def test_a_hung_mount_is_in_use_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = mountpoint.probe
    monkeypatch.setattr(mountpoint, "probe", lambda path: probe(path, 0.2))
    target = tmp_path / "mnt"
    with bare_fuse_mount(target):
        error = refusal(target, pid=4711)
        assert error.code is Exit.BUSY
        assert "daemon pid 4711" in error.message
        assert "did not answer" in error.message
        inside = refusal(target / "sub")
        assert "lies inside the ckptfs mount" in inside.message


def test_the_machine_lacks_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(part: str, **arguments: object) -> None:
        with pytest.raises(CkptfsError) as caught:
            mountpoint.check_machine(**{"allow_other": False, "device": os.devnull, **arguments})  # type: ignore[arg-type]
        assert caught.value.code is Exit.UNSUPPORTED
        assert part in caught.value.message

    lacks("does not exist", device=str(tmp_path / "fuse"))
    lacks("cannot be opened", device=str(tmp_path))

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        patched.setattr(os, "geteuid", lambda: 1000)
        lacks(
            "/dev/fuse cannot be opened: Permission denied; have root run chmod 666 /dev/fuse",
            device="/dev/fuse",
        )
        lacks("join the group it belongs to, or mount as root", device="/dev/fuse")
        patched.setattr(os, "geteuid", lambda: 0)
        lacks("give the container --device /dev/fuse", device="/dev/fuse")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(mountpoint, "_has_capability", lambda number: False)
    lacks("CAP_SYS_ADMIN")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    lacks("fusermount3 is not installed")
    helper = tmp_path / "fusermount3"
    helper.touch(0o755)
    mountpoint.check_machine(allow_other=False, device=os.devnull)
    conf = tmp_path / "fuse.conf"
    monkeypatch.setattr(mountpoint, "_FUSE_CONF", str(conf))
    lacks("user_allow_other", allow_other=True)
    conf.write_text("#user_allow_other\n")
    lacks("user_allow_other", allow_other=True)
    conf.write_text(" user_allow_other\n")
    mountpoint.check_machine(allow_other=True, device=os.devnull)
