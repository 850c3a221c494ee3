"""A mount on an object store with a few files in it, for tests that look at it with other tools."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptfs import mountinfo
from tests.mounted.harness import Mount, wait_for
from tests.s3.s3_rig import Bucket
from tests.s3.servers import REGION, Server

MIB = 1 << 20
NEEDS_FUSE = pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="needs /dev/fuse and root"
)
WHEN_NS = 1_700_000_000_123_456_789
"""The mtime of all files of the tree."""
LARGE = "run/model.bin"
"""Three parts."""
FILES = {
    LARGE: 36 * MIB,
    "run/config.json": 300,
    "run/whole.bin": MIB,
    "run/empty": 0,
    "run/with space & +plus%41.txt": 20,
    "run/größe-模型.pt": 5000,
}
"""Sizes."""
MODE, UID, GID = 0o640, 1234, 4321
"""Of all files of the tree."""


class S3Mount(Mount):
    """A mount whose tier is a prefix of a bucket that nobody used before."""

    def __init__(self, base: Path, server: Server, bucket: str, prefix: str, name: str = "m") -> None:
        super().__init__(base, name)
        self.env |= server.env
        self.server = server
        self.bucket = Bucket(server.client(), server.bucket(bucket), prefix)
        self.url = f"s3://{bucket}/{prefix}"

    def start(self, *options: str, config: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """`ckptfs mount` that sees what others do at once."""
        path = self.base / "ckptfs.toml"
        path.write_text(f'attr_timeout = 0.05\nregion = "{REGION}"\n{config}')
        self.options = ["--cache-size", "256MiB", "--spill-dir", str(self.spill), "--config", str(path)]
        self.options += ["--endpoint-url", self.server.endpoint, *options]
        done = self.cli("mount", self.point, "--tier", self.url, *self.options, check=check)
        if done.returncode == 0:
            self.pid = int(self.status()["pid"])
        return done

    def shows(self, path: str) -> os.stat_result:
        """`lstat` of what others made, once it appears."""
        wait_for(lambda: os.path.lexists(self.point / path), f"{path} in the mount", 10)
        return (self.point / path).lstat()


@dataclass
class Tree:
    """What was written through the mount, all of it durable."""

    mount: S3Mount
    content: dict[str, bytes]

    @property
    def place(self) -> Bucket:
        """The prefix, as others see it."""
        return self.mount.bucket


def write_tree(mount: S3Mount) -> Tree:
    """Files with attributes, a link, directories, an empty one among them."""
    content = {name: random.Random(name).randbytes(size) for name, size in FILES.items()}
    top = mount.point
    (top / "run").mkdir()
    (top / "hollow").mkdir(mode=0o750)
    os.chmod(top / "hollow", 0o750)
    (top / "run" / "latest").symlink_to("config.json")
    for name, data in content.items():
        path = top / name
        path.write_bytes(data)
        os.chown(path, UID, GID)
        os.chmod(path, MODE)
        os.utime(path, ns=(WHEN_NS, WHEN_NS))
    mount.wait()
    return Tree(mount, content)


@contextlib.contextmanager
def tree_on(server: Server) -> Iterator[Tree]:
    """A started mount with the tree in it. It has to end drained, with nothing that went wrong."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir="/var/tmp"))
    base.chmod(0o755)
    mount = S3Mount(base, server, "interop", "deep/prefix")
    try:
        mount.start()
        yield write_tree(mount)
        status = mount.status()
        assert not status["errors"], json.dumps(status, indent=1) + mount.log()
        mount.umount()
        assert list(mount.run_dir.iterdir()) == []
    finally:
        mount.cleanup()
        shutil.rmtree(base, ignore_errors=True)


def same_attributes(found: os.stat_result, *, mode: int = MODE, uid: int = UID, gid: int = GID) -> bool:
    """Whether a file has the type, mode and owner that one of the tree has."""
    return (found.st_mode, found.st_uid, found.st_gid) == (stat.S_IFREG | mode, uid, gid)


def is_mounted(path: Path) -> bool:
    """Whether there is a mount exactly there."""
    return any(mount.path == str(path) for mount in mountinfo.read())
