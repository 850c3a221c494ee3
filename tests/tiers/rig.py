"""A tier under test: what the tests do with it, and what a stranger does past ckptfs."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ckptfs.tiers.base import (
    INLINE,
    Applied,
    Attrs,
    Digest,
    Draft,
    Found,
    Op,
    Outcome,
    Put,
    Source,
    Tier,
    TierError,
    Trouble,
    Upload,
)

ATTRS = Attrs(0o640, os.geteuid(), os.getegid(), 1_600_000_000_000_000_001, 1_700_000_000_123_456_789)
DIR_ATTRS = Attrs(0o750, os.geteuid(), os.getegid(), 1_600_000_000_000_000_000, 1_650_000_000_000_000_000)
CHUNK = 1 << 20
"""A size, and the chunk of an upload where the tier takes any (`Rig.chunk`)."""
WHOLE = 16 << 20
"""A chunk that holds the whole version."""


@dataclass
class Rig:
    """One tier under test. The `foreign_*` calls are another writer's, past ckptfs."""

    open: Callable[[], Tier]
    """A new instance for the same mount, as another worker process has."""
    staging: Path
    foreign_write: Callable[[bytes, bytes], None]
    foreign_read: Callable[[bytes], bytes | None]
    foreign_remove: Callable[[bytes], None]
    foreign_mkdir: Callable[[bytes], None]
    conflicts: Callable[[], list[bytes]]
    """Contents of the files kept under `.ckptfs/conflicts/`."""
    moves: bool = True
    """Rename of files and trees."""
    ns_times: bool = True
    exact_mode: bool = True
    in_place: Callable[[bytes, int, bytes], None] | None = None
    """Change bytes of an object without any trace in size and times (a disk's bit rot)."""
    chunk: int = CHUNK
    """The least chunk that an upload can be sent in."""
    any_offset: bool = True
    """A window of an upload may begin anywhere, not only where a chunk does."""
    inline: int = -1
    """Versions up to this size are sent by the Put itself, -1 for none (`Traits.inline_bytes`)."""
    probe: bool = True
    """A tier must be probed before it is used, not only to know what it can do."""
    small: int = 150
    """How many uploads go together."""


class Session:
    """A tier with helpers that do what the flusher does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.tier = rig.open()
        if rig.probe:
            self.tier.probe()
        self.chunk = rig.chunk
        self._versions = (f"v{n}" for n in itertools.count(1))

    def stage(self, data: bytes) -> Source:
        """Put bytes into a new staging file."""
        path = self.rig.staging / f"s{len(os.listdir(self.rig.staging))}"
        path.write_bytes(data)
        return Source(str(path), 0, len(data))

    def send(self, data: bytes, path: bytes = b"f") -> tuple[Upload, tuple[Digest, ...], str]:
        """Upload in chunks, in a shuffled order. Returns the upload, its digests, its version."""
        version = next(self._versions)
        source = self.stage(data)
        upload = self.tier.begin(Draft(version, path, len(data), self.chunk, ATTRS))
        offsets = list(range(0, len(data), self.chunk))
        random.Random(len(data)).shuffle(offsets)
        found = {}
        for offset in offsets:
            part = replace(source, offset=offset, length=min(self.chunk, len(data) - offset))
            found[offset] = Digest(offset, part.length, self.tier.send(upload, offset, part))
        return upload, tuple(found[offset] for offset in sorted(found)), version

    def put_op(self, path: bytes, data: bytes, expected: str | None = None, attrs: Attrs = ATTRS) -> Put:
        """A Put whose bytes are sent, or that sends them itself where the tier takes small ones so."""
        if len(data) <= self.rig.inline:
            version = next(self._versions)
            return Put(path, INLINE, len(data), attrs, (), expected, version, self.stage(data))
        upload, digests, version = self.send(data, path)
        return Put(path, upload, len(data), attrs, digests, expected, version)

    def apply(self, *ops: Op) -> list[Applied]:
        """Apply a batch that has to succeed."""
        outcome = self.tier.apply(ops)
        assert outcome.failed is None, outcome.failed
        assert len(outcome.applied) == len(ops)
        return list(outcome.applied)

    def put(self, path: bytes, data: bytes, expected: str | None = None, attrs: Attrs = ATTRS) -> Applied:
        """Send and publish."""
        return self.apply(self.put_op(path, data, expected, attrs))[0]

    def look(self, path: bytes) -> Found:
        """What is there; it must be."""
        found = self.tier.stat(path)
        assert found is not None, path
        return found

    def names(self, path: bytes = b"") -> set[bytes]:
        """Names in a directory."""
        return {found.name for found in self.tier.listdir(path)}

    def local(self, data: bytes = b"") -> str:
        """A local file to fetch into."""
        return self.stage(data).ram_path


def draft(version: str, directory: bytes, size: int, chunk: int = WHOLE, name: bytes = b"f") -> Draft:
    """A version to be published as the file `name` of a directory."""
    return Draft(version, directory + b"/" + name if directory else name, size, chunk, ATTRS)


@functools.lru_cache(maxsize=16)
def blob(size: int, seed: int = 1) -> bytes:
    """Reproducible bytes."""
    return random.Random(seed * 1_000_003 + size).randbytes(size)


def trouble(outcome: Outcome) -> Trouble:
    """Why a batch stopped."""
    assert outcome.failed is not None
    return outcome.failed.trouble


def caught(call: Callable[[], Any]) -> TierError:
    """The TierError a call has to raise."""
    with pytest.raises(TierError) as found:
        call()
    return found.value
