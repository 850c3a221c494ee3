"""What a command advises works as it is printed, and a refused mount leaves nothing in the tier."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, alive, wait_for
from tests.mounted.processes import kill, saver

NewMount = Callable[..., Mount]
UNSENT = "settle_time = 3600\nstream_interval = 3600\n"


def advised(mount: Mount, text: str) -> list[str]:
    """The mount command in a message, as a shell takes it apart."""
    start = text.index("ckptfs mount ")
    for end in (" to resume", " to recover", " to publish", "), and", ", then", "\n"):
        if (at := text.find(end, start)) > 0:
            text = text[: max(at, start)]
    name, *arguments = shlex.split(text[start:])
    assert name == "ckptfs"
    assert arguments[:2] == ["mount", str(mount.point)]
    return arguments


@pytest.fixture
def places(new_mount: NewMount) -> Mount:
    """A mount with a tier and directories that need quoting."""
    mount = new_mount("it's here")
    mount.tier = mount.base / "a tier"
    for name in ("a tier", "a cache", "a spill"):
        (mount.base / name).mkdir()
    return mount


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_advice_of_every_command_resumes(places: Mount, on_disk: bool) -> None:
    mount = places
    url = f"file://{mount.tier}"
    flags = ["--tier", url, "--cache-size", "64MiB", "--spill-dir", str(mount.base / "a spill")]
    flags += ["--cache-dir", str(mount.base / "a cache")] if on_disk else []
    mount.options = ["--config", str(mount.base / "slow.toml")]
    (mount.base / "slow.toml").write_text(UNSENT)
    mount.cli("mount", mount.point, *flags, *mount.options)
    mount.pid = int(mount.status()["pid"])
    (mount.point / "dir" / "sub").mkdir(parents=True)
    (mount.point / "dir" / "f").write_bytes(b"f")
    wait_for(lambda: '"staged": 1,' in next(mount.run_dir.glob("*/mount.json")).read_text(), "the state file")
    mount.kill(workers=True)
    said = [
        mount.cli("status", check=False).stdout,
        mount.cli("wait", mount.point / "dir", check=False).stderr,
        mount.cli("publish", mount.point / "dir" / "f", check=False).stderr,
        mount.cli("umount", mount.point, check=False).stderr,
    ]
    assert "1 file staged, no daemon" in said[0]
    (arguments,) = {tuple(advised(mount, text)) for text in said}
    assert ("--cache-dir" in arguments) is on_disk
    mount.cli(*arguments)
    mount.pid = int(mount.status()["pid"])
    mount.umount()
    assert (mount.tier / "dir" / "f").read_bytes() == b"f"


def test_another_tier_than_the_staged_files_is_refused_and_left_as_it_is(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config=UNSENT)
    (mount.point / "f").write_bytes(b"f")
    mount.kill(workers=True)
    first, mount.tier = mount.tier, mount.base / "another"
    url, mount.url = mount.url, f"file://{mount.tier}"
    mount.tier.mkdir()
    before = mount.tier.stat().st_mtime_ns
    done = mount.start(check=False)
    assert done.returncode == 2
    assert f"files for the tier {url} are still staged for {mount.point}: mount with that" in done.stderr
    assert (os.listdir(mount.tier), mount.tier.stat().st_mtime_ns) == ([], before)
    mount.cli(*advised(mount, done.stderr))
    mount.pid = int(mount.status()["pid"])
    mount.umount()
    assert (first / "f").read_bytes() == b"f"
    mount.start()
    mount.umount()


def test_a_tier_that_was_made_anew_is_taken_after_the_advice(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start()
    (mount.point / "f").write_bytes(b"f")
    mount.wait()
    mount.umount()
    for again in (
        lambda: None,
        lambda: shutil.copytree(mount.base / "third" / ".ckptfs", mount.tier / ".ckptfs"),
    ):
        shutil.rmtree(mount.tier)
        mount.tier.mkdir()
        if again() is None:
            other = new_mount("other", tier=mount.base / "third")
            other.start()
            other.umount()
        done = mount.start(check=False)
        assert done.returncode == 8
        assert "--allow-tier-down" not in done.stderr
        _, _, advice = done.stderr.partition("; if it was made anew on purpose, run ")
        subprocess.run(["sh", "-c", advice.partition(", and mount again")[0]], check=True)
        mount.start()
        (mount.point / "g").write_bytes(b"g")
        mount.umount()
        assert mount.tier_names() == {"g"}


def test_interrupted_files_are_gone_on_with_after_umount(mount: Mount) -> None:
    (mount.point / "f").write_bytes(b"good")
    mount.wait()
    kill(saver(mount.point / "f"))
    wait_for(lambda: mount.status()["interrupted"], "the interruption")
    pending = mount.status()["pending"]
    size = (mount.point / "f").stat().st_size
    assert (pending["files"], pending["kept_back_files"], pending["kept_back_bytes"]) == (0, 1, size)
    assert "interrupted or skipped: 19 B in 1 file, only here" in mount.cli("status", check=False).stdout
    done = mount.umount(check=False)
    assert done.returncode == 5
    assert "it is unmounted now" in done.stderr
    mount.cli(*advised(mount, done.stderr))
    mount.pid = int(mount.status()["pid"])
    mount.cli("publish", mount.point / "f")
    mount.umount()
    assert (mount.tier / "f").stat().st_size == size


@contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """A directory that refuses every change."""
    subprocess.run(["chattr", "+i", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(directory)], check=True)


def test_a_stuck_entry_can_be_skipped_after_umount(mount: Mount) -> None:
    (mount.point / "d").mkdir()
    (mount.point / "d" / "first").write_bytes(b"1")
    mount.wait()
    with refusing(mount.tier / "d"):
        (mount.point / "d" / "f").write_bytes(b"2")
        wait_for(lambda: mount.status()["stuck"], "a stuck entry")
        begun = time.monotonic()
        done = mount.cli("umount", mount.point, check=False)
        assert time.monotonic() - begun < 10
        assert done.returncode == 4
        assert "it is unmounted, and its daemon goes on trying" in done.stderr
        assert not os.path.ismount(mount.point)
        mount.cli("skip", mount.point / "d" / "f")
        wait_for(lambda: not alive(mount.pid), "the daemon's end")
    done = mount.start()
    mount.cli("publish", mount.point / "d" / "f")
    mount.umount()
    assert (mount.tier / "d" / "f").read_bytes() == b"2"


def test_the_age_of_a_file_being_written_counts_from_its_first_write(mount: Mount) -> None:
    (mount.point / "old").write_bytes(b"x" * 10)
    mount.wait()
    for name in ("new", "old"):
        with open(mount.point / name, "r+b" if name == "old" else "wb", buffering=0) as file:
            file.write(b"x" * 100)
            begun = time.time()
            while time.time() - begun < 1.2:
                file.write(b"x" * 100)
                time.sleep(0.1)
            status = mount.status()
            assert status["pending"]["oldest_age_s"] >= 1.1
            assert (status["pending"]["open_files"], status["eta_s"]) == (1, None)
            assert "1 file still being written" in mount.cli("status").stdout
            file.truncate(0)  # nothing of it is undurable any more
            file.write(b"y")
            assert mount.status()["pending"]["oldest_age_s"] < 1
        mount.wait()
    assert (mount.status()["pending"]["open_files"], mount.status()["eta_s"]) == (0, 0)


def test_wait_and_status_say_that_the_tier_is_down(mount: Mount) -> None:
    mount.tier.rename(mount.base / "aside")
    (mount.point / "f").write_bytes(b"f")
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "the tier to be down")
    done = mount.cli("wait", mount.point / "f", "--timeout", "0.5", check=False)
    assert done.returncode == 3
    assert f"left; the tier is down (tier directory {mount.tier} cannot be opened" in done.stderr
    assert mount.cli("status", check=False).returncode == 8
    (mount.base / "aside").rename(mount.tier)
    assert mount.cli("wait", mount.point / "f").stdout == f"{mount.point}/f: durable\n"
    mount.umount()


def test_a_tier_in_another_mount_is_refused(mount: Mount, new_mount: NewMount) -> None:
    (mount.point / "t").mkdir()
    other = new_mount("other", tier=mount.point / "t")
    done = other.start(check=False)
    assert done.returncode == 2
    assert f"{mount.point}/t lies inside the ckptfs mount {mount.point}; name its directory" in done.stderr


def test_what_is_staged_goes_to_a_tier_that_was_made_anew(new_mount: NewMount) -> None:
    mount = new_mount()
    mount.start(config=UNSENT)
    for name in ("replaced", "renamed", "removed"):
        (mount.point / name).write_bytes(b"old")
    mount.wait()
    (mount.point / "replaced").write_bytes(b"new")
    (mount.point / "renamed").rename(mount.point / "under another name")
    (mount.point / "removed").unlink()
    (mount.point / "made").write_bytes(b"made")
    mount.kill(workers=True)
    shutil.rmtree(mount.tier)
    mount.tier.mkdir()
    assert mount.start(check=False).returncode == 8
    next((mount.base / "data" / "mounts").glob("*/tier.json")).unlink()
    mount.start()
    mount.umount()
    assert mount.tier_names() == {"replaced", "made"}  # what only the old tier had is gone
    assert (mount.tier / "replaced").read_bytes() == b"new"
