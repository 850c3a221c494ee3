"""Directories of their own for every test, and the command line run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_result import Result
from fake_daemon import FakeDaemon

from ckptfs import config_file
from ckptfs.cli.main import run


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run and data directory below tmp_path; no configuration file of the machine is read."""
    monkeypatch.setenv("CKPTFS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("CKPTFS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(config_file, "default_file", lambda: str(tmp_path / "none.toml"))
    (tmp_path / "mnt").mkdir()
    return tmp_path


@pytest.fixture
def ckptfs(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a ckptfs command line."""

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """A fake daemon for tmp_path/mnt."""
    fake = FakeDaemon(tmp_path / "mnt")
    yield fake
    try:
        fake.stop()
    except OSError:
        pass  # the test stopped it
