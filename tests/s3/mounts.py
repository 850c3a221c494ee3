"""Mounts of an object tier, and kill campaigns on them."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from ckptfs.tiers import open_tier
from ckptfs.tiers.base import Found
from tests.crash.campaign import Campaign, tree, wait_gone
from tests.crash.content import make
from tests.mounted.harness import Mount, wait_for
from tests.s3.proxy import Proxy
from tests.s3.servers import REGION, Server
from tests.s3.stranger import Bucket

MIB = 1 << 20
SMALL_CHUNKS = 'settle_time = 0.1\nchunk_size = "5MiB"\n'
"""Configuration with which a few MiB are several parts."""

_numbers = itertools.count(1)


class S3Mount(Mount):
    """A mount of a prefix of a bucket, reached through the given endpoints."""

    def __init__(
        self, base: Path, name: str, server: Server, place: Bucket, endpoints: Sequence[str]
    ) -> None:
        super().__init__(base, name)
        self.server, self.place = server, place
        self.url = place.url
        self.env.update(server.env)
        self.flags = ["--region", REGION]
        for endpoint in endpoints:
            self.flags += ["--endpoint-url", endpoint]

    def start(self, *options: str, config: str = "", check: bool = True):  # type: ignore[no-untyped-def]
        """`ckptfs mount` with the store's flags."""
        given = [*self.flags, *options] if options or not self.options else []
        return super().start(*given, config=config, check=check)

    def tier_names(self) -> set[str]:
        return self.place.tree()

    def as_other_mount(self, path: str = "") -> dict[str, Found]:
        """What another mount finds in a directory: also attributes that changed later."""
        with mock.patch.dict(os.environ, self.server.env):
            tier = open_tier(self.url, "another", {"endpoint_url": self.server.endpoint, "region": REGION})
            return {os.fsdecode(found.name): found for found in tier.listdir(os.fsencode(path))}


class S3Campaign(Campaign):
    """A kill campaign whose tier is a bucket, reached through a proxy that ranks uploads as AWS does."""

    mount: S3Mount

    def __init__(
        self, mount: S3Mount, seed: int, proxies: Sequence[Proxy], *, runs: int = 1, big: int = 20 << 20
    ) -> None:
        super().__init__(mount, seed, runs=runs, big=big)
        self.proxies = proxies

    def watch(self) -> None:
        place = self.mount.place
        self.spawn(
            "sampler", "tests.s3.sampler", self.mount.server.endpoint, place.bucket, place.prefix,
            str(self.control), *self.runs,
        )  # fmt: skip

    def uploads(self) -> set[str]:
        return set(self.mount.place.own("uploads"))

    @contextlib.contextmanager
    def tier_away(self) -> Iterator[None]:
        """Nobody answers meanwhile."""
        for proxy in self.proxies:
            proxy.down()
        time.sleep(self.rng.random())
        yield
        time.sleep(self.rng.random() * 0.5)
        for proxy in self.proxies:
            proxy.up()
        wait_for(lambda: self.mount.status()["tier"]["state"] == "up", "status to say that the tier is up")

    def compare(self, others: set[str]) -> None:
        m, place = self.mount, self.mount.place
        for run in self.runs:
            names = tree(m.point, run)
            assert {name for name in place.tree(run) if name == run or name.startswith(run + "/")} == names
            for top in sorted(name for name in names if stat.S_ISDIR(os.lstat(m.point / name).st_mode)):
                for name, found in m.as_other_mount(top).items():
                    self.compare_one(f"{top}/{name}", found)
        assert m.tier_names() == others.union(*(tree(m.point, run) for run in self.runs))
        self.no_rubbish()

    def compare_one(self, name: str, found: Found) -> None:
        path = self.mount.point / name
        if path.is_symlink():
            assert os.fsencode(os.readlink(path)) == found.target == self.mount.place.read(name)
        elif path.is_file():
            assert path.read_bytes() == self.mount.place.read(name), name
            st = path.stat()
            assert st.st_mtime_ns == found.attrs.mtime_ns, f"{name}: mtime"
            assert st.st_mode & 0o7777 == found.attrs.mode, f"{name}: mode"

    def no_rubbish(self) -> None:
        """No upload, no unfinished rename, no conflict copy: nobody else wrote here. Nothing was trapped."""
        place, where = self.mount.place, f"(seed {self.seed}, kills {self.kills})"
        left = wait_gone(lambda: self.uploads() | set(place.uploads()) | set(place.own("moves")))
        assert not left, f"uploads or moves left on the tier: {left} {where}"
        assert not place.own("conflicts"), f"conflicts with nobody: {place.own('conflicts')} {where}"
        for proxy in self.proxies:
            if proxy.ranking is not None:
                # The probe of a store steps into the trap on purpose.
                trapped = [key for key in proxy.ranking.trapped if "/.ckptfs/probe-" not in key]
                assert not trapped, f"AWS would discard {trapped} {where}"


def save(mount: S3Mount, top: str = "") -> dict[str, bytes]:
    """A checkpoint in the usual order: shards, small files, then what vouches for them."""
    number = next(_numbers)
    top = top or f"step{number}"
    (mount.point / top).mkdir(exist_ok=True)
    sizes = {"shard-0": 7 * MIB + 7, "shard-1": 2 * MIB, "config": 700, "inline": 900_000, "marker": 20}
    contents = {f"{top}/{name}": make(name, number, size) for name, size in sizes.items()}
    for name, data in contents.items():
        (mount.point / name).write_bytes(data)
    return contents


def arrives(mount: S3Mount, contents: dict[str, bytes], timeout: float = 60) -> None:
    """All of it, and no rubbish."""
    mount.wait(timeout=timeout)
    place = mount.place
    for name, data in contents.items():
        assert place.read(name) == data, name
    wait_for(lambda: not (place.uploads() or place.own("uploads")), "the uploads to be gone", 10)
    assert place.conflicts() == []
    assert mount.status()["stuck"] == []
