"""The tier goes away, fills up, turns read-only or refuses, under load: no error reaches the writer,
status says what is wrong, and afterwards everything arrives in order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign
from tests.crash.conftest import QUICK, processes_of
from tests.crash.content import judge_file, make
from tests.mounted.harness import Mount, wait_for

SMALL = 2 << 20


def down(mount: Mount) -> str:
    """The tier's error in status once it is down."""
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "status to say that the tier is down")
    return str(mount.status()["tier"]["error"])


def work_goes_on(c: Campaign, steps: int = 15) -> None:
    """The trainers do some more steps, without an error."""
    before = c.steps()
    wait_for(lambda: c.check() or c.steps() >= before + steps, "the trainers, who wait for the tier", 60)


def arrives(c: Campaign) -> None:
    """The tier is back: status says so, and all is well in the end."""
    wait_for(lambda: c.mount.status()["tier"]["state"] == "up", "status to say that the tier is up")
    c.finish()
    assert c.mount.status()["tier"]["error"] is None


def run(*command: str | Path) -> None:
    subprocess.run([str(x) for x in command], check=True, capture_output=True)


def test_tier_directory_gone_for_a_while(campaign: Callable[..., Campaign]) -> None:
    c = campaign(5, runs=1, big=SMALL)
    c.start()
    work_goes_on(c)
    away = c.mount.tier.with_name("away")
    os.rename(c.mount.tier, away)
    assert "cannot be opened" in down(c.mount)
    work_goes_on(c)
    c.mount.tier.mkdir()  # the empty mount point of an unmounted tier is not the tier
    work_goes_on(c)
    wait_for(lambda: "does not hold the tier" in down(c.mount), "status to tell what is there instead")
    assert os.listdir(c.mount.tier) == []
    c.mount.tier.rmdir()
    os.rename(away, c.mount.tier)
    arrives(c)


def test_tier_read_only_for_a_while(
    campaign: Callable[..., Campaign], new_mount: Callable[..., Mount]
) -> None:
    mount = new_mount()
    run("mount", "--bind", mount.tier, mount.tier)
    mount.start(config=QUICK)
    c = campaign(6, mount, runs=1, big=SMALL)
    c.start()
    work_goes_on(c)
    run("mount", "-o", "remount,ro,bind", mount.tier)
    assert "Read-only file system" in down(mount)
    work_goes_on(c)
    run("mount", "-o", "remount,rw,bind", mount.tier)
    arrives(c)


def test_full_tier(campaign: Callable[..., Campaign], new_mount: Callable[..., Mount], disk: Path) -> None:
    mount = new_mount()
    on_image(disk, mount.tier, 220 << 20)
    filler = mount.tier / "filler"
    room = os.statvfs(mount.tier)
    run("fallocate", "-l", str(room.f_bavail * room.f_frsize - (6 << 20)), filler)
    mount.start(config=QUICK)
    c = campaign(7, mount, runs=1, big=4 << 20)
    c.start()
    assert "No space left on device" in down(mount)
    work_goes_on(c)
    c.sampled()
    filler.unlink()
    arrives(c)


def block(c: Campaign) -> Path:
    """A directory on the tier that refuses every change, with a file waiting to get in and one behind it."""
    m = c.mount
    (m.point / "refused").mkdir()
    (m.point / "refused" / "first").write_bytes(b"1")
    m.wait(m.point / "refused")
    run("chattr", "+i", m.tier / "refused")
    (m.point / "refused" / "second").write_bytes(b"2")
    (m.point / "behind").write_bytes(b"3")
    wait_for(lambda: m.status()["stuck"], "a stuck entry")
    return m.tier / "refused"


