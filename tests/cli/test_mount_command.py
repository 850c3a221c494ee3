"""`ckptfs mount` up to the daemon, which is a fake process here, and mount(8)'s form of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_result import Result
from fake_daemon import FakeDaemon, write_state

from ckptfs import memory, mountinfo, mountpoint
from ckptfs.cli import daemon_process, helper
from ckptfs.errors import CkptfsError, Exit
from ckptfs.paths import MountPaths

FAKE = Path(__file__).with_name("fake_daemon_process.py")
Ckptfs = Callable[..., Result]


@pytest.fixture(autouse=True)
def fake_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_process, "DAEMON", (str(FAKE),))
    monkeypatch.setattr(mountpoint, "check_machine", lambda allow_other: None)


@pytest.fixture
def acting(tmp_path: Path) -> Callable[[str], list[str]]:
    """Flags that make the fake process do something."""

    def flags(act: str) -> list[str]:
        file = tmp_path / "act.toml"
        file.write_text(f'[tier_options]\nact = "{act}"\n')
        return ["--config", str(file)]

    return flags


def test_mount_hands_over_the_configuration_and_says_what_the_daemon_said(
    ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ckptfs("mount", "--cache-size", "64MiB", "--fsync", "tier", "--allow-tier-down", "mnt")
    assert (result.code, result.err) == (0, "")
    tier, line, facts, _, config = result.out.splitlines()
    assert tier.endswith(f"{tmp_path}/data/tier")
    assert line == "fake line"
    mount = str(tmp_path / "mnt")
    assert json.loads(facts) == {"cwd": "/", "session": True, "mountpoint": mount}
    values = json.loads(config)
    assert (values["mountpoint"], values["cache_size"], values["fsync"]) == (mount, 64 << 20, "tier")
    assert (values["allow_tier_down"], values["foreground"]) == (True, False)
    assert values["log_file"] == MountPaths(mount).log
    assert "fake daemon" in Path(values["log_file"]).read_text()


def test_an_object_store_and_the_credentials_of_the_environment(
    ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_CONFIG_FILE", "conf/aws")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~/x")
    monkeypatch.chdir(tmp_path)
    options = [
        "--endpoint-url",
        "http://h:1",
        "--endpoint-url",
        "http://h:2",
        "--region",
        "r",
        "--profile",
        "p",
    ]
    result = ckptfs("mount", "--tier", "s3://bucket/p/", *options, "--no-verify-tls", "mnt")
    assert (result.code, result.err) == (0, "")
    *_, aws, config = result.out.splitlines()
    values = json.loads(config)
    assert values["tier"] == "s3://bucket/p"
    assert values["options"] == {
        "endpoint_url": "http://h:1 http://h:2", "region": "r", "profile": "p", "verify": "false",
    }  # fmt: skip
    assert json.loads(aws) == {
        "AWS_ACCESS_KEY_ID": "the key",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_CONFIG_FILE": str(tmp_path / "conf/aws"),
        "AWS_SHARED_CREDENTIALS_FILE": os.path.expanduser("~/x"),
    }
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hush" in path.read_bytes() for path in files)


def test_the_daemons_refusal_is_ours(
    ckptfs: Ckptfs, tmp_path: Path, acting: Callable[[str], list[str]]
) -> None:
    result = ckptfs("mount", *acting("refuse"), tmp_path / "mnt")
    assert result.code == Exit.TIER_DOWN
    assert result.sentence == "the tier cannot be reached"


@pytest.mark.parametrize(("act", "how"), [("die", "exit code 3"), ("kill", "SIGKILL")])
def test_a_daemon_that_ends_while_starting(
    ckptfs: Ckptfs, tmp_path: Path, acting: Callable[[str], list[str]], act: str, how: str
) -> None:
    ckptfs("mount", tmp_path / "mnt")  # something older in the log
    result = ckptfs("mount", *acting(act), tmp_path / "mnt")
    assert result.code == Exit.FAILED
    first, *tail = result.err.splitlines()
    log = MountPaths(str(tmp_path / "mnt")).log
    assert first == f"ckptfs: the daemon ended while starting ({how}); see {log}"
    assert tail[0] == f"  fake daemon for {tmp_path}/mnt does {act}"
    assert ("  the reason it died of" in tail) is (act == "die")


def test_foreground_ends_with_the_daemon(
    ckptfs: Ckptfs, tmp_path: Path, acting: Callable[[str], list[str]]
) -> None:
    result = ckptfs("mount", "--foreground", tmp_path / "mnt")
    assert result.code == 0
    assert "fake line" in result.out
    assert "fake daemon" in result.err
    assert ckptfs("mount", "--foreground", *acting("die"), tmp_path / "mnt").code == Exit.FAILED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_foreground_hands_signals_on(tmp_path: Path, acting: Callable[[str], list[str]], number: int) -> None:
    code = (
        "import sys; from ckptfs import mountpoint; from ckptfs.cli import daemon_process, main;"
        f"daemon_process.DAEMON = ({str(FAKE)!r},);"
        "mountpoint.check_machine = lambda allow_other: None; main.main()"
    )
    arguments = ["mount", "--foreground", *acting("stay"), str(tmp_path / "mnt")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while "fake line" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(number)
    assert process.wait(timeout=10) == 9
    process.communicate()


def test_the_log_is_set_aside_when_it_is_large(
    ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_process, "_LOG_LIMIT", 10)
    for _ in range(2):
        assert ckptfs("mount", tmp_path / "mnt").code == 0
    log = Path(MountPaths(str(tmp_path / "mnt")).log)
    assert Path(f"{log}.1").read_text() == log.read_text()


def test_a_cache_larger_than_the_memory_is_warned_of(
    ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total", lambda: 1 << 30)
    result = ckptfs("mount", "--cache-size", "4GiB", tmp_path / "mnt")
    assert result.code == 0
    assert "warning: the cache of 4.0 GiB is larger than the memory there is (1.0 GiB)" in result.out
    (tmp_path / "disk").mkdir()
    for flags in (["--cache-size", "1GiB"], ["--cache-size", "4GiB", "--cache-dir", tmp_path / "disk"]):
        assert "warning" not in ckptfs("mount", *flags, tmp_path / "mnt").out


def test_a_second_mount_is_refused(
    ckptfs: Ckptfs, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ckptfs("mount", tmp_path / "mnt")
    assert result.code == Exit.BUSY
    assert f"pid {daemon.pid}" in result.sentence
    assert "draining" in result.sentence  # it lives, but the kernel has no mount there
    there = mountinfo.Mount(1, 0, "0:50", str(tmp_path / "mnt"), mountinfo.FSTYPE, "ckptfs")
    with monkeypatch.context() as patched:
        patched.setattr(mountinfo, "read", lambda: [there])
        result = ckptfs("mount", tmp_path / "mnt")
    assert result.code == Exit.BUSY
    assert result.sentence.endswith(f"see ckptfs status {tmp_path}/mnt; ckptfs umount {tmp_path}/mnt ends it")
    daemon.stop()
    assert ckptfs("mount", tmp_path / "mnt").code == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--cache-size", "lots"], "--cache-size: 'lots'"),
        (["--cache-size", "1MiB"], "--cache-size: a cache of 1.0 MiB is too small"),
        (["--spill-size", "-1"], "--spill-size: '-1'"),
        (["--tier", "gopher://x"], "--tier: "),
        (["--fsync", "never"], "--fsync: 'never' is not one of"),
        (["--config", "/does/not/exist"], "/does/not/exist"),
        (["--cache-dir", "/does/not/exist"], "cache_dir: /does/not/exist does not exist; mount the disk"),
        (["--cache-dir", "/does/not/exist"], "or make it with mkdir -p"),
        (["--spill-dir", "/etc/passwd"], "spill_dir: /etc/passwd is not a directory"),
        (["--log-level", "x"], "--log-level: "),
        (["--unknown"], "--unknown"),
        (["--cache-size"], "--cache-size"),
        (["a", "b"], "ckptfs mount --help"),
        ([""], "MOUNTPOINT: the text is empty"),
    ],
)
def test_bad_input(ckptfs: Ckptfs, tmp_path: Path, flags: list[str], part: str) -> None:
    place = [tmp_path / "mnt"] if flags[0].startswith("-") else []
    result = ckptfs("mount", *flags, *place)
    assert result.code == Exit.USAGE
    assert part in result.sentence


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory(ckptfs: Ckptfs, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    result = ckptfs("mount", "--cache-dir", tmp_path / "cache", tmp_path / "mnt")
    assert "cannot be written to" in result.sentence


def test_no_fuse_on_the_machine(ckptfs: Ckptfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(allow_other: bool) -> None:
        raise CkptfsError("/dev/fuse does not exist", Exit.UNSUPPORTED)

    monkeypatch.setattr(mountpoint, "check_machine", missing)
    result = ckptfs("mount", tmp_path / "mnt")
    assert (result.code, result.sentence) == (Exit.UNSUPPORTED, "/dev/fuse does not exist")


def test_mount8_form(ckptfs: Ckptfs, tmp_path: Path) -> None:
    options = "rw,allow_other,dev,suid,cache-size=64MiB,noauto,x-systemd.automount,niceness=3"
    result = ckptfs("file:///srv/tier", tmp_path / "mnt", "-o", options)
    assert (result.code, result.err) == (0, "")
    values = json.loads(result.out.splitlines()[-1])
    assert (values["tier"], values["allow_other"]) == ("file:///srv/tier", True)
    assert (values["cache_size"], values["niceness"]) == (64 << 20, 3)
    result = ckptfs("/srv/a b", tmp_path / "mnt", "-o", "rw")
    assert json.loads(result.out.splitlines()[-1])["tier"] == "file:///srv/a%20b"
    result = ckptfs("none", tmp_path / "mnt", "-n", "-v", "-orw")
    assert json.loads(result.out.splitlines()[-1])["tier"] == f"file://{tmp_path}/data/tier"
    assert ckptfs("none", tmp_path / "mnt", "-sf").out == ""


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["none", "MNT", "-o", "ro"], "mount option ro"),
        (["none", "MNT", "-o", "cach-size=1G"], "did you mean 'cache_size'?"),
        (["none", "MNT", "-o", "cache-size"], "needs a value"),
        (["none", "MNT", "-o", "cache-size=x"], "mount option cache-size: 'x'"),
        (["none", "MNT", "-o", "workers=x"], "mount option workers: 'x' is not a whole number"),
        (["none", "MNT", "-o"], "needs a value"),
        (["none", "MNT", "--bad"], "--bad"),
        (["none"], "ckptfs SOURCE MOUNTPOINT"),
        (["/ckpt"], "ckptfs SOURCE MOUNTPOINT"),
        (["s3:///prefix", "MNT"], "mount option tier: "),
        (["s3://bucket", "MNT", "-o", "endpoint-url=x"], "mount option endpoint-url: "),
    ],
)
def test_mount8_form_bad_input(ckptfs: Ckptfs, tmp_path: Path, arguments: list[str], part: str) -> None:
    result = ckptfs(*[str(tmp_path / "mnt") if item == "MNT" else item for item in arguments])
    assert result.code == Exit.USAGE
    assert part in result.sentence


def test_mount8_options() -> None:
    assert helper.parse_options("config=/x,no_allow_other,workers=2,,defaults") == (
        {"allow_other": False, "workers": "2"},
        "/x",
    )
    assert helper.is_helper_call("mount.ckptfs", ["anything"])
    assert not helper.is_helper_call("ckptfs", ["statsu", "/ckpt"])
    assert not helper.is_helper_call("ckptfs", [])


def test_an_interrupted_start_leaves_no_daemon(
    tmp_path: Path, acting: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text(
        "import os, sys, time\nopen(sys.argv[-1] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    code = (
        "from ckptfs import mountpoint; from ckptfs.cli import daemon_process, main;"
        f"daemon_process.DAEMON = ({str(silent)!r},); daemon_process._PATIENCE = 0.1;"
        "mountpoint.check_machine = lambda allow_other: None; main.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "mount", str(tmp_path / "mnt")], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "still starting" in process.stderr.readline()
    while not (pid := (tmp_path / "mnt.pid")).exists() or not pid.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert not os.path.exists(f"/proc/{pid.read_text()}")
    assert process.communicate()[1].strip() == ""


def test_state_of_an_ended_daemon_does_not_hinder(ckptfs: Ckptfs, tmp_path: Path) -> None:
    paths = MountPaths(str(tmp_path / "mnt"))
    paths.create()
    write_state(paths, 1, staged=3)
    assert ckptfs("mount", tmp_path / "mnt").code == 0
