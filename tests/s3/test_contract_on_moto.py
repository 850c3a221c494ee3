"""The tier contract on moto, with small versions as uploads, and sent by their Put."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import TierContract
from rig import Rig

from tests.s3.s3_rig import s3_rig
from tests.s3.servers import Server


class TestOnMoto(TierContract):
    @pytest.fixture(params=["uploads", "inline"])
    def rig(self, request: pytest.FixtureRequest, moto: Server, tmp_path: Path) -> Iterator[Rig]:
        with s3_rig(moto, tmp_path, inline=request.param == "inline") as made:
            yield made
