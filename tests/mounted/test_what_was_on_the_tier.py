"""What was on the tier before the mount, and what others do to it meanwhile (W1-W4)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import Mount, wait_for
from tests.mounted.oracle import outcome

MIB = 1 << 20
NewMount = Callable[..., Mount]


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes in which every offset shows."""
    block = b"".join((i * 2654435761 * seed & 0xFFFFFFFF).to_bytes(4, "little") for i in range(1 << 16))
    return b"".join(
        (n.to_bytes(8, "little") + block[8:]) for n in range(-(-size // len(block)))
    )[:size]  # fmt: skip


@pytest.fixture
def old(new_mount: NewMount) -> Mount:
    """A started mount over a tier that had files."""
    mount = new_mount()
    (mount.tier / "run" / "step1").mkdir(parents=True)
    (mount.tier / "run" / "step1" / "model").write_bytes(pattern(40 * MIB + 12345))
    (mount.tier / "run" / "step1" / "small").write_bytes(b"small")
    (mount.tier / "run" / "empty").write_bytes(b"")
    os.symlink("step1", mount.tier / "run" / "latest")
    mount.start()
    return mount


def test_listed_and_read(old: Mount) -> None:
    run = old.point / "run"
    assert sorted(os.listdir(run)) == ["empty", "latest", "step1"]
    assert (run / "latest" / "small").read_bytes() == b"small"
    assert (run / "empty").read_bytes() == b""
    wanted = pattern(40 * MIB + 12345)
    assert (run / "step1" / "model").read_bytes() == wanted
    with open(run / "step1" / "model", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        assert m[17 * MIB : 17 * MIB + 100] == wanted[17 * MIB : 17 * MIB + 100]
        f.seek(-5, os.SEEK_END)
        assert f.read() == wanted[-5:]
    assert old.status()["cache"]["clean_bytes"] >= 40 * MIB
    assert old.state("run/step1/model") == "durable"


def test_renamed_deleted_rewritten(old: Mount) -> None:
    run = old.point / "run"
    os.rename(run / "step1" / "small", run / "step1" / "renamed")
    os.unlink(run / "empty")
    (run / "step1" / "model").write_bytes(b"rewritten")
    os.unlink(run / "latest")
    os.symlink("step2", run / "latest")
    old.wait()
    assert old.tier_names() == {"run", "run/step1", "run/step1/renamed", "run/step1/model", "run/latest"}
    assert (old.tier / "run" / "step1" / "model").read_bytes() == b"rewritten"
    os.rename(run / "step1", run / "step2")
    assert (run / "latest" / "renamed").read_bytes() == b"small"
    old.wait()
    assert (old.tier / "run" / "latest" / "renamed").read_bytes() == b"small"
    for name in os.listdir(run / "step2"):
        os.unlink(run / "step2" / name)
    os.rmdir(run / "step2")
    os.unlink(run / "latest")
    os.rmdir(run)
    old.wait()
    assert old.tier_names() == set()
    assert old.status()["conflicts"] == 0


def test_partly_written_truncated_and_appended(old: Mount) -> None:
    model = old.point / "run" / "step1" / "model"
    wanted = bytearray(pattern(40 * MIB + 12345))
    fd = os.open(model, os.O_RDWR)
    os.pwrite(fd, b"in the middle", 20 * MIB - 5)
    os.close(fd)
    wanted[20 * MIB - 5 : 20 * MIB + 8] = b"in the middle"
    old.wait()
    assert (old.tier / "run" / "step1" / "model").read_bytes() == wanted
    assert model.read_bytes() == wanted
    old.umount()
    old.start()
    with open(model, "ab") as f:
        f.write(b"appended")
    wanted += b"appended"
    assert model.read_bytes() == wanted
    old.wait()
    assert (old.tier / "run" / "step1" / "model").read_bytes() == wanted
    old.umount()
    old.start()
    os.truncate(model, 18 * MIB)
    assert model.read_bytes() == wanted[: 18 * MIB]
    old.wait()
    assert (old.tier / "run" / "step1" / "model").read_bytes() == wanted[: 18 * MIB]


def test_a_file_larger_than_the_cache_is_read(new_mount: NewMount) -> None:
    mount = new_mount()
    wanted = pattern(96 * MIB)
    (mount.tier / "big").write_bytes(wanted)
    (mount.tier / "other").write_bytes(wanted[: 30 * MIB])
    mount.start("--cache-size", "64MiB")
    for _ in range(2):
        with open(mount.point / "big", "rb") as f:
            for at in range(0, len(wanted), 8 * MIB):
                assert f.read(8 * MIB) == wanted[at : at + 8 * MIB], at
        assert (mount.point / "other").read_bytes() == wanted[: 30 * MIB]
        assert mount.status()["cache"]["used_bytes"] <= 64 * MIB
    with open(mount.point / "big", "rb") as f:
        for at in (90 * MIB, 3, 50 * MIB + 7, 33 * MIB, 12 * MIB):
            assert os.pread(f.fileno(), 3 * MIB, at) == wanted[at : at + 3 * MIB]
    # A partial write of a file larger than the cache works through the spill.
    fd = os.open(mount.point / "big", os.O_RDWR)
    os.pwrite(fd, b"patched", 70 * MIB)
    os.close(fd)
    mount.wait()
    found = (mount.tier / "big").read_bytes()
    assert found == wanted[: 70 * MIB] + b"patched" + wanted[70 * MIB + 7 :]


def test_corrupt_bytes_on_the_tier_are_an_error_never_data(mount: Mount) -> None:
    wanted = pattern(20 * MIB)
    (mount.point / "f").write_bytes(wanted)
    mount.umount()
    tier_file = mount.tier / "f"
    st = tier_file.stat()
    with open(tier_file, "r+b") as f:
        f.seek(5 * MIB)
        f.write(b"\xee")
    os.utime(tier_file, ns=(st.st_atime_ns, st.st_mtime_ns))
    mount.start()
    assert outcome((mount.point / "f").read_bytes) == "EIO"
    assert "f: bytes 0..16777216 are not what was written" in mount.log()
    assert mount.status()["errors"] >= 1
    with open(mount.point / "f", "rb") as f:
        f.seek(17 * MIB)
        assert f.read(MIB) == wanted[17 * MIB : 18 * MIB]
    # Other operations on it are not in the way.
    os.rename(mount.point / "f", mount.point / "bad")
    (mount.point / "f").write_bytes(wanted)
    assert (mount.point / "f").read_bytes() == wanted


def test_others_additions_changes_and_removals_appear(old: Mount) -> None:
    run, tier = old.point / "run", old.tier / "run"
    assert sorted(os.listdir(run)) == ["empty", "latest", "step1"]
    assert (run / "empty").read_bytes() == b""
    (tier / "added").write_bytes(b"added")
    wait_for((run / "added").exists, "the addition", 2)
    assert (run / "added").read_bytes() == b"added"
    (tier / "added").write_bytes(b"changed, and longer")
    wait_for(lambda: (run / "added").read_bytes() == b"changed, and longer", "the change", 2)
    (tier / "other").write_bytes(b"renamed over")
    os.rename(tier / "other", tier / "added")
    wait_for(lambda: (run / "added").read_bytes() == b"renamed over", "the replacement", 2)
    os.unlink(tier / "added")
    wait_for(lambda: not (run / "added").exists(), "the removal", 2)
    (tier / "dir" / "sub").mkdir(parents=True)
    (tier / "dir" / "sub" / "f").write_bytes(b"deep")
    wait_for((run / "dir").exists, "the directory", 2)
    assert (run / "dir" / "sub" / "f").read_bytes() == b"deep"
    os.rename(tier / "dir", tier / "moved")
    wait_for(lambda: sorted(os.listdir(run)) == ["empty", "latest", "moved", "step1"], "the move", 2)
    assert (run / "moved" / "sub" / "f").read_bytes() == b"deep"
    os.unlink(tier / "latest")
    os.symlink("moved", tier / "latest")
    wait_for(lambda: os.readlink(run / "latest") == "moved", "the link", 2)


def test_an_open_file_that_another_writer_replaces_fails_with_estale(old: Mount) -> None:
    (old.tier / "part").write_bytes(pattern(24 * MIB))
    os.rename(old.tier / "part", old.tier / "run" / "big")
    wait_for((old.point / "run" / "big").exists, "the file", 2)
    with open(old.point / "run" / "big", "rb") as f:
        os.pread(f.fileno(), 100, 0)
        (old.tier / "part").write_bytes(pattern(24 * MIB, 3))
        os.rename(old.tier / "part", old.tier / "run" / "big")
        old.ask("status")
        far = outcome(os.pread, f.fileno(), 100, 23 * MIB)
        # Read-ahead may have fetched it before; else there is no way to the old bytes.
        assert far in ("ESTALE", pattern(24 * MIB)[23 * MIB : 23 * MIB + 100])
    wait_for(lambda: (old.point / "run" / "big").read_bytes() == pattern(24 * MIB, 3), "the new bytes", 3)


def conflicts(mount: Mount) -> list[bytes]:
    return sorted(p.read_bytes() for p in (mount.tier / ".ckptfs" / "conflicts").glob("*") if p.is_file())


def test_others_changes_of_what_we_replace_are_kept_aside(old: Mount) -> None:
    run = old.point / "run"
    assert (run / "empty").exists()
    assert (run / "step1" / "small").read_bytes() == b"small"
    (old.tier / "run" / "empty").write_bytes(b"theirs 1")
    (run / "empty").write_bytes(b"ours")  # before the mount looked again
    (old.tier / "run" / "step1" / "small").write_bytes(b"theirs 2")
    os.rename(run / "empty", run / "step1" / "small")
    old.wait()
    assert (old.tier / "run" / "step1" / "small").read_bytes() == b"ours"
    assert (run / "step1" / "small").read_bytes() == b"ours"
    assert set(conflicts(old)) <= {b"theirs 1", b"theirs 2"}
    assert b"theirs 2" in conflicts(old)
    assert old.status()["conflicts"] >= 1
    assert ".ckptfs" not in os.listdir(old.point)
    assert outcome(os.stat, old.point / ".ckptfs") == "ENOENT"


def test_a_directory_that_others_filled_comes_back(old: Mount) -> None:
    d = old.point / "shared"
    d.mkdir()
    (d / "ours").write_bytes(b"o")
    old.wait()
    assert os.listdir(d) == ["ours"]
    os.unlink(d / "ours")
    (old.tier / "shared" / "theirs").write_bytes(b"t")
    # rmdir looks at the tier before it judges the directory empty.
    assert outcome(os.rmdir, d) == "ENOTEMPTY"
    assert (d / "theirs").read_bytes() == b"t"


def test_names_on_the_tier_of_any_bytes_and_many(new_mount: NewMount) -> None:
    mount = new_mount()
    base = os.fsencode(mount.tier)
    for name in (b"\xff\xfe", b"n" * 255, b"new\nline"):
        with open(base + b"/" + name, "wb") as f:
            f.write(name)
    many = mount.tier / "many"
    many.mkdir()
    for i in range(3_000):
        (many / f"f{i:05}").write_bytes(b"%d" % i)
    os.mkfifo(mount.tier / "pipe")
    mount.start()
    point = os.fsencode(mount.point)
    assert sorted(os.listdir(point)) == sorted([b"\xff\xfe", b"n" * 255, b"new\nline", b"many"])
    with open(point + b"/\xff\xfe", "rb") as f:
        assert f.read() == b"\xff\xfe"
    assert len(os.listdir(mount.point / "many")) == 3_000
    assert (mount.point / "many" / "f02999").read_bytes() == b"2999"
    (many / "late").write_bytes(b"late")
    wait_for((mount.point / "many" / "late").exists, "an addition to a large directory", 2)
    # The reserved names of the tier are not reachable by any path.
    assert outcome(os.listdir, Path(os.fsdecode(point)) / ".ckptfs") == "ENOENT"


def test_an_open_file_that_we_replace_or_remove_stays_readable(old: Mount) -> None:
    """Also where its bytes are only on the tier: they are brought over before they go there."""
    wanted = pattern(40 * MIB + 12345)
    step = old.point / "run" / "step1"
    other = old.tier / "run" / "step1" / "other"
    (old.tier / "part").write_bytes(wanted)
    os.rename(old.tier / "part", other)
    wait_for((step / "other").exists, "the file", 2)
    with open(step / "model", "rb") as unlinked, open(step / "other", "rb") as replaced:
        with mmap.mmap(unlinked.fileno(), 0, prot=mmap.PROT_READ) as m:
            assert unlinked.read(10) == wanted[:10]
            os.unlink(step / "model")
            (step / "new").write_bytes(b"new")
            os.rename(step / "new", step / "other")
            old.wait(step)
            wait_for(lambda: not (old.tier / "run" / "step1" / "model").exists(), "the removal")
            assert (old.tier / "run" / "step1" / "other").read_bytes() == b"new"
            assert m[35 * MIB : 35 * MIB + 100] == wanted[35 * MIB : 35 * MIB + 100]
            assert m[: 40 * MIB] == wanted[: 40 * MIB]
        assert replaced.read() == wanted
        assert os.fstat(replaced.fileno()).st_nlink == 0
    old.wait()
    assert old.status()["conflicts"] == 0
