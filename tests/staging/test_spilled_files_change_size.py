"""A file with spilled extents that shrinks and grows stays readable for workers."""

from __future__ import annotations

from pathlib import Path

import trio

from ckptfs.flush.local import spill
from ckptfs.staging import EXTENT, Blob, Staging
from ckptfs.tiers.window import slices


def make_staging(tmp_path: Path) -> Staging:
    for name in ("data", "cache", "spill"):
        (tmp_path / name).mkdir()
    return Staging(tmp_path / "data", tmp_path / "cache", tmp_path / "spill")


def spill_extent(staging: Staging, blob: Blob, extent: int) -> None:
    """What the engine's spill lanes do."""
    staging.spill_started(blob, extent)
    spill(str(blob.path), str(blob.spill_path), extent * EXTENT, EXTENT)
    staging.spill_done(blob, extent, True)


def as_a_worker_reads(staging: Staging, blob: Blob) -> bytes:
    source = staging.pin(blob, 0, blob.size)
    try:
        return b"".join(bytes(part.view) for part in slices(source))
    finally:
        staging.unpin(blob)


def test_truncated_and_extended_again(tmp_path: Path) -> None:
    async def run() -> None:
        staging = make_staging(tmp_path)
        blob = staging.create(1)
        data = bytes(range(256)) * (2 * EXTENT // 256)
        staging.write_plain(blob, 0, data)
        spill_extent(staging, blob, 0)
        spill_extent(staging, blob, 1)
        await staging.truncate(blob, EXTENT + 1000)
        await staging.truncate(blob, 3 * EXTENT)
        await staging.write_mixed(blob, 2 * EXTENT, b"tail")
        expected = data[: EXTENT + 1000].ljust(2 * EXTENT, b"\0") + b"tail".ljust(EXTENT, b"\0")
        assert as_a_worker_reads(staging, blob) == expected
        assert await staging.read_mixed(blob, 0, 3 * EXTENT) == expected

    trio.run(run)


def test_extended_behind_a_spilled_tail(tmp_path: Path) -> None:
    async def run() -> None:
        staging = make_staging(tmp_path)
        blob = staging.create(1)
        staging.write_plain(blob, 0, b"x" * 5000)
        spill_extent(staging, blob, 0)
        await staging.write_mixed(blob, EXTENT + 10, b"y")
        expected = b"x" * 5000 + bytes(EXTENT + 10 - 5000) + b"y"
        assert as_a_worker_reads(staging, blob) == expected
        assert await staging.read_mixed(blob, 0, EXTENT + 11) == expected

    trio.run(run)
