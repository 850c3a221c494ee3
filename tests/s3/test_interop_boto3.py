"""Plain boto3 reads what ckptfs has written, and ckptfs shows what plain boto3 has."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

import boto3
import pytest

from tests.mounted.harness import wait_for
from tests.s3.interop import FILES, GID, LARGE, MIB, MODE, NEEDS_FUSE, UID, S3Mount, Tree
from tests.s3.servers import KEY, REGION, SECRET, Server

pytestmark = NEEDS_FUSE


def plain(server: Server) -> object:
    """A client as anybody makes it: with the checksums and retries that boto3 has by default."""
    return boto3.client(
        "s3", endpoint_url=server.endpoint, region_name=REGION,
        aws_access_key_id=KEY, aws_secret_access_key=SECRET,
    )  # fmt: skip


def test_objects_are_the_files(tree: Tree, tmp_path: Path) -> None:
    place = tree.place
    client = plain(tree.mount.server)
    for name, data in tree.content.items():
        path = tmp_path / "download"
        client.download_file(place.bucket, place.key(name.encode()), str(path))  # type: ignore[attr-defined]
        assert path.read_bytes() == data, name


def test_nothing_is_there_but_files_links_and_empty_directories(tree: Tree) -> None:
    names = {*tree.place.keys(b"run"), *tree.place.keys(b"hollow")}
    assert names == {*FILES, "run/latest", "hollow/"}
    assert tree.place.uploads() == []


def test_metadata_says_what_the_file_is(tree: Tree) -> None:
    place = tree.place
    for name in (LARGE, "run/config.json"):
        head = place.client.head_object(Bucket=place.bucket, Key=place.key(name.encode()))
        metadata = head["Metadata"]
        assert int(metadata["mode"]) == stat.S_IFREG | MODE
        assert (int(metadata["uid"]), int(metadata["gid"])) == (UID, GID)
        assert metadata["mtime"] == "1700000000.123456789"
    assert place.read(b"run/latest") == b"config.json"
    link = place.client.head_object(Bucket=place.bucket, Key=place.key(b"run/latest"))["Metadata"]
    assert stat.S_ISLNK(int(link["mode"]))


def test_objects_of_others_are_files(tree: Tree) -> None:
    mount, place = tree.mount, tree.place
    large = os.urandom(9 * MIB)
    made = {
        "theirs/a.bin": b"theirs",
        "theirs/zwei wörter & +plus%41.txt": b"odd",
        "theirs/empty": b"",
        "theirs/deep/er/b.bin": b"deep",
    }
    before = time.time()
    for name, data in made.items():
        place.write(name.encode(), data)
    from boto3.s3.transfer import TransferConfig

    parts = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    path = mount.base / "large"
    path.write_bytes(large)
    plain(mount.server).upload_file(  # type: ignore[attr-defined]
        str(path), place.bucket, place.key(b"theirs/large.bin"), Config=parts
    )
    made["theirs/large.bin"] = large
    for name, data in made.items():
        found = mount.shows(name)
        assert stat.S_IMODE(found.st_mode) == 0o644
        assert stat.S_ISREG(found.st_mode)
        assert found.st_uid == os.geteuid()
        assert found.st_size == len(data)
        assert before - 2 <= found.st_mtime <= time.time() + 2
        assert (mount.point / name).read_bytes() == data
    assert sorted(os.listdir(mount.point / "theirs")) == sorted({name.split("/")[1] for name in made})
    assert (mount.point / "theirs/deep").is_dir()


def test_objects_of_others_change_and_go(tree: Tree) -> None:
    mount, place = tree.mount, tree.place
    place.write(b"theirs/changes", b"one")
    mount.shows("theirs/changes")
    assert (mount.point / "theirs/changes").read_bytes() == b"one"
    place.write(b"theirs/changes", b"the second")
    wait_for(lambda: (mount.point / "theirs/changes").read_bytes() == b"the second", "the second content", 10)
    place.remove(b"theirs/changes")
    wait_for(lambda: not (mount.point / "theirs/changes").exists(), "its end", 10)


def test_what_was_there_before_the_mount_can_be_renamed_and_removed(tree: Tree) -> None:
    mount, place = tree.mount, tree.place
    place.write(b"theirs/old/a", b"a")
    place.write(b"theirs/old/b", b"b")
    mount.shows("theirs/old/a")
    os.rename(mount.point / "theirs/old", mount.point / "theirs/new")
    os.unlink(mount.point / "theirs/new/b")
    mount.wait()
    wait_for(lambda: place.keys(b"theirs/new/") == ["theirs/new/a"], "the removal", 10)
    assert place.keys(b"theirs/old/") == []
    assert place.read(b"theirs/new/a") == b"a"


def test_names_that_no_key_can_have_are_refused_at_once(tree: Tree) -> None:
    top = tree.mount.point
    for name, code in ((b"tab\x01", errno.EILSEQ), (b"latin\xe9", errno.EILSEQ)):
        with pytest.raises(OSError) as info:  # noqa: PT011
            (open(os.path.join(os.fsencode(top), name), "wb")).close()
        assert info.value.errno in (code, errno.EINVAL)
    deep = "/".join(["d" * 200] * 4)
    os.makedirs(top / deep)
    with pytest.raises(OSError) as info:  # noqa: PT011
        (top / deep / ("x" * 250)).write_bytes(b"")
    assert info.value.errno == errno.ENAMETOOLONG
    os.removedirs(top / deep)


def test_an_object_beside_a_directory_of_its_name(
    moto: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The directory is shown. (SeaweedFS cannot have both.)"""
    mount = S3Mount(tmp_path_factory.mktemp("beside"), moto, "interop-moto", "beside")
    try:
        mount.bucket.write(b"q", b"the object")
        mount.bucket.write(b"q/r", b"inside")
        mount.start()
        assert os.listdir(mount.point) == ["q"]
        assert (mount.point / "q/r").read_bytes() == b"inside"
        mount.umount()
        assert mount.bucket.read(b"q") == b"the object"
    finally:
        mount.cleanup()
