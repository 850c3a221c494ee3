"""The tier contract on SeaweedFS, with small versions as uploads, and sent by their Put.

The uploads go without what only some stores have, the others with all that the probe finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import TierContract
from rig import Rig

from tests.s3.s3_rig import s3_rig
from tests.s3.servers import Server


class TestOnSeaweedfs(TierContract):
    @pytest.fixture(params=["uploads", "inline"])
    def rig(self, request: pytest.FixtureRequest, seaweed: Server, tmp_path: Path) -> Iterator[Rig]:
        inline = request.param == "inline"
        with s3_rig(seaweed, tmp_path, inline=inline, probed=inline) as made:
            yield made
