"""Watches a prefix of a bucket all along: `python -m tests.s3.sampler ENDPOINT BUCKET PREFIX CONTROL RUN...`.

The same rules as on a file tier (see `tests.crash.sampler`), but not for what is inside of a directory whose
rename is under way, as `.ckptfs/moves/` says (R8).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.crash.content import judge
from tests.crash.oplog import Version
from tests.crash.sampler import Sampler
from tests.s3.servers import client_of
from tests.s3.stranger import OWN, Bucket, is_link


class S3Sampler(Sampler):
    """State of one watch. The store itself never goes away."""

    def __init__(self, bucket: Bucket, control: Path, runs: list[str]) -> None:
        super().__init__(Path("/"), control, runs)
        self.bucket = bucket
        self.known: dict[tuple[str, str], Version] = {}
        self.moving: list[str] = []

    def tier_state(self) -> int | None:
        return 0

    def version(self, key: str, etag: str) -> tuple[bool, Version]:
        """(there, version) of an object; a torn one complains."""
        if (key, etag) not in self.known:
            try:
                got = self.bucket.client.get_object(**self.bucket.at(key))
                data, etag = got["Body"].read(), got["ETag"]
            except self.bucket.client.exceptions.NoSuchKey:
                return False, None
            version: Version = data.decode() if is_link(got) else judge(data)
            if version is None:
                self.complain(f"TORN {key}: {len(data)} bytes, ETag {etag}")
            self.known[key, etag] = version
        return True, self.known[key, etag]

    def look(self, name: str) -> tuple[bool, Version]:
        head = self.bucket.head(name)
        if head is not None:
            return self.version(name, head["ETag"])
        inside = self.bucket.client.list_objects_v2(
            Bucket=self.bucket.bucket, Prefix=self.bucket.key(name) + "/", MaxKeys=1
        )
        return bool(inside.get("Contents")), None

    def scan(self, run: str) -> dict[str, Version]:
        found: dict[str, Version] = {}
        for item in self.bucket.listed(run + "/"):
            path = item.key.rstrip("/")
            if os.path.basename(path).startswith(OWN.rstrip("/")):
                self.complain(f"HIDDEN NAME IN VIEW {item.key}")
            if path == item.key:
                there, version = self.version(path, item.etag)
                if there:
                    found[path] = version
                path = os.path.dirname(path)
            while path:
                found.setdefault(path, None)
                path = os.path.dirname(path)
        return found

    def judge_run(self, run: str, found: dict[str, Version], complaints: list[str]) -> None:
        # What is being renamed now may be anywhere in between; what was when we looked, too.
        self.moving = [*self.moving, *self.bucket.moves()]
        if self.moving:
            found = {name: version for name, version in found.items() if not self.moves(name)}
        heard: list[str] = []
        super().judge_run(run, found, heard)
        complaints += [text for text in heard if not self.moving or not self.moves(text.split()[1])]

    def moves(self, name: str) -> bool:
        return any(name == top or name.startswith(top + "/") for top in self.moving)

    def round(self) -> None:
        self.moving = self.bucket.moves()
        super().round()


def main() -> None:
    """Entry of the process."""
    endpoint, bucket, prefix, control, *runs = sys.argv[1:]
    sampler = S3Sampler(Bucket(client_of(endpoint), bucket, prefix), Path(control), runs)
    while not (sampler.control / "sampler-stop").exists():
        sampler.round()
        time.sleep(0.02)
    sampler.round()


if __name__ == "__main__":
    main()
