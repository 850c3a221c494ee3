"""What the commands advise can be done as it is printed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_result import Result
from fake_daemon import FakeDaemon, write_state

from ckptfs import mountinfo
from ckptfs.cli.mount import mount
from ckptfs.config import Config
from ckptfs.config_file import load
from ckptfs.control import client
from ckptfs.errors import Exit
from ckptfs.paths import MountPaths
from ckptfs.resume import mount_arguments

Ckptfs = Callable[..., Result]
FLAGS = ("--tier", "file:///mnt/a%20b", "--cache-dir", "/nvme/o'clock", "--spill-dir", "/s p")


def outcome(code: int, *remaining: str, **more: object) -> dict[str, object]:
    """The last event of a wait or umount."""
    pending = {"entries": 1, "files": 1, "bytes": 1 << 20}
    return {
        "done": True, "durable": code == 0, "code": code, "remaining": list(remaining),
        "pending": pending, **more,
    }  # fmt: skip


def resume(tmp_path: Path) -> str:
    return shlex.join(["ckptfs", "mount", f"{tmp_path}/mnt", *FLAGS])


def written(config: Config) -> Config:
    """The configuration of the mount command that is advised for a mount with this one."""
    command, *arguments = mount_arguments(config, MountPaths(config.mountpoint))
    assert command == "mount"
    flags = dict(mount.make_context("mount", arguments).params)
    return load(flags, flags.pop("config_file")).config


def test_the_advised_mount_has_the_same_tier_and_places(tmp_path: Path) -> None:
    for name in ("c d", "spill"):
        (tmp_path / name).mkdir()
    (tmp_path / "ca.pem").touch()
    point = str(tmp_path / "mnt")
    store: dict[str, object] = {
        "tier": "s3://bucket/run%207", "endpoint_url": ("http://a", "http://b"), "region": "x",
        "profile": "p", "ca_bundle": str(tmp_path / "ca.pem"), "verify_tls": False,
    }  # fmt: skip
    places: dict[str, object] = {
        "tier": f"file://{tmp_path}/t%20t", "cache_dir": str(tmp_path / "c d"),
        "spill_dir": str(tmp_path / "spill"),
    }  # fmt: skip
    for given in ({}, store, places):
        config = load({"mountpoint": point, **given}).config
        again = written(config)
        for name in ("mountpoint", "tier", "cache_dir", "spill_dir", "options"):
            assert getattr(again, name) == getattr(config, name)
    assert mount_arguments(load({"mountpoint": point}).config, MountPaths(point)) == ["mount", point]


def test_the_advised_mount_has_the_same_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(f'tier = "file://{tmp_path}/t"\nfsync = "tier"\n')
    config = load({"mountpoint": str(tmp_path / "mnt")}, str(file)).config
    again = written(config)
    assert (again.tier, again.fsync, again.config_file) == (f"file://{tmp_path}/t", "tier", str(file))


def test_every_command_gives_the_whole_mount_command(ckptfs: Ckptfs, tmp_path: Path) -> None:
    paths = MountPaths(str(tmp_path / "mnt"))
    paths.create()
    write_state(paths, 12, 3, *FLAGS)
    command = resume(tmp_path)
    assert f"3 files staged, no daemon: run {command} to resume" in ckptfs("status").out
    assert f"3 files staged, no daemon: run {command} to resume" in ckptfs("wait").sentence
    for name in ("publish", "discard", "skip"):
        assert ckptfs(name, tmp_path / "mnt" / "f").sentence.endswith(f"; run {command}")
    assert f"run {command} to publish" in ckptfs("umount", tmp_path / "mnt").sentence
    write_state(paths, 12, 0, *FLAGS)
    assert f"run {command} to recover" in ckptfs("status").out


def test_a_state_file_of_another_version_tells_the_tier(ckptfs: Ckptfs, tmp_path: Path) -> None:
    paths = MountPaths(str(tmp_path / "mnt"))
    paths.create()
    for odd in ("null", "[1]", '"x"'):
        Path(paths.state).write_text(
            f'{{"mountpoint": "{tmp_path}/mnt", "tier": "file:///t", "staged": 1, "resume": {odd}}}'
        )
        assert f"run ckptfs mount {tmp_path}/mnt --tier file:///t to resume" in ckptfs("status").out


def test_a_daemon_that_ends_early_names_the_command(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon
) -> None:
    write_state(daemon.paths, daemon.pid, 1, *FLAGS)
    daemon.answers["wait"] = [{"pending": {}, "eta_s": None}]
    assert ckptfs("wait").sentence.endswith(f"run {resume(tmp_path)}")


def test_umount_with_interrupted_files_says_how_to_go_on(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon
) -> None:
    write_state(daemon.paths, daemon.pid, 1, *FLAGS)
    daemon.answers["umount"] = [outcome(Exit.INTERRUPTED, "f")]
    result = ckptfs("umount", tmp_path / "mnt")
    assert result.code == Exit.INTERRUPTED
    assert result.err.splitlines() == [
        f"ckptfs: {tmp_path}/mnt: interrupted or skipped files are not published; they stay staged for the"
        f" next mount: it is unmounted now, to go on run {resume(tmp_path)}, then ckptfs publish or ckptfs"
        " discard",
        f"  {tmp_path}/mnt/f",
    ]


def test_umount_with_a_stuck_entry_leaves_a_daemon_that_goes_on(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(daemon.paths, daemon.pid, 1, *FLAGS)
    daemon.answers["umount"] = [outcome(Exit.STUCK, "f", ending=True)]
    result = ckptfs("umount", tmp_path / "mnt")
    assert result.code == Exit.STUCK
    assert "for good" not in result.err
    assert f"to go on run {resume(tmp_path)}, then ckptfs skip" in result.err
    # A daemon that goes on is not waited for.
    monkeypatch.setattr(client.Watched, "wait", lambda self, timeout: pytest.fail("waited"))
    daemon.answers["umount"] = [outcome(Exit.STUCK, "f", ending=False)]
    result = ckptfs("umount", tmp_path / "mnt")
    assert result.code == Exit.STUCK
    assert "its daemon goes on trying: see ckptfs status, lift the reason, or let the rest pass" in result.err


def test_wait_says_that_the_tier_is_down(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    tier = {"state": "down", "error": "Stale file handle", "since": 1}
    daemon.answers["wait"] = [outcome(Exit.TIMEOUT, "f", tier=tier)]
    result = ckptfs("wait", "--timeout", "5")
    assert result.code == Exit.TIMEOUT
    assert "after 5.0 s: 1 file, 1.0 MiB left; the tier is down (Stale file handle)\n" in result.err
    daemon.answers["wait"] = [outcome(Exit.TIMEOUT, "f", tier={**tier, "state": "up"})]
    assert "down" not in ckptfs("wait", "--timeout", "5").err


def test_wait_names_what_is_durable(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.answers["wait"] = [outcome(0)]
    result = ckptfs("wait", tmp_path / "mnt" / "a", tmp_path / "mnt" / "b")
    assert result.out == f"{tmp_path}/mnt/a: durable\n{tmp_path}/mnt/b: durable\n"
    assert ckptfs("wait").out == f"{tmp_path}/mnt: everything is durable\n"


def test_status_of_a_tier_that_is_down(ckptfs: Ckptfs, daemon: FakeDaemon) -> None:
    daemon.status["tier"] = {"url": "file:///x", "state": "down", "error": "gone", "since": 1}
    assert ckptfs("status").code == Exit.TIER_DOWN
    daemon.status["interrupted"] = [{"path": "a", "size": 1, "reason": "killed", "since": 1}]
    assert ckptfs("status").code == Exit.INTERRUPTED


@pytest.mark.parametrize("mounted", [False, True])
def test_ctrl_c_in_umount_says_what_goes_on(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, mounted: bool
) -> None:
    def interrupted(*arguments: Any, **more: Any) -> Iterator[client.Event]:
        if mounted:
            there = mountinfo.Mount(1, 0, "0:50", f"{tmp_path}/mnt", mountinfo.FSTYPE, "ckptfs")
            monkeypatch.setattr(mountinfo, "read", lambda: [there])
        raise KeyboardInterrupt
        yield {}

    monkeypatch.setattr(client, "events", interrupted)
    result = ckptfs("umount", tmp_path / "mnt")
    assert result.code == 130
    done = "is being unmounted" if mounted else "is unmounted"
    follow = f"ckptfs wait --mount {tmp_path}/mnt"
    assert (
        result.sentence == f"{tmp_path}/mnt {done}, and its daemon goes on draining; follow it with {follow}"
    )


def test_a_mount_of_another_user(ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = mountinfo.Mount(1, 0, "0:50", str(tmp_path / "mnt"), mountinfo.FSTYPE, "ckptfs")
    monkeypatch.setattr(mountinfo, "read", lambda: [there])
    for command in (["wait"], ["publish"]):
        result = ckptfs(*command, tmp_path / "mnt" / "a b")
        assert result.code == Exit.NOT_MOUNTED
        assert "of another user" in result.sentence
        assert "use sudo" in result.sentence
        shown = f"getfattr -n user.ckptfs.state --absolute-names '{tmp_path}/mnt/a b'"
        assert result.sentence.endswith(shown)
    for command in (["status"], ["umount"], ["wait", "--mount"]):
        result = ckptfs(*command, tmp_path / "mnt")
        assert result.code == Exit.NOT_MOUNTED
        assert "root, with sudo" in result.sentence
        assert "user.ckptfs.state" in result.sentence
