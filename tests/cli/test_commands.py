"""status, wait, umount, publish, discard and skip against a fake daemon that speaks docs/CONTROL.md."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_result import Result
from fake_daemon import FakeDaemon, write_state

from ckptfs import mountinfo
from ckptfs.control import client
from ckptfs.errors import CkptfsError, Exit
from ckptfs.paths import MountPaths

Ckptfs = Callable[..., Result]
PENDING = {"entries": 2, "files": 2, "bytes": 3 << 20}


def outcome(code: int, *remaining: str) -> dict[str, object]:
    """The last event of a wait or umount."""
    return {
        "done": True,
        "durable": code == 0,
        "code": code,
        "remaining": list(remaining),
        "pending": PENDING,
    }


def test_status_of_one_and_of_all(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    one = json.loads(ckptfs("status", tmp_path / "mnt", "--json").out)
    assert one == {"daemon": True, **daemon.status}
    result = ckptfs("status", "--json")
    assert (result.code, json.loads(result.out)) == (0, [one])
    shown = ckptfs("status")
    assert shown.code == 0
    assert f"{tmp_path}/mnt/run/step_1.pt" in shown.out
    assert "\x1b" not in shown.out


def test_status_codes(ckptfs: Ckptfs, daemon: FakeDaemon) -> None:
    assert ckptfs("status").code == 0
    daemon.status["skipped"] = [{"path": "a", "size": 1}]
    assert ckptfs("status").code == Exit.INTERRUPTED
    daemon.status["skipped"] = []
    daemon.status["interrupted"] = [{"path": "a", "size": 1, "reason": "killed", "since": 1}]
    assert ckptfs("status").code == Exit.INTERRUPTED
    daemon.status["stuck"] = [{"path": "b", "operation": "PUT", "error": "no", "since": 1, "retries": 2}]
    assert ckptfs("status", "--json").code == Exit.STUCK


def test_status_without_mounts(ckptfs: Ckptfs) -> None:
    """Nothing is mounted, so nothing is wrong. Who expects a mount names it."""
    result = ckptfs("status")
    assert (result.code, result.out, result.err) == (0, "no ckptfs mounts\n", "")
    for more in ([], ["--watch"]):
        result = ckptfs("status", "--json", *more)
        assert (result.code, result.out, result.err) == (0, "[]\n", "")
    assert ckptfs("wait").code == Exit.NOT_MOUNTED  # nothing was made durable


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["status", "--watch"], ["umount"], ["wait", "--mount"]]
)
def test_what_was_never_mounted_is_said_to_be_no_mount(
    ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    result = ckptfs(*command, tmp_path / "mnt")
    assert (result.code, result.out) == (Exit.NOT_MOUNTED, "")
    sentence = f"{tmp_path}/mnt is not a ckptfs mount; ckptfs status shows those there are"
    assert result.sentence == sentence
    assert ckptfs(*command, tmp_path / "missing").code == Exit.NOT_MOUNTED
    assert "/proc is not a ckptfs mount: " in ckptfs(*command, "/proc").sentence
    there = mountinfo.Mount(1, 0, "0:50", str(tmp_path), mountinfo.FSTYPE, "ckptfs")
    monkeypatch.setattr(mountinfo, "read", lambda: [there])
    result = ckptfs(*command, tmp_path / "mnt")
    assert result.sentence == f"{tmp_path}/mnt is not a mount point; it lies in the ckptfs mount {tmp_path}"


def test_what_is_staged_without_a_daemon_is_shown(ckptfs: Ckptfs, tmp_path: Path) -> None:
    paths = MountPaths(str(tmp_path / "mnt"))
    paths.create()
    write_state(paths, pid=12, staged=3)
    result = ckptfs("status")
    assert result.code == Exit.NOT_MOUNTED
    assert f"3 files staged, no daemon: run ckptfs mount {tmp_path}/mnt to resume" in result.out
    (shown,) = json.loads(ckptfs("status", "--json").out)
    assert (shown["daemon"], shown["staged"], shown["mountpoint"]) == (False, 3, str(tmp_path / "mnt"))
    assert ckptfs("wait").code == Exit.NOT_MOUNTED
    result = ckptfs("umount", tmp_path / "mnt")
    assert result.code == Exit.LEFT_OVER
    assert "3 files may be still staged" in result.sentence


def test_foreign_state_files_are_ignored(ckptfs: Ckptfs, tmp_path: Path) -> None:
    for name, text in (("x", "{}"), ("y", "nonsense"), ("0" * 16, '{"mountpoint": "/etc"}')):
        directory = tmp_path / "run" / name
        directory.mkdir(parents=True)
        (directory / "mount.json").write_text(text)
    assert ckptfs("status", "--json").out == "[]\n"


def test_a_silent_daemon(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.delay = 1.0
    with pytest.raises(CkptfsError, match=r"did not answer within 0\.2 seconds"):
        client.request(daemon.paths, "status", 0.2)


@pytest.mark.parametrize("garbage", [b"nonsense\n", b"[1]\n", b"\xff\n", b'{"half": '])
def test_garbage_from_the_socket_is_one_sentence(ckptfs: Ckptfs, daemon: FakeDaemon, garbage: bytes) -> None:
    daemon.answers["status"] = [garbage]
    result = ckptfs("status")
    assert result.code == Exit.FAILED
    assert "Traceback" not in result.out
    daemon.answers["wait"] = [garbage]
    assert ckptfs("wait").sentence


def test_wait_durable(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers["wait"] = [
        {"pending": PENDING, "eta_s": 1.0},
        {"pending": PENDING, "eta_s": None},
        outcome(0),
    ]
    monkeypatch.chdir(tmp_path)
    result = ckptfs("wait", "mnt/run/a.pt", tmp_path / "mnt" / "b", "--timeout", "2m")
    assert (result.code, result.err) == (0, "")
    assert len(daemon.requests) == 1
    request = daemon.requests[0]
    assert request["paths"] == [f"{tmp_path}/mnt/run/a.pt", f"{tmp_path}/mnt/b"]
    assert 115 < request["timeout_s"] <= 120
    assert ckptfs("wait").code == 0
    assert (daemon.requests[-1]["paths"], daemon.requests[-1]["timeout_s"]) == ([], None)
    assert ckptfs("wait", "--mount", "mnt").code == 0


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (Exit.TIMEOUT, "not everything is durable after 5.0 s: 2 files, 3.0 MiB left"),
        (Exit.STUCK, "ckptfs skip"),
        (Exit.INTERRUPTED, "ckptfs publish or ckptfs discard"),
    ],
)
def test_wait_names_what_remains(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, code: Exit, part: str
) -> None:
    daemon.answers["wait"] = [outcome(code, *[f"f{number}" for number in range(12)])]
    result = ckptfs("wait", "--timeout", "5")
    assert result.code == code
    first, *rest = result.err.splitlines()
    assert part in first
    assert rest[0] == f"  {tmp_path}/mnt/f0"
    assert rest[-1] == "  ... and 2 more"


def test_wait_over_several_mounts_gives_the_worst(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    (tmp_path / "mnt2").mkdir()
    other = FakeDaemon(tmp_path / "mnt2")
    try:
        daemon.answers["wait"] = [outcome(Exit.TIMEOUT, "x")]
        other.answers["wait"] = [outcome(Exit.STUCK, "y")]
        assert ckptfs("wait", "--timeout", "1").code == Exit.STUCK
        assert ckptfs("wait", tmp_path / "mnt" / "x").code == Exit.TIMEOUT
        assert len(other.requests) == 1
        assert [len(daemon.requests), ckptfs("status", "--json").code] == [2, 0]
    finally:
        other.stop()


def test_the_daemon_ends_while_we_wait(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.answers["wait"] = [{"pending": PENDING, "eta_s": None}]
    result = ckptfs("wait")
    assert result.code == Exit.FAILED
    assert f"run ckptfs mount {tmp_path}/mnt" in result.sentence


def test_umount(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.answers["umount"] = [{"pending": PENDING, "eta_s": 1}, outcome(0)]
    result = ckptfs("umount", tmp_path / "mnt")
    assert (result.code, result.err) == (0, "")
    assert daemon.requests == [{"command": "umount", "drain": True, "timeout_s": None}]


def test_umount_tells_what_is_left(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.answers["umount"] = [outcome(Exit.TIMEOUT, "run/a.pt")]
    result = ckptfs("umount", "--no-drain", "--timeout", "0", tmp_path / "mnt")
    assert result.code == Exit.TIMEOUT
    assert "2 files, 3.0 MiB left; it stays staged for the next mount" in result.err
    assert f"\n  {tmp_path}/mnt/run/a.pt\n" in result.err
    assert daemon.requests == [{"command": "umount", "drain": False, "timeout_s": 0.0}]
    daemon.answers["umount"] = [{**outcome(0), "durable": False}]
    assert ckptfs("umount", tmp_path / "mnt").code == Exit.LEFT_OVER


@pytest.mark.parametrize("command", ["umount", "wait"])
def test_a_daemon_that_ends_well_without_a_last_answer(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    daemon.answers[command] = [{"pending": PENDING, "eta_s": 1}]
    follow = client.events

    def events(*arguments: Any, **more: Any) -> Iterator[client.Event]:
        for event in follow(*arguments, **more):
            yield event
            daemon.stop(keep_state=False)

    monkeypatch.setattr(client, "events", events)
    result = ckptfs(command, tmp_path / "mnt")
    assert (result.code, result.err) == (0, "")


def test_umount_refused(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.answers["umount"] = [{"done": True, "error": "/mnt is in use by pid 7", "code": 10}]
    result = ckptfs("umount", tmp_path / "mnt")
    assert (result.code, result.sentence) == (Exit.BUSY, "/mnt is in use by pid 7")


@pytest.mark.parametrize("command", ["publish", "discard", "skip"])
def test_resolving(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path / "mnt")
    assert ckptfs(command, "run/../a.pt").code == 0
    assert daemon.requests == [{"command": command, "path": f"{tmp_path}/mnt/a.pt"}]
    daemon.answers[command] = [{"done": True, "error": "a.pt is not interrupted", "code": 2}]
    result = ckptfs(command, "a.pt")
    assert (result.code, result.sentence) == (Exit.USAGE, "a.pt is not interrupted")
    assert ckptfs(command, tmp_path / "elsewhere").code == Exit.NOT_MOUNTED


@pytest.mark.parametrize(
    "arguments",
    [
        ["wait", "--timeout", "soon"], ["umount"], ["umount", "/x", "--timeout", "-1"], ["publish"],
        ["nonsense"], ["status", "--bad"], ["skip", "a", "b"], ["discard", ""], ["wait", "a\0b"], ["--bad"],
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    ckptfs: Ckptfs, daemon: FakeDaemon, arguments: list[str]
) -> None:
    result = ckptfs(*arguments)
    assert result.code == Exit.USAGE
    assert result.sentence
    assert result.out == ""


def test_undecodable_names_are_shown_escaped(ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon) -> None:
    odd = os.fsdecode(b"a\xffb\x1b[31m")
    assert ckptfs("publish", tmp_path / "mnt" / odd).out.startswith(f"{tmp_path}/mnt/a\\xffb\\x1b[31m ")
    assert daemon.requests[0]["path"] == f"{tmp_path}/mnt/{odd}"
    daemon.status["stuck"] = [{"path": odd, "operation": "PUT", "error": "no", "since": 1, "retries": 2}]
    assert f"ckptfs skip $'{tmp_path}/mnt/a\\xffb\\x1b[31m'" in ckptfs("status").out


def test_version_and_help(ckptfs: Ckptfs) -> None:
    assert ckptfs("--version").out.startswith("ckptfs ")
    for command in ("mount", "status", "wait", "umount", "publish", "discard", "skip"):
        assert ckptfs(command, "--help").code == 0
    result = ckptfs()
    assert result.code == Exit.USAGE
    assert "Usage" in result.err


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ckptfs", *arguments]


def test_a_reader_that_goes_away_is_no_error_message(daemon: FakeDaemon) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" "$@" | true', *command_line("status", "--json")], capture_output=True, text=True
    )
    assert done.stderr == ""


def run_in_terminal(*arguments: str, until: Callable[[], None]) -> tuple[int, str]:
    """Run on a pseudo-terminal; `until` is called once something was shown."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command_line(*arguments), stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    deadline = time.monotonic() + 20
    called = False
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                data = os.read(leader, 65536)
            except OSError:
                break
            shown += data
            if not called and b"cache" in shown:
                called = True
                until()
    os.close(leader)
    return process.wait(timeout=5), shown.decode()


def test_watch_ends_with_the_daemon(tmp_path: Path, daemon: FakeDaemon) -> None:
    code, shown = run_in_terminal("status", "--watch", until=lambda: daemon.stop(keep_state=False))
    assert code == 0, shown
    assert "╭" in shown
    assert "█" in shown
    assert "everything is durable" in shown


def test_watch_tells_what_a_killed_daemon_left(tmp_path: Path, daemon: FakeDaemon) -> None:
    code, shown = run_in_terminal("status", "--watch", str(tmp_path / "mnt"), until=daemon.stop)
    assert code == Exit.NOT_MOUNTED, shown
    assert "to recover what was staged" in shown.replace("\r\n", "")


def test_progress_on_a_terminal(tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.delay = 0.2
    daemon.answers["wait"] = [{"pending": {**PENDING, "bytes": size << 20}, "eta_s": 1} for size in (8, 4)]
    daemon.answers["wait"].append(outcome(0))
    code, shown = run_in_terminal("wait", until=lambda: None)
    assert code == 0
    assert f"waiting for {tmp_path}" in shown
    assert "8.0 MiB left" in shown
