"""A small training loop that checkpoints the way most do: torch.save, a `latest` file, keep the last two.

It knows nothing of ckptfs. Prints one JSON line per checkpoint: `{"step", "path", "bytes", "blocked_s"}`,
where `blocked_s` is the time the loop stood still for the save. With --fsync each save is made durable
before the loop goes on, which is what a careful trainer does without ckptfs; with --s3 it is uploaded with
boto3 (address and credentials come from the environment), which is what many do whose storage is objects.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

KEEP = 2


class Files:
    """Checkpoints in a directory."""

    def __init__(self, directory: Path, fsync: bool) -> None:
        self._directory, self._fsync = directory, fsync
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, state: dict[str, object], name: str) -> int:
        """Write one checkpoint; returns its size."""
        path = self._directory / name
        if self._fsync:
            with open(path, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            torch.save(state, path)
        return path.stat().st_size

    def point_latest(self, name: str) -> None:
        """Name the newest checkpoint in the file `latest`, replaced in one step."""
        temporary = self._directory / "latest.tmp"
        temporary.write_text(name + "\n")
        temporary.replace(self._directory / "latest")

    def remove(self, name: str) -> None:
        """Delete one checkpoint."""
        (self._directory / name).unlink()


class Objects:
    """Checkpoints in a bucket: saved to memory, then uploaded."""

    def __init__(self, url: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._bucket = bucket
        self._client: Any = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
        self._transfer = TransferConfig(multipart_chunksize=16 << 20)

    def save(self, state: dict[str, object], name: str) -> int:
        """Upload one checkpoint; returns its size."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        size = buffer.tell()
        buffer.seek(0)
        self._client.upload_fileobj(buffer, self._bucket, f"{self._prefix}/{name}", Config=self._transfer)
        return size

    def point_latest(self, name: str) -> None:
        """Name the newest checkpoint in the object `latest`."""
        self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/latest", Body=f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Delete one checkpoint."""
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--dir", type=Path, help="the directory where checkpoints go")
    where.add_argument("--s3", metavar="URL", help="s3://bucket/prefix where they are uploaded to instead")
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

    place = Objects(options.s3) if options.s3 else Files(options.dir, options.fsync)
    written: list[str] = []
    for number in range(1, options.saves + 1):
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
        step = number * options.steps
        name = f"step_{step:05d}.pt"
        state = {
            "step": step,
            "loss": loss.item(),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        start = time.perf_counter()
        size = place.save(state, name)
        blocked = time.perf_counter() - start
        place.point_latest(name)
        written.append(name)
        for old in written[:-KEEP]:
            place.remove(old)
        del written[:-KEEP]
        print(json.dumps({"step": step, "path": name, "bytes": size, "blocked_s": blocked}), flush=True)


if __name__ == "__main__":
    main()
