"""Owners, modes, times and xattrs: in the mount, on the tier, and after a remount."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from tests.mounted.harness import Mount, wait_for
from tests.mounted.oracle import outcome, run_as

NS = 1_600_000_000_123_456_789


def attributes(top: Path) -> dict[str, Any]:
    found = {}
    for p in [top, *sorted(top.rglob("*"))]:
        st = p.lstat()
        found[str(p.relative_to(top))] = (
            oct(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns,
            st.st_size if not stat.S_ISDIR(st.st_mode) else 0,
        )  # fmt: skip
    return found


def make_tree(top: Path) -> None:
    (top / "sub" / "deep").mkdir(parents=True)
    for i, name in enumerate(("a", "sub/b", "sub/deep/c")):
        (top / name).write_bytes(b"x" * i)
        os.chown(top / name, 1000 + i, 2000 + i)
        os.chmod(top / name, 0o600 + i)
        os.utime(top / name, ns=(NS + i, NS + i + 10))
    os.symlink("a", top / "l")
    os.lchown(top / "l", 77, 78)
    os.utime(top / "l", ns=(NS, NS + 5), follow_symlinks=False)
    os.chown(top / "sub", 1001, 1002)
    os.chmod(top / "sub", 0o2770)
    for i, name in enumerate(("sub/deep", "sub", ".")):
        os.utime(top / name, ns=(NS + 100 + i, NS + 200 + i))


def test_attributes_are_on_the_tier_and_survive_a_remount(mount: Mount) -> None:
    top = mount.point / "t"
    top.mkdir()
    make_tree(top)
    before = attributes(top)
    mount.wait()
    assert attributes(mount.tier / "t") == before
    mount.umount()
    assert attributes(mount.tier / "t") == before
    mount.start()
    assert attributes(top) == before
    assert [(top / n).stat().st_atime_ns for n in ("a", "sub/b")] == [NS, NS + 1]


def test_attributes_changed_after_publishing_follow(mount: Mount) -> None:
    top = mount.point / "t"
    top.mkdir()
    (top / "f").write_bytes(b"f")
    (top / "d").mkdir()
    mount.wait()
    os.chmod(top / "f", 0o640)
    os.chown(top / "f", 5, 6)
    os.utime(top / "f", ns=(NS, NS + 1))
    os.chmod(top / "d", 0o700)
    os.utime(top / "d", ns=(NS, NS + 2))
    os.chown(top / "d", 7, 8)
    before = attributes(top)
    mount.wait()
    assert attributes(mount.tier / "t") == before
    mount.kill()
    mount.start()
    assert attributes(top) == before
    assert (top / "f").read_bytes() == b"f"


def test_directory_times_survive_what_publishing_does_to_them(mount: Mount) -> None:
    """HF Trainer sorts checkpoint directories by mtime: those of the mount must be on the tier."""
    for step in range(3):
        d = mount.point / f"checkpoint-{step}"
        d.mkdir()
        (d / "model").write_bytes(b"m" * 2_000_000)
        (d / "old").write_bytes(b"o")
    mount.wait()
    os.unlink(mount.point / "checkpoint-0" / "old")
    os.rename(mount.point / "checkpoint-1" / "old", mount.point / "checkpoint-1" / "new")
    before = attributes(mount.point)
    mount.wait()
    assert {k: v for k, v in attributes(mount.tier).items() if k != "." and ".ckptfs" not in k} == {
        k: v for k, v in before.items() if k != "."
    }
    mount.umount()
    mount.start()
    assert attributes(mount.point) == before


def test_another_user(shared: Mount) -> None:
    """allow_other with default_permissions: the kernel checks, files belong to who made them."""
    d = shared.point / "user"
    d.mkdir()
    os.chown(d, 1000, 1000)
    (d / "roots").write_bytes(b"r")
    os.chmod(d / "roots", 0o600)

    def write() -> Any:
        (d / "mine").write_bytes(b"mine")
        (d / "dir").mkdir()
        os.symlink("mine", d / "link")
        os.chmod(d / "mine", 0o604)
        return [
            outcome((d / "roots").read_bytes), outcome(os.chmod, d / "roots", 0o666),
            outcome(os.chown, d / "mine", 0, 0), outcome(os.utime, d / "roots", (1, 1)),
            outcome(os.mkdir, shared.point / "no"), (d / "mine").read_bytes(),
            outcome(os.setxattr, d / "roots", "user.x", b"1"),
        ]  # fmt: skip

    assert run_as(1000, 1000, write) == repr(
        ["EACCES", "EPERM", "EPERM", "EPERM", "EACCES", b"mine", "EACCES"]
    )
    for top in (shared.point, shared.tier):
        shared.wait()
        for name in ("mine", "dir", "link"):
            st = (top / "user" / name).lstat()
            assert (st.st_uid, st.st_gid) == (1000, 1000), (top, name)
        assert stat.S_IMODE((top / "user" / "mine").stat().st_mode) == 0o604
    d2 = shared.point / "sticky"
    d2.mkdir()
    os.chmod(d2, 0o1777)
    (d2 / "f").write_bytes(b"f")
    assert run_as(1000, 1000, lambda: outcome(os.unlink, d2 / "f")) == repr("EPERM")
    os.chmod(d2 / "f", 0o4777)
    assert run_as(1000, 1000, lambda: (d2 / "f").write_bytes(b"x")) == "1"
    assert not (d2 / "f").stat().st_mode & stat.S_ISUID


def test_user_xattrs_live_as_long_as_the_staging_remembers_them(mount: Mount) -> None:
    f, d = mount.point / "f", mount.point / "d"
    f.write_bytes(b"f")
    d.mkdir()
    for p in (f, d, mount.point):
        os.setxattr(p, "user.note", b"\x00\xffvalue")
        os.setxattr(p, "user.empty", b"")
        assert sorted(os.listxattr(p)) == ["user.empty", "user.note"]
    assert outcome(os.getxattr, f, "user.none") == "ENODATA"
    assert outcome(os.removexattr, f, "user.none") == "ENODATA"
    assert outcome(os.setxattr, f, "trusted.x", b"") == "ENOTSUP"
    assert outcome(os.setxattr, f, "user.ckptfs.state", b"durable") == "EPERM"
    assert outcome(os.setxattr, f, "user.big", b"x" * 65_000) in (None, "ENOSPC")
    os.removexattr(f, "user.empty")
    mount.wait()
    os.rename(f, mount.point / "g")
    mount.wait()
    assert os.getxattr(mount.point / "g", "user.note") == b"\x00\xffvalue"
    mount.kill()
    mount.start()
    assert os.getxattr(mount.point / "g", "user.note") == b"\x00\xffvalue"
    assert os.getxattr(d, "user.note") == b"\x00\xffvalue"
    assert "user.empty" not in os.listxattr(mount.point / "g")


def test_state_attribute_follows_a_file_and_its_directory(new_mount: Any) -> None:
    mount = new_mount()
    mount.start(config="settle_time = 3600\n")
    d = mount.point / "d"
    d.mkdir()
    mount.wait(d)
    assert mount.state("d") == "durable"
    with open(d / "f", "wb", buffering=0) as f:
        f.write(b"x" * 3_000_000)
        assert (mount.state("d/f"), mount.state("d"), mount.state(".")) == ("dirty", "dirty", "dirty")
    assert (mount.state("d/f"), mount.state("d")) == ("dirty", "dirty")
    mount.wait(d / "f")
    assert (mount.state("d/f"), mount.state("d"), mount.state(".")) == ("durable", "durable", "durable")
    with open(d / "f", "ab", buffering=0) as f:
        assert mount.state("d/f") == "durable"
        f.write(b"y")
        assert mount.state("d/f") == "dirty"
    # The tier can't publish for a while: what is sent and not visible is "flushing".
    aside = mount.tier.with_name("aside")
    mount.tier.rename(aside)
    wait_for(lambda: mount.status()["tier"]["state"] == "down" or mount.ask("wait", timeout_s=0.1), "down")
    aside.rename(mount.tier)
    mount.wait()
    assert mount.state("d/f") == "durable"


def test_what_the_tier_does_not_keep(mount: Mount) -> None:
    """User xattrs, ctime and inode numbers end with a drained unmount."""
    f = mount.point / "f"
    f.write_bytes(b"f")
    os.setxattr(f, "user.note", b"note")
    os.utime(f, ns=(NS, NS))
    mount.wait()
    assert [n for n in os.listxattr(mount.tier / "f") if n != "user.ckptfs"] == []
    assert f.stat().st_ctime_ns != NS
    mount.umount()
    mount.start()
    assert os.listxattr(f) == []
    assert f.stat().st_ctime_ns == f.stat().st_mtime_ns == NS


def test_the_root_is_a_directory_like_any_other(mount: Mount) -> None:
    os.chmod(mount.point, 0o1777)
    os.chown(mount.point, 1000, 1001)
    (mount.point / "f").write_bytes(b"f")
    os.utime(mount.point, ns=(NS, NS + 1))
    before = attributes(mount.point)["."]
    mount.kill()
    mount.start()
    assert attributes(mount.point)["."] == before
    mount.umount()
    assert attributes(mount.tier)["."] == before
    mount.start()
    assert attributes(mount.point)["."] == before
    assert run_as(1234, 1234, (mount.point / "g").touch) == "None"


def test_a_setgid_bit_given_or_taken_later_is_on_the_tier_as_in_the_mount(mount: Mount) -> None:
    top = mount.point / "t"
    (top / "sub" / "deep").mkdir(parents=True)
    os.chmod(top / "sub", 0o2770)  # before any of it is published
    (top / "sub" / "deep" / "f").write_bytes(b"f")
    mount.wait()
    assert attributes(mount.tier / "t") == attributes(top)
    (top / "sub" / "inherits").mkdir()
    mount.wait()
    os.chmod(top / "sub" / "inherits", 0o755)
    mount.wait()
    assert stat.S_IMODE((mount.tier / "t" / "sub" / "inherits").stat().st_mode) == 0o755
    os.chmod(top / "sub", 0o770)
    mount.wait()
    assert attributes(mount.tier / "t") == attributes(top)
