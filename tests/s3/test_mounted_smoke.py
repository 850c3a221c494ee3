"""What trainers do, on a mount of an object store: seen there by strangers, and by the next mount."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest

from tests.crash.content import make
from tests.mounted.harness import wait_for
from tests.s3.mounts import S3Mount
from tests.s3.proxy import Proxy
from tests.s3.stranger import Bucket, is_link

MIB = 1 << 20


@pytest.fixture
def mount(new_mount: Callable[..., S3Mount]) -> S3Mount:
    made = new_mount()
    made.start(config="settle_time = 0.1\nattr_timeout = 0.2\n")
    return made


def test_what_is_saved_is_there_for_strangers_and_for_the_next_mount(
    mount: S3Mount, place: Bucket, proxy: Proxy
) -> None:
    m = mount.point
    contents = {
        "run/small": b"small", "run/empty": b"", "run/inline": make("inline", 1, MIB),
        "run/part": make("part", 1, MIB + 1), "run/big": make("big", 1, 41 * MIB + 12345),
        "run/deep/er/f": b"deep", "run/odd \u00e4+&<%41>": b"odd",
    }  # fmt: skip
    (m / "run" / "deep" / "er").mkdir(parents=True)
    (m / "run" / "nothing").mkdir(mode=0o700)
    for name, data in contents.items():
        (m / name).write_bytes(data)
    (m / "run" / "latest").symlink_to("step_\udcff1")
    os.chmod(m / "run" / "small", 0o604)
    os.utime(m / "run" / "big", ns=(1_600_000_000_000_000_001, 1_500_000_000_123_456_789))
    mount.wait()

    assert {name: place.read(name) for name in contents} == contents
    assert place.read("run/latest") == b"step_\xff1"
    head = place.head("run/latest")
    assert head is not None
    assert is_link(head)
    names = {*contents, "run", "run/deep", "run/deep/er", "run/nothing", "run/latest"}
    assert place.tree() == names
    assert [item.key for item in place.listed() if item.key.endswith("/")] == ["run/nothing/"]
    assert place.uploads() == place.own("uploads") == place.own("moves") == place.own("conflicts") == []
    assert proxy.counts["UploadPart"] >= 4

    before = {name: os.lstat(m / name) for name in names}
    mount.umount()
    mount.start()
    assert {str(p.relative_to(m)) for p in m.rglob("*")} == names
    for name, st in before.items():
        now = os.lstat(m / name)
        assert (now.st_mode, now.st_uid, now.st_gid) == (st.st_mode, st.st_uid, st.st_gid), name
        if not stat.S_ISDIR(st.st_mode):
            assert (now.st_size, now.st_mtime_ns) == (st.st_size, st.st_mtime_ns), name
    assert {name: (m / name).read_bytes() for name in contents} == contents
    assert os.readlink(m / "run" / "latest") == "step_\udcff1"
    mount.umount()


def test_rotation_and_renames(mount: S3Mount, place: Bucket) -> None:
    m = mount.point
    for step in range(6):
        tmp = m / f"tmp-checkpoint-{step}"
        tmp.mkdir()
        with open(tmp / "model.safetensors.incomplete", "wb") as f:
            f.write(make("m", step, 2 * MIB))
            os.rename(tmp / "model.safetensors.incomplete", tmp / "model.safetensors")
        (tmp / "trainer_state.json").write_bytes(b"{}")
        tmp.rename(m / f"checkpoint-{step}")
        (m / "last.tmp").write_bytes(make("last", step, 3 * MIB))
        (m / "last.tmp").rename(m / "last.ckpt")
        (m / "latest.new").symlink_to(f"checkpoint-{step}")
        (m / "latest.new").rename(m / "latest")
        if step in (2, 4):
            mount.wait()  # so that renames meet what is on the tier already
        if step >= 2:
            old = m / f"checkpoint-{step - 2}"
            for name in os.listdir(old):
                (old / name).unlink()
            old.rmdir()
    mount.wait()
    kept = {
        f"checkpoint-{step}/{name}" for step in (4, 5) for name in ("model.safetensors", "trainer_state.json")
    }
    assert place.tree() == {*kept, "checkpoint-4", "checkpoint-5", "last.ckpt", "latest"}
    assert place.read("latest") == b"checkpoint-5"
    assert place.read("last.ckpt") == make("last", 5, 3 * MIB)
    assert place.read("checkpoint-4/model.safetensors") == make("m", 4, 2 * MIB)

    (m / "archive").mkdir()
    (m / "checkpoint-4").rename(m / "archive" / "best")
    (m / "last.ckpt").rename(m / "archive" / "last.ckpt")
    mount.wait()
    assert place.read("archive/best/model.safetensors") == make("m", 4, 2 * MIB)
    assert "checkpoint-4" not in place.tree()
    assert place.conflicts() == place.uploads() == place.own("moves") == []
    mount.umount()


def test_a_directory_that_is_emptied_stays(mount: S3Mount, place: Bucket) -> None:
    m = mount.point
    (m / "d").mkdir(mode=0o750)
    (m / "d" / "f").write_bytes(b"data")
    mount.wait()
    (m / "d" / "f").unlink()
    mount.wait()
    assert [item.key for item in place.listed() if not item.key.startswith(".ckptfs")] == ["d/"]
    mount.umount()
    mount.start()
    assert os.listdir(m / "d") == []
    assert stat.S_IMODE((m / "d").stat().st_mode) == 0o750
    (m / "d").rmdir()
    mount.wait()
    assert place.tree() == set()
    (m / "d").write_bytes(b"a file now")
    mount.wait()
    assert place.read("d") == b"a file now"
    mount.umount()


def test_what_a_stranger_put_there(mount: S3Mount, place: Bucket, proxy: Proxy) -> None:
    m = mount.point
    place.write("theirs/f", b"data")
    place.write("theirs/sub/g", b"x" * (6 * MIB))
    wait_for((m / "theirs" / "sub" / "g").exists, "what a stranger wrote")
    assert (m / "theirs" / "f").read_bytes() == b"data"
    assert (m / "theirs" / "sub" / "g").read_bytes() == b"x" * (6 * MIB)
    (m / "theirs" / "f").write_bytes(b"ours")
    mount.wait()
    assert place.read("theirs/f") == b"ours"
    assert place.conflicts() == []
    # Between our look at it and our publishing:
    for name, data in (("f", b"ours again"), ("big", make("big", 1, 2 * MIB))):
        proxy.faults.add(
            operation="PutObject|UploadPart", key=f"theirs/{name}", times=1,
            before=lambda _, name=name: place.write(f"theirs/{name}", b"their " + name.encode()),
        )  # fmt: skip
        (m / "theirs" / name).write_bytes(data)
        mount.wait()
        assert place.read(f"theirs/{name}") == data
    assert sorted(place.conflicts()) == [b"their big", b"their f"]
    mount.umount()


def test_many_small_files(mount: S3Mount, place: Bucket, proxy: Proxy) -> None:
    m = mount.point
    (m / "d").mkdir()
    for n in range(300):
        (m / "d" / f"f{n}").write_bytes(b"%d" % n)
    mount.wait()
    assert {item.key: place.read(item.key) for item in place.listed("d/")} == {
        f"d/f{n}": b"%d" % n for n in range(300)
    }
    # One request each, and few besides: publishing them is serial.
    assert proxy.counts["PutObject"] < 300 + 30
    assert proxy.counts["HeadObject"] < 60
    assert proxy.counts["CreateMultipartUpload"] < 10
    mount.umount()
