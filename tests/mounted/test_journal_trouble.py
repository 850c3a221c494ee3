"""A journal without room: new names are refused in time, nothing else fails and nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for

ROOM = 6 << 20
LOTS = 20_000


def journal_dir(mount: Mount) -> Path:
    """The directory of the journal, a tmpfs of its own."""
    return next(mount.run_dir.glob("*/journal"))


def resize(mount: Mount, size: int) -> None:
    """Give the journal's tmpfs another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(journal_dir(mount))], check=True)


def used(mount: Mount) -> int:
    """Bytes the journal occupies."""
    st = os.statvfs(journal_dir(mount))
    return (st.f_blocks - st.f_bfree) * st.f_frsize


def content(i: int) -> bytes:
    return b"%d" % i * 100


def fill(mount: Mount) -> int:
    """Create files until there is no room for more names in the journal. Returns how many were made."""
    resize(mount, used(mount) + ROOM)
    for i in range(LOTS):
        try:
            with open(mount.point / f"f{i}", "xb") as f:
                f.write(content(i))
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            assert not os.path.lexists(mount.point / f"f{i}")
            return i
    raise AssertionError(f"{LOTS} files fit")


@pytest.fixture
def slow(new_mount: Callable[..., Mount]) -> Mount:
    mount = new_mount()
    mount.start(config="settle_time = 3600\n")
    return mount


def test_new_names_are_refused_and_all_else_goes_on(slow: Mount) -> None:
    mount, point = slow, slow.point
    point.joinpath("old").write_bytes(b"old")
    with open(point / "open", "wb") as f:
        f.write(b"one ")
        made = fill(mount)
        f.write(b"two")
    for make in (os.mkdir, lambda p: os.symlink("x", p), lambda p: os.mknod(p)):
        with pytest.raises(OSError, match="No space left"):
            make(point / "new")
    assert "no room for more names in the journal" in mount.log()
    os.rename(point / "old", point / "renamed")
    with open(point / "f0", "wb") as f:  # written anew
        f.write(b"again")
    os.unlink(point / "f1")
    assert len(list(point.iterdir())) == made + 1
    mount.wait(timeout=60)
    assert (mount.tier / "renamed").read_bytes() == b"old"
    assert (mount.tier / "open").read_bytes() == b"one two"
    assert (mount.tier / "f0").read_bytes() == b"again"
    assert not (mount.tier / "f1").exists()
    assert all((mount.tier / f"f{i}").read_bytes() == content(i) for i in range(2, made))
    # What is on the tier needs no row any more.
    wait_for(lambda: not list(mount.status()["files"]), "an empty log")
    point.joinpath("new").write_bytes(b"new")
    assert mount.status()["errors"] == 0


def test_killed_then_loses_nothing(slow: Mount) -> None:
    mount = slow
    made = fill(mount)
    mount.kill(workers=True)
    done = mount.start()
    assert f"recovered {made:,} closed files" in done.stdout
    mount.wait(timeout=60)
    assert all((mount.tier / f"f{i}").read_bytes() == content(i) for i in range(made))


def test_a_journal_that_cant_be_written_at_all_is_waited_for(slow: Mount) -> None:
    mount, point = slow, slow.point
    names = [f"f{i}" for i in range(2000)]
    for name in names:
        point.joinpath(name).write_bytes(b"x")
    resize(mount, used(mount))
    # Rows that grow: renames take long names into the log, until not even the reserve is left.
    renamer = subprocess.Popen(
        ["sh", "-c", 'for f in f*; do mv "$f" "renamed-$f-' + "n" * 200 + '"; done'], cwd=point
    )
    try:
        wait_for(lambda: mount.status()["journal_error"], "a journal that can't be written")
        assert renamer.poll() is None
        assert "can't be written" in mount.cli("status", point).stdout
        resize(mount, 64 << 20)
        assert renamer.wait(60) == 0
    finally:
        renamer.kill()
        resize(mount, 64 << 20)
        renamer.wait(20)
    wait_for(lambda: mount.status()["journal_error"] is None, "the journal's recovery")
    mount.kill(workers=True)
    mount.start()
    mount.wait(timeout=60)
    assert sorted(p.name for p in mount.tier.glob("renamed-*")) == sorted(
        f"renamed-{n}-{'n' * 200}" for n in names
    )