def test_refusal_is_stuck_until_it_is_lifted(campaign: Callable[..., Campaign]) -> None:
    c = campaign(8, runs=1, big=SMALL)
    m = c.mount
    refusing = block(c)
    c.start()
    work_goes_on(c)
    stuck = m.status()["stuck"]
    assert [x["path"] for x in stuck] == ["refused/second"]
    assert "Operation not permitted" in stuck[0]["error"]
    assert m.cli("status", m.point, check=False).returncode == 4
    assert m.cli("wait", m.point / "behind", "--timeout", "30", check=False).returncode == 4
    assert not (m.tier / "behind").exists()
    m.kill()  # a stuck entry survives that
    c.wait_lost()
    m.start()
    c.go()
    wait_for(lambda: m.status()["stuck"], "a stuck entry")
    assert not (m.tier / "behind").exists()
    run("chattr", "-i", refusing)
    wait_for(lambda: (m.tier / "behind").exists(), "what is behind", 40)
    assert (refusing / "second").read_bytes() == b"2"
    wait_for(lambda: not m.status()["stuck"], "the end of being stuck")
    (m.point / "refused" / "first").unlink()
    (m.point / "refused" / "second").unlink()
    (m.point / "refused").rmdir()
    (m.point / "behind").unlink()
    c.finish()
    assert m.cli("status", m.point).returncode == 0


def test_skip_lets_the_rest_pass(campaign: Callable[..., Campaign]) -> None:
    c = campaign(9, runs=1, big=SMALL)
    m = c.mount
    refusing = block(c)
    c.start()
    work_goes_on(c)
    m.cli("skip", m.point / "refused" / "second")
    wait_for(lambda: (m.tier / "behind").exists(), "what is behind", 10)
    assert (m.point / "refused" / "second").read_bytes() == b"2"
    assert not (refusing / "second").exists()
    assert m.status()["skipped"] == [{"path": "refused/second", "size": 1}]
    m.kill()
    c.wait_lost()
    m.start()
    c.go()
    assert (m.point / "refused" / "second").read_bytes() == b"2"
    run("chattr", "-i", refusing)
    m.cli("publish", m.point / "refused" / "second")
    wait_for(lambda: (refusing / "second").exists(), "the file that was skipped")
    for name in ("refused/first", "refused/second", "behind"):
        (m.point / name).unlink()
    (m.point / "refused").rmdir()
    c.finish()


def test_small_files_are_not_stuck_because_one_sent_with_them_is(new_mount: Callable[..., Mount]) -> None:
    m = new_mount()
    m.start(config=QUICK)
    (m.point / "shared").mkdir()
    (m.point / "shared").chmod(0o2775)
    (m.point / "shared" / "first").write_bytes(b"1")
    m.wait()
    assert (m.tier / "shared").stat().st_mode & 0o2000
    run("chattr", "+i", m.tier / "shared")  # setgid: hidden files lie beside their target, so sending fails
    (m.point / "before").write_bytes(b"0")
    (m.point / "shared" / "second").write_bytes(b"2")
    (m.point / "behind").write_bytes(b"3")
    wait_for(lambda: m.status()["stuck"], "a stuck entry")
    wait_for(lambda: (m.tier / "before").exists(), "what is before it")
    assert [x["path"] for x in m.status()["stuck"]] == ["shared/second"]
    m.cli("skip", m.point / "shared" / "second")
    wait_for(lambda: (m.tier / "behind").exists(), "what is behind", 5)


def on_image(disk: Path, where: Path, size: int) -> None:
    """An ext4 of its own at `where`."""
    image = disk / "tier.img"
    with open(image, "wb") as f:
        f.truncate(size)
    run("mkfs.ext4", "-q", "-m", "0", image)
    run("mount", "-o", "loop", image, where)
    (where / "lost+found").rmdir()


@contextlib.contextmanager
def frozen(path: Path) -> Iterator[None]:
    """Writing there hangs in the kernel meanwhile, as on a hard NFS mount without its server."""
    run("fsfreeze", "-f", path)
    try:
        yield
    finally:
        run("fsfreeze", "-u", path)


