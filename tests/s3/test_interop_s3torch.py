"""AWS's connector for PyTorch loads what ckptfs has written, and ckptfs shows what it has saved."""

from __future__ import annotations

from typing import Any

import pytest

from tests.s3.interop import NEEDS_FUSE, Tree
from tests.s3.servers import REGION

torch = pytest.importorskip("torch")
connector = pytest.importorskip("s3torchconnector", exc_type=ImportError)
pytestmark = [pytest.mark.long, NEEDS_FUSE]


@pytest.fixture
def config(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in tree.mount.server.env.items():
        monkeypatch.setenv(name, value)
    return connector.S3ClientConfig(force_path_style=True, max_attempts=1)


@pytest.fixture
def checkpoint(tree: Tree, config: Any) -> Any:
    return connector.S3Checkpoint(REGION, endpoint=tree.mount.server.endpoint, s3client_config=config)


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"step": 7, "weights": [torch.rand(1 << 19) for _ in range(6)]}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    pairs = zip(found["weights"], wanted["weights"], strict=True)
    return found["step"] == wanted["step"] and all(torch.equal(a, b) for a, b in pairs)


def test_the_connector_loads_what_was_saved_through_the_mount(tree: Tree, checkpoint: Any) -> None:
    (tree.mount.point / "torch").mkdir()
    torch.save(state(), tree.mount.point / "torch/model.pt")
    tree.mount.wait()
    with checkpoint.reader(f"{tree.mount.url}/torch/model.pt") as stream:
        assert same(torch.load(stream), state())


def test_the_mount_has_what_the_connector_saved(tree: Tree, checkpoint: Any) -> None:
    with checkpoint.writer(f"{tree.mount.url}/from torch/model.pt") as stream:
        torch.save(state(), stream)
    tree.mount.shows("from torch/model.pt")
    assert same(torch.load(tree.mount.point / "from torch/model.pt", mmap=True), state())


def test_the_connector_lists_the_files(tree: Tree, config: Any) -> None:
    listed = connector.S3MapDataset.from_prefix(
        f"{tree.mount.url}/run/", region=REGION, endpoint=tree.mount.server.endpoint, s3client_config=config
    )
    found = {item.key.removeprefix(tree.place.prefix + "/"): item for item in listed}
    assert tree.content.keys() <= found.keys()
    for name, data in tree.content.items():
        if data:  # what the connector asks of empty objects, SeaweedFS answers with InvalidRange
            assert found[name].read() == data, name
