"""What the main process and its workers say to each other.

A message is a 4-byte little-endian length and a pickle, over a SOCK_STREAM Unix socket pair that
the worker inherits. Main sends `Call`, the worker answers each with one `Reply`, in any order.
Both ends are the same program and user, so pickle is not exposed to strangers.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

from ckptfs.tiers.base import TierError

HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Call:
    """Run `method(*args)`: a `Tier` method, or one of the local jobs in `flush/local.py`."""

    id: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result, or why there is none."""

    id: int
    value: Any = None
    error: TierError | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a worker: which tier to open and how to run."""

    url: str
    mount_uuid: str
    threads: int
    niceness: int
    options: dict[str, Any]


def encode(message: Call | Reply | Setup) -> bytes:
    """Frame one message."""
    body = pickle.dumps(message, protocol=5)
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Any:
    """The message of one frame's body."""
    return pickle.loads(body)
