"""The unit in systemd/: which configuration an instance gets, and after which ends it is started again."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptfs.errors import Exit

UNIT = Path(__file__).parents[2] / "systemd" / "ckptfs@.service"


def setting(name: str) -> str:
    (value,) = [
        line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith(f"{name}=")
    ]
    return value


def test_an_end_that_a_restart_would_not_change_is_final() -> None:
    final = {int(code) for code in setting("RestartPreventExitStatus").split()}
    # A tier that can't be reached, and a crash, are the ends that go by.
    assert final == {Exit.USAGE, Exit.UNSUPPORTED, Exit.LEFT_OVER, Exit.BUSY}
    assert setting("Restart") == "on-failure"


def test_a_failing_stop_command_does_not_make_a_clean_end_a_failure() -> None:
    """After `ckptfs umount` by hand the main process has ended with 0, and there is nothing to unmount."""
    assert setting("ExecStop").startswith("-ckptfs umount ")


@pytest.mark.parametrize("own", [True, False])
def test_an_instance_has_its_own_configuration_or_the_common_one(tmp_path: Path, own: bool) -> None:
    (tmp_path / "ckptfs").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ckptfs").chmod(0o755)
    file = tmp_path / r"mnt-a\x20b.toml"
    if own:
        file.touch()
    # systemd splits like a shell, makes $ of $$, and then puts the instance in.
    words = [word.replace("$$", "$") for word in shlex.split(setting("ExecStart"))]
    assert words[-2:] == ["/etc/ckptfs/%i.toml", "%f"]
    words[-2:] = [str(file), "/mnt/a b"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, check=True)
    config = ["--config", str(file)] if own else []
    assert done.stdout.splitlines() == ["mount", "--foreground", *config, "--", "/mnt/a b"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_fault(tmp_path: Path) -> None:
    shutil.copy(UNIT, tmp_path / "ckptfs@x.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "ckptfs@x.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    # Where ckptfs is not on the PATH of the system, that is all there is to say.
    said = [line for line in done.stderr.splitlines() if "ckptfs@x.service" in line]
    assert [line for line in said if "is not executable" not in line] == []
