"""A small training loop that checkpoints the way most do: torch.save, a `latest` file, keep the last two.

It knows nothing of ckptfs. Prints one JSON line per checkpoint: `{"step", "path", "bytes", "blocked_s"}`,
where `blocked_s` is the time the loop stood still for the save. With --fsync each save is made durable
before the loop goes on, which is what a careful trainer does without ckptfs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

KEEP = 2


def save(state: dict[str, object], path: Path, fsync: bool) -> float:
    """Write one checkpoint; returns the seconds it took."""
    start = time.perf_counter()
    if fsync:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    else:
        torch.save(state, path)
    return time.perf_counter() - start


def point_latest(directory: Path, name: str) -> None:
    """Name the newest checkpoint in the file `latest`, replaced in one step."""
    temporary = directory / "latest.tmp"
    temporary.write_text(name + "\n")
    temporary.replace(directory / "latest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--saves", type=int, default=8, help="how many checkpoints to write")
    parser.add_argument("--steps", type=int, default=3, help="training steps between two checkpoints")
    parser.add_argument("--width", type=int, default=2048, help="2048: about 200 MB of state")
    parser.add_argument("--fsync", action="store_true", help="make each checkpoint durable before going on")
    options = parser.parse_args()

    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    model.extend([nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)])
    # Adam keeps two values per weight: the checkpoint is three times the model.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = torch.randn(8, width)

    options.dir.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for number in range(1, options.saves + 1):
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
        step = number * options.steps
        path = options.dir / f"step_{step:05d}.pt"
        state = {
            "step": step,
            "loss": loss.item(),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        blocked = save(state, path, options.fsync)
        point_latest(options.dir, path.name)
        written.append(path)
        for old in written[:-KEEP]:
            old.unlink()
        del written[:-KEEP]
        size = path.stat().st_size
        print(json.dumps({"step": step, "path": str(path), "bytes": size, "blocked_s": blocked}), flush=True)


if __name__ == "__main__":
    main()
