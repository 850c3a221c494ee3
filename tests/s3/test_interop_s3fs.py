"""s3fs-fuse shows what ckptfs has written with its attributes, and ckptfs what s3fs has."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.harness import wait_for
from tests.s3.interop import (
    FILES,
    GID,
    MIB,
    NEEDS_FUSE,
    UID,
    WHEN_NS,
    Tree,
    is_mounted,
    same_attributes,
)  # fmt: skip
from tests.s3.servers import KEY, SECRET

S3FS = shutil.which("s3fs")
pytestmark = [
    pytest.mark.long,
    NEEDS_FUSE,
    pytest.mark.skipif(S3FS is None, reason="needs s3fs (Debian: s3fs)"),
]


@contextlib.contextmanager
def s3fs_mounted(tree: Tree) -> Iterator[Path]:
    """The prefix, mounted by s3fs."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-s3fs-", dir="/var/tmp"))
    point = base / "mnt"
    point.mkdir()
    secret = base / "secret"
    secret.write_text(f"{KEY}:{SECRET}\n")
    secret.chmod(0o600)
    # In the foreground: it is ended by its process id.
    process = subprocess.Popen(
        [
            str(S3FS), f"{tree.place.bucket}:/{tree.place.prefix}", str(point), "-f",
            "-o", f"url={tree.mount.server.endpoint},use_path_request_style,passwd_file={secret}",
            "-o", "stat_cache_expire=1,multipart_size=10,parallel_count=2",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: is_mounted(point) or process.poll() is not None, "s3fs", 20)
        assert process.poll() is None, "s3fs ended"
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def s3fs(tree: Tree) -> Iterator[Path]:
    with s3fs_mounted(tree) as point:
        yield point


def test_s3fs_shows_files_with_their_attributes(tree: Tree, s3fs: Path) -> None:
    for name, data in tree.content.items():
        found = (s3fs / name).lstat()
        assert same_attributes(found), name
        assert (found.st_size, found.st_mtime_ns) == (FILES[name], WHEN_NS), name
        assert (s3fs / name).read_bytes() == data, name


def test_s3fs_follows_links_and_sees_directories(s3fs: Path) -> None:
    assert os.readlink(s3fs / "run/latest") == "config.json"
    assert (s3fs / "run/latest").read_bytes() == (s3fs / "run/config.json").read_bytes()
    assert (s3fs / "run").is_dir()
    assert (s3fs / "hollow").is_dir()
    assert os.listdir(s3fs / "hollow") == []
    names = {os.fsencode(name) for name in os.listdir(s3fs / "run")}
    assert names == {os.fsencode(name[4:]) for name in [*FILES, "run/latest"]}


def test_files_of_s3fs_are_in_the_mount_with_their_attributes(tree: Tree, s3fs: Path) -> None:
    theirs = s3fs / "from s3fs"
    theirs.mkdir(mode=0o751)
    made = {"small": b"small", "with space é": b"odd", "large": os.urandom(25 * MIB), "empty": b""}
    for name, data in made.items():
        (theirs / name).write_bytes(data)
        os.chmod(theirs / name, 0o604)
        os.chown(theirs / name, UID, GID)
        os.utime(theirs / name, ns=(WHEN_NS, WHEN_NS))
    (theirs / "link").symlink_to("small")
    (theirs / "hollow").mkdir(mode=0o711)
    top = tree.mount.point
    for name, data in made.items():
        wanted = (stat.S_IFREG | 0o604, UID, GID, len(data), WHEN_NS)

        def look(name: str = name) -> tuple[int, ...]:
            found = tree.mount.shows(f"from s3fs/{name}")
            return found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns

        wait_for(lambda: look() == wanted, f"{name} as {wanted}, not {look()}", 10)  # noqa: B023
        assert (top / "from s3fs" / name).read_bytes() == data
    assert os.readlink(top / "from s3fs/link") == "small"
    assert stat.S_IMODE(tree.mount.shows("from s3fs/hollow").st_mode) in (0o711, 0o755)
    assert sorted(os.listdir(top / "from s3fs")) == sorted([*made, "link", "hollow"])


def test_a_directory_of_s3fs_is_used_and_removed(tree: Tree, s3fs: Path) -> None:
    top = tree.mount.point
    (s3fs / "shared").mkdir()
    tree.mount.shows("shared")
    (top / "shared/ours").write_bytes(b"ours")
    tree.mount.wait()
    wait_for(lambda: (s3fs / "shared/ours").exists(), "it in s3fs", 10)
    assert (s3fs / "shared/ours").read_bytes() == b"ours"
    (top / "shared/ours").unlink()
    (top / "shared").rmdir()
    tree.mount.wait()
    wait_for(lambda: tree.place.keys(b"shared") == [], "its end", 10)
