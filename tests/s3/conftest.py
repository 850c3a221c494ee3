"""Real object stores for tests, started when the first test asks for one."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from botocore.loaders import JSONFileLoader

# The contract that every tier passes is beside this directory, in one that is no package.
sys.path.append(str(Path(__file__).parents[1] / "tiers"))
pytest.register_assert_rewrite("contract", "rig", "tests.s3.s3_rig", "tests.s3.interop")

from tests.crash.conftest import disk  # noqa: E402, F401
from tests.s3.certificates import Tls, make_tls  # noqa: E402
from tests.s3.interop import Tree, tree_on  # noqa: E402
from tests.s3.mounts import S3Campaign, S3Mount  # noqa: E402
from tests.s3.proxy import Proxy, ranking_of  # noqa: E402
from tests.s3.servers import Server, start_moto, start_seaweed  # noqa: E402
from tests.s3.stranger import Bucket  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.path.exists("/dev/fuse") and os.geteuid() == 0
    for item in items:
        if "tests/s3/test_mounted" in str(item.path) and not usable:
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse and root"))


@pytest.fixture(scope="session", autouse=True)
def quick_clients() -> Iterator[None]:
    """botocore parses 2 MB of JSON for every new client, and hundreds of tests make some: once is enough."""
    known: dict[str, Any] = {}
    load = JSONFileLoader.load_file

    def remembered(loader: JSONFileLoader, path: str) -> Any:
        if path not in known:
            known[path] = load(loader, path)
        return known[path]

    with mock.patch.object(JSONFileLoader, "load_file", remembered):
        yield


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS; ready in 4 s. Share it: a bucket or a prefix for each test is enough."""
    server = start_seaweed(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """moto; ready in 1 s. It accepts bytes that do not match their checksums."""
    server = start_moto(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """For servers on 127.0.0.1 with a certificate that no system trusts."""
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def tree(seaweed: Server) -> Iterator[Tree]:
    """A mount with some files, for all tests of other tools; each makes its own in other directories."""
    with tree_on(seaweed) as made:
        yield made


_prefixes = itertools.count(1)


@pytest.fixture
def place(seaweed: Server) -> Bucket:
    """A prefix of its own on SeaweedFS."""
    return Bucket(seaweed.client(), seaweed.bucket("mounted"), f"team/m{next(_prefixes)}")


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[Proxy]:
    """In front of SeaweedFS; uploads rank as on AWS."""
    with Proxy(seaweed, ranking=ranking_of(seaweed)) as made:
        yield made


@pytest.fixture
def new_mount(disk: Path, seaweed: Server, place: Bucket, proxy: Proxy) -> Callable[..., S3Mount]:  # noqa: F811
    """Makes mounts (not started) of the place; gone afterwards whatever happens."""

    def make(name: str = "m", *endpoints: str) -> S3Mount:
        return S3Mount(disk, name, seaweed, place, endpoints or (proxy.endpoint,))

    return make


@pytest.fixture
def campaign(new_mount: Callable[..., S3Mount], proxy: Proxy) -> Iterator[Callable[..., S3Campaign]]:
    """Makes campaigns (not started), on a mount of their own started with the given options."""
    made: list[S3Campaign] = []

    def make(seed: int, *options: str, config: str = QUICK, **more: int) -> S3Campaign:
        mount = new_mount()
        mount.start(*options, config=config)
        made.append(S3Campaign(mount, seed, [proxy], **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


QUICK = "settle_time = 0.3\n"
