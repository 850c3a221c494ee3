"""`make demo-s3`: as `make demo`, with an object store as the tier: a SeaweedFS that it starts and stops.

What was saved through the mount is downloaded with plain boto3 and compared with what the mount shows. The
comparison is with a trainer that saves to memory and uploads with boto3 before it goes on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import boto3
from demo import DemoError, ckptfs, console, main, table, tell, train, verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckptfs.paths import MountPaths
from tests.s3.servers import Server, start_seaweed

BUCKET = "checkpoints"


def download(server: Server, prefix: str, target: Path) -> None:
    """Everything below the prefix but what ckptfs added, with plain boto3 and its defaults."""
    target.mkdir()
    client = boto3.client("s3", endpoint_url=server.endpoint)
    listed = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    for key in (item["Key"] for page in listed for item in page.get("Contents", ())):
        path = target / key.removeprefix(prefix)
        if path.relative_to(target).parts[0] == ".ckptfs":
            continue
        if key.endswith("/"):
            raise DemoError(f"{key} was left behind: a marker of a directory that is not empty")
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(BUCKET, key, str(path))


def demonstrate(base: Path) -> None:
    """The whole demonstration, in and below `base`."""
    mount = base / "mnt"
    mount.mkdir()
    tell("starting SeaweedFS, an object store, on this machine")
    server = start_seaweed(base / "seaweed")
    try:
        # Credentials the ordinary way: as every AWS tool finds them.
        os.environ.update(server.env)
        os.environ.pop("AWS_PROFILE", None)
        server.bucket(BUCKET)
        paths = MountPaths(str(mount))
        ckptfs(
            "mount", str(mount), "--config", os.devnull,
            "--tier", f"s3://{BUCKET}/demo", "--endpoint-url", server.endpoint,
        )  # fmt: skip
        mounted = train("--dir", str(mount / "run"), paths=paths)
        start = time.monotonic()
        ckptfs("wait", str(mount))
        durable_after = time.monotonic() - start
        tell("downloading everything with plain boto3")
        download(server, "demo/", base / "download")
        verify(mount, base / "download")
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint
        direct = train("--s3", f"s3://{BUCKET}/direct")
        ckptfs("umount", str(mount))
        console.print(table(mounted, direct, durable_after, "torch.save, then upload with boto3"))
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(demonstrate))
