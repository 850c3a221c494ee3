"""What is mounted, from /proc/self/mountinfo: read without touching any of the file systems."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

FSTYPE = "fuse.ckptfs"
"""How the kernel names our mounts (`subtype=ckptfs`)."""

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    mount_id: int
    parent_id: int
    device: str
    """major:minor."""
    path: str
    fstype: str
    source: str

    @property
    def ours(self) -> bool:
        """Whether it is a ckptfs mount (dead or alive)."""
        return self.fstype == FSTYPE


def _unescape(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))


def parse(data: bytes) -> list[Mount]:
    """The lines of a mountinfo file; lines that can't be understood are left out."""
    mounts = []
    for line in data.splitlines():
        before, separator, after = line.partition(b" - ")
        left, right = before.split(b" "), after.split(b" ")
        if not separator or len(left) < 6 or len(right) < 2 or not (left[0].isdigit() and left[1].isdigit()):
            continue
        mounts.append(
            Mount(
                int(left[0]),
                int(left[1]),
                left[2].decode("ascii", "replace"),
                _unescape(left[4]),
                _unescape(right[0]),
                _unescape(right[1]),
            )
        )
    return mounts


def read() -> list[Mount]:
    """Every mount of this namespace, in mount order (of several at one path the last is on top)."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse(file.read())


def top_at(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that is visible at exactly `path`, if any."""
    stacked = [mount for mount in mounts if mount.path == path]
    # A mount whose parent is in the stack lies above it; the order agrees except after `mount --move`.
    below = {mount.parent_id for mount in stacked}
    return next((mount for mount in reversed(stacked) if mount.mount_id not in below), None)


def inside(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or below it; both absolute and without `..` or doubled slashes."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
