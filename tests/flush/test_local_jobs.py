"""Jobs on staging files, several at once on one file as the spill's lanes run them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ckptfs.flush.local import spill

EXTENT = 256 << 10


def test_extents_spilled_at_the_same_time_do_not_cut_each_other_off(tmp_path: Path) -> None:
    ram, out = tmp_path / "ram", tmp_path / "out"
    wanted = os.urandom(8 * EXTENT - 100)
    ram.write_bytes(wanted)
    for _ in range(60):
        out.unlink(missing_ok=True)
        gate = threading.Barrier(8)

        def lane(extent: int, gate: threading.Barrier = gate) -> None:
            gate.wait()
            spill(str(ram), str(out), extent * EXTENT, EXTENT)

        lanes = [threading.Thread(target=lane, args=(i,)) for i in range(8)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        assert out.read_bytes()[: len(wanted)] == wanted


def test_a_spilled_hole_replaces_what_was_spilled_before(tmp_path: Path) -> None:
    ram, out = tmp_path / "ram", tmp_path / "out"
    ram.write_bytes(b"x" * EXTENT)
    spill(str(ram), str(out), 0, EXTENT)
    with open(ram, "wb") as f:
        f.truncate(EXTENT)
    spill(str(ram), str(out), 0, EXTENT)
    assert out.read_bytes() == bytes(EXTENT)
