"""Real object stores for tests, started when the first test asks for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The contract that every tier passes is beside this directory, in one that is no package.
sys.path.append(str(Path(__file__).parents[1] / "tiers"))
pytest.register_assert_rewrite("contract", "rig", "tests.s3.s3_rig", "tests.s3.interop")

from tests.s3.certificates import Tls, make_tls  # noqa: E402
from tests.s3.interop import Tree, tree_on  # noqa: E402
from tests.s3.servers import Server, start_moto, start_seaweed  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.path.exists("/dev/fuse") and os.geteuid() == 0
    for item in items:
        if "tests/s3/test_mounted" in str(item.path) and not usable:
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse and root"))


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
