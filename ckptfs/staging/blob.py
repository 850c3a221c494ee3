"""One staging file."""

from __future__ import annotations

import trio

EXTENT = 4 << 20
"""Bytes of an extent: the unit in which content is spilled, fetched and evicted. A multiple of the
2 MiB huge page, so that giving one back frees whole pages."""


class Blob:
    """A sparse file with content at its own offsets, named by data id.

    Dirty blobs are complete and journaled. Clean ones are a cache of what the tier has: `present`
    names the extents they hold (None: all), and they may shrink at any time. `ram` is what the
    file occupies in staging, in bytes. Extents in `spilled` are in the spill file at the same
    offsets. `busy` extents are being copied to the spill: writers wait for the event. `pins`
    counts workers reading the file: nothing is punched meanwhile. `fetching` holds the events of
    extents on their way from the tier.
    """

    __slots__ = (
        "busy", "clean", "dead", "fd", "fetching", "filled", "id", "path", "pins", "present", "ram",
        "settling", "size", "spill_fd", "spill_made", "spill_path", "spilled", "unit", "users",
    )  # fmt: skip

    def __init__(self, id: int, path: str, spill_path: str) -> None:
        self.id = id
        self.path = path
        self.spill_path = spill_path
        self.fd = -1
        self.spill_fd = -1
        self.spill_made = False
        """The spill file may exist (empty while `spilled` is)."""
        self.users = 0
        self.ram = 0
        self.size = 0
        self.clean = False
        self.dead = False
        self.present: set[int] | None = None
        self.spilled: set[int] = set()
        self.busy: dict[int, trio.Event] = {}
        self.fetching: dict[int, trio.Event] = {}
        self.pins = 0
        self.filled: int | None = None
        """Bytes from the start that are there, while a worker fills the file; None: all. What is beyond is
        still to come, and must not be spilled as the hole that it is."""
        self.settling = False
        """Clean as soon as no worker reads it: that moves the file."""
        self.unit = 0
        """Bytes fetched at once (a multiple of the digests' chunk), 0 when not known yet."""

    @property
    def plain(self) -> bool:
        """All in RAM and at rest: reads and writes need no thought."""
        return not self.spilled and not self.busy and self.present is None

    def __repr__(self) -> str:
        return f"<Blob {self.id} {'clean' if self.clean else 'dirty'} ram={self.ram}>"