def test_tier_that_hangs(new_mount: Callable[..., Mount], disk: Path) -> None:
    m = new_mount()
    on_image(disk, m.tier, 100 << 20)
    m.start(config=QUICK)
    (m.point / "run").mkdir()
    (m.point / "run" / "old").write_bytes(b"old")
    m.wait()
    with frozen(m.tier):
        for i in range(20):
            (m.point / "run" / f"f{i}").write_bytes(make("f", i, 100_000))
            with open(m.point / "run" / f"f{i}", "r+b") as f:
                f.write(make("f", 100 + i, 100_000))  # what may be on its way must be cloned first
            assert len(os.listdir(m.point / "run")) == i + 2
            assert (m.point / "run" / "old").read_bytes() == b"old"
            time.sleep(0.05)
        assert m.status()["pending"]["files"] >= 20
        wait_for(lambda: "no answer" in (m.status()["tier"]["error"] or ""), "status to notice", 30)
    m.wait()
    assert [judge_file(m.tier / "run" / f"f{i}") for i in range(20)] == list(range(100, 120))
    m.umount()


@pytest.mark.long
def test_mount_on_a_tier_that_hangs(new_mount: Callable[..., Mount], disk: Path) -> None:
    m = new_mount()
    on_image(disk, m.tier, 100 << 20)
    m.start(config=QUICK)
    (m.point / "old").write_bytes(b"old")
    m.wait()
    m.umount()
    with frozen(m.tier):
        refused = m.start(config=QUICK, check=False)
        assert refused.returncode == 8
        assert "no answer within" in refused.stderr
    wait_for(lambda: not processes_of(m.base), "the workers that hung in the tier to end")
    with frozen(m.tier):
        m.start("--allow-tier-down", config=QUICK)
        (m.point / "new").write_bytes(b"new")
        assert "new" in os.listdir(m.point)
        assert "no answer" in down(m)
    wait_for(lambda: m.status()["tier"]["state"] == "up", "status to say that the tier is up")
    wait_for(lambda: sorted(os.listdir(m.point)) == ["new", "old"], "what is on the tier")
    m.wait()
    with frozen(m.tier):
        (m.point / "hangs").write_bytes(b"x" * 5_000_000)
        wait_for(lambda: m.status()["files"], "the upload")
        m.kill()
    m.start()
    assert (m.point / "hangs").read_bytes() == b"x" * 5_000_000
    m.wait()
    m.umount()


@pytest.mark.parametrize("what", [pytest.param("new mount", marks=pytest.mark.long), "after a crash"])
def test_mount_with_the_tier_down(
    what: str, campaign: Callable[..., Campaign], new_mount: Callable[..., Mount]
) -> None:
    m = new_mount()
    (m.tier / "theirs").mkdir()
    (m.tier / "theirs" / "old").write_bytes(b"old")
    if what != "new mount":
        m.start(config=QUICK)
        (m.point / "staged").write_bytes(b"x" * 1000)
        m.kill(workers=True)
    away = m.tier.with_name("away")
    os.rename(m.tier, away)
    refused = m.start(config=QUICK, check=False)
    assert refused.returncode == 8
    assert "--allow-tier-down" in refused.stderr
    started = time.monotonic()
    m.start("--allow-tier-down", config=QUICK)
    assert time.monotonic() - started < 10
    assert "cannot be opened" in down(m)
    c = campaign(10, m, runs=1, big=SMALL)
    c.start()
    work_goes_on(c, 40)
    assert "theirs" not in os.listdir(m.point)
    m.kill(workers=True)  # and once more
    c.wait_lost()
    m.start("--allow-tier-down", config=QUICK)
    c.verify_mount()
    c.go()
    work_goes_on(c, 10)
    os.rename(away, m.tier)
    wait_for(lambda: m.status()["tier"]["state"] == "up", "status to say that the tier is up")
    wait_for(lambda: "theirs" in os.listdir(m.point), "what is on the tier")
    assert (m.point / "theirs" / "old").read_bytes() == b"old"
    (m.point / "theirs" / "old").unlink()
    (m.point / "theirs").rmdir()
    if what != "new mount":
        assert (m.point / "staged").read_bytes() == b"x" * 1000
        (m.point / "staged").unlink()
    c.finish()
