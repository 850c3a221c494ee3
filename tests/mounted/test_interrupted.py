"""R6: what a killed writer leaves is kept in the mount and never replaces the good file on the tier."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for
from tests.mounted.processes import kill, let_finish, saver

HALF = b"half of the new one"


@pytest.fixture
def run(shared: Mount, request: pytest.FixtureRequest) -> Path:
    """A directory with a good, durable file `last.ckpt`."""
    d = shared.point / request.node.name.replace("/", "_")
    d.mkdir()
    (d / "last.ckpt").write_bytes(b"good")
    shared.wait(d)
    return d


def on_tier(mount: Mount, path: Path) -> Path:
    return mount.tier / path.relative_to(mount.point)


def interrupted(mount: Mount, path: Path) -> bool:
    name = str(path.relative_to(mount.point))
    return any(i["path"] == name for i in mount.status()["interrupted"])


@pytest.mark.parametrize("how", ["trunc", "tmp", "again", "patch"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_killed_save_does_not_replace_the_good_file(
    shared: Mount, run: Path, how: str, number: int
) -> None:
    last = run / "last.ckpt"
    kill(saver(last, how), number)
    wait_for(lambda: interrupted(shared, last), "the interruption")
    half = {"patch": b"half"}.get(how, HALF)
    assert last.read_bytes() == half
    assert os.getxattr(last, "user.ckptfs.state") == b"interrupted"
    assert os.getxattr(run, "user.ckptfs.state") == b"interrupted"
    assert shared.ask("wait", paths=[str(last)])["code"] == 5
    # Everything else goes on, and does not pass it by.
    (run / "next").write_bytes(b"next")
    shared.wait(run / "next")
    assert on_tier(shared, last).read_bytes() == b"good"
    # A new save resolves it.
    let_finish(saver(last, how))
    rest = b", and the rest"
    if how != "patch":
        shared.wait(last)
        assert on_tier(shared, last).read_bytes() == HALF + rest
        assert not interrupted(shared, last)
        assert sorted(os.listdir(on_tier(shared, run))) == ["last.ckpt", "next"]
    else:
        shared.cli("publish", last)
        shared.wait(last)
        assert on_tier(shared, last).read_bytes() == b"half" + rest


def test_publish_and_discard(shared: Mount, run: Path) -> None:
    a, b, c = run / "a", run / "last.ckpt", run / "c"
    for path, how in ((a, "trunc"), (b, "trunc"), (c, "tmp")):
        kill(saver(path, how))
        wait_for(lambda p=path: interrupted(shared, p), "the interruption")  # type: ignore[misc]
    shared.cli("publish", a)
    shared.cli("discard", b)
    shared.cli("discard", c)
    shared.wait(run)
    assert on_tier(shared, a).read_bytes() == HALF
    assert on_tier(shared, b).read_bytes() == b.read_bytes() == b"good"
    assert sorted(os.listdir(run)) == sorted(os.listdir(on_tier(shared, run))) == ["a", "last.ckpt"]
    assert shared.cli("discard", a, check=False).returncode == 2
    assert shared.cli("publish", c, check=False).returncode == 2


def test_discard_goes_back_to_the_version_in_flight(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    mount.start(config="settle_time = 60\n")
    (mount.point / "f").write_bytes(b"version one")
    kill(saver(mount.point / "f", "trunc"))
    wait_for(lambda: mount.status()["interrupted"], "the interruption")
    mount.cli("discard", mount.point / "f")
    assert (mount.point / "f").read_bytes() == b"version one"
    mount.wait()
    assert (mount.tier / "f").read_bytes() == b"version one"


def test_sigint_is_an_ordinary_exit_when_python_handles_it(shared: Mount, run: Path) -> None:
    last = run / "last.ckpt"
    process = saver(last)
    kill(process, signal.SIGINT)
    shared.wait(last)
    assert process.returncode == -signal.SIGINT or process.returncode == 1
    assert last.read_bytes() == on_tier(shared, last).read_bytes() or interrupted(shared, last)


def test_renaming_and_removing_an_interrupted_file(shared: Mount, run: Path) -> None:
    last = run / "last.ckpt"
    kill(saver(last))
    wait_for(lambda: interrupted(shared, last), "the interruption")
    os.rename(last, run / "broken")
    (run / "x").write_bytes(b"x")
    shared.wait(run / "x")
    assert on_tier(shared, last).read_bytes() == b"good"  # nothing has replaced it yet
    os.unlink(run / "broken")
    shared.wait()
    assert sorted(os.listdir(on_tier(shared, run))) == ["x"]
    kill(saver(run / "y"))
    wait_for(lambda: interrupted(shared, run / "y"), "the interruption")
    os.unlink(run / "y")
    assert not interrupted(shared, run / "y")
    shared.wait()


def test_a_killed_appender_is_published(shared: Mount, run: Path) -> None:
    last = run / "last.ckpt"
    kill(saver(last, "append"))
    shared.wait(last)
    assert on_tier(shared, last).read_bytes() == b"goodhalf of a line"


def test_a_killed_reader_or_idle_holder_interrupts_nothing(shared: Mount, run: Path) -> None:
    import subprocess
    import sys

    last = run / "last.ckpt"
    script = "import sys\nf=open(sys.argv[1],sys.argv[2])\nprint('ready',flush=True)\nsys.stdin.read()\n"
    for mode in ("rb", "r+b", "ab"):
        p = subprocess.Popen(
            [sys.executable, "-c", script, str(last), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert p.stdout is not None
        p.stdout.readline()
        kill(p)
    shared.wait(last)
    assert not interrupted(shared, last)
    assert last.read_bytes() == b"good"


def test_streams_of_a_killed_writer_are_published(shared: Mount, run: Path) -> None:
    for name in ("train.log", "events.out.tfevents.123", "out.jsonl"):
        kill(saver(run / name))
        shared.wait(run / name)
        assert on_tier(shared, run / name).read_bytes() == HALF


def test_an_open_stream_is_published_now_and_then(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount()
    mount.start(config='stream_interval = "0.3s"\nsettle_time = 0\n')
    with (
        open(mount.point / "train.log", "ab", buffering=0) as f,
        open(mount.point / "model.pt", "wb", 0) as g,
    ):
        g.write(b"model")
        for line in (b"one\n", b"two\n", b"three\n"):
            f.write(line)
            tier = mount.tier / "train.log"
            wait_for(lambda: tier.exists() and tier.read_bytes().endswith(line), f"{line!r} on the tier")  # noqa: B023
        assert not (mount.tier / "model.pt").exists()
        assert mount.state("model.pt") == "dirty"
    mount.wait()
    assert (mount.tier / "train.log").read_bytes() == b"one\ntwo\nthree\n"


def test_interrupted_files_survive_umount_and_mount(mount: Mount) -> None:
    (mount.point / "f").write_bytes(b"good")
    mount.wait()
    kill(saver(mount.point / "f"))
    wait_for(lambda: mount.status()["interrupted"], "the interruption")
    done = mount.umount(check=False)
    assert done.returncode == 5
    assert "f" in done.stderr
    done = mount.start()
    assert "1 interrupted" in done.stdout
    assert (mount.point / "f").read_bytes() == HALF
    mount.cli("publish", mount.point / "f")
    mount.wait()
    assert (mount.tier / "f").read_bytes() == HALF


def test_files_open_when_the_daemon_dies_are_interrupted_and_closed_ones_published(mount: Mount) -> None:
    (mount.point / "f").write_bytes(b"good")
    mount.wait()
    process = saver(mount.point / "f")
    (mount.point / "closed").write_bytes(b"closed")
    mount.kill(workers=True)
    done = mount.start()
    assert "1 interrupted" in done.stdout
    mount.wait(mount.point / "closed")
    assert (mount.tier / "f").read_bytes() == b"good"
    assert (mount.point / "f").read_bytes() == HALF
    kill(process)
