"""The protocol every tier implements, and the plain data that crosses it.

Tiers are synchronous, may block for as long as the storage does, are called from several
threads at once, and live in worker processes only: the process that serves the mount never
touches one. All paths are bytes, relative to the tier's root, with ``/`` between components and
no leading slash; ``b""`` is the root. Everything here can be pickled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

RESERVED = b".ckptfs"
"""Names starting with this belong to ckptfs: refused in the mount, hidden from listings."""


LARGEST = (1 << 63) - 1
"""Bytes of the largest file there can be (off_t)."""


class Kind(enum.IntEnum):
    """What a name holds."""

    FILE = 1
    DIR = 2
    LINK = 3


class Trouble(enum.IntEnum):
    """How the tier answered when it did not do what was asked."""

    DOWN = 1
    """Not reachable or not answering sanely now: retried for ever with back-off."""
    REFUSED = 2
    """Refused for good (permission, quota, name): the entry is stuck until this changes."""
    REDO = 3
    """What was uploaded is gone or not what was sent: send the bytes again from staging."""
    CHANGED = 4
    """The object is not the one the caller knew (reads only)."""
    CORRUPT = 5
    """The bytes read do not match the digest recorded when they were published."""


class TierError(Exception):
    """A tier call that failed; `errno` is the closest POSIX code or 0."""

    def __init__(self, trouble: Trouble, message: str, errno: int = 0) -> None:
        super().__init__(trouble, message, errno)
        self.trouble = trouble
        self.message = message
        self.errno = errno

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Attrs:
    """Attributes that travel with a published object. Times in nanoseconds since the epoch."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int


UNASKED = Attrs(-1, -1, -1, -1, -1)
"""Of an object in a listing that is as the caller knows it, or that it does not care for: not looked at."""

Familiar = Mapping[bytes, tuple[str, Kind] | None]
"""What the caller of a listing knows: token and kind by name; None: whatever is there does not matter now."""


@dataclass(frozen=True, slots=True)
class Found:
    """One object as the tier shows it. `token` changes whenever its content does."""

    name: bytes
    kind: Kind
    size: int
    attrs: Attrs
    token: str
    target: bytes = b""
    ident: str = ""
    """How the object is recognised after a rename (see `Upload.ident`)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A window of staged bytes: `[offset, offset+length)` of one staging file.

    Extents (of `extent` bytes, by index) listed in `spilled` are in `spill_path` at the same
    offsets; all others in `ram_path`.
    """

    ram_path: str
    offset: int
    length: int
    spill_path: str = ""
    extent: int = 0
    spilled: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Digest:
    """xxh3-128 of one chunk, in version order."""

    offset: int
    length: int
    xxh3: bytes


@dataclass(frozen=True, slots=True)
class Upload:
    """A begun upload, journaled before its first chunk: where the bytes go, unseen by readers."""

    handle: str
    ident: str
    """How the published object will be recognised as ours (file tier: st_ino of the hidden file)."""


INLINE = Upload("inline", "")
"""The upload of a version that is sent by the `Put` itself (`Traits.inline_bytes`)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A version about to be sent: `size` bytes, in chunks of `chunk` (a multiple of 1 MiB).

    `path` and `attrs` are as known now. The directory need not exist yet, and all but the size may be
    others when it is published, except where `Traits.bound` says so.
    """

    version: str
    path: bytes
    size: int
    chunk: int
    attrs: Attrs


@dataclass(frozen=True, slots=True)
class Traits:
    """How a kind of tier takes data: what the planner must know of it.

    `inline_bytes`: versions up to this size (-1: none) have no upload, their `Put` carries the bytes (on
    object stores a small object is sent and published by one request). `bound`: an upload belongs to the
    path it was begun for (R5): it is begun only when every earlier entry about that path is applied, and
    begun anew when the path changes. Its handle is made by `bound_handle`. `least_chunk`: bytes that
    all chunks but the last must have. `heads`: a listing costs a request for each object. `forbids`: the
    errno for a path that cannot be a name on the tier, 0 for one that can; None where every path can.
    """

    inline_bytes: int = -1
    bound: bool = False
    least_chunk: int = 0
    forbids: Callable[[bytes], int] | None = None
    heads: bool = False


def bound_handle(path: bytes, *rest: str) -> str:
    """Handle of an upload that belongs to `path`; `rest` is the tier's own and has no line ends."""
    return "\n".join((*rest, path.decode("utf-8", "surrogateescape")))


def bound_path(upload: Upload) -> bytes:
    """The path that an upload belongs to."""
    return upload.handle.rpartition("\n")[2].encode("utf-8", "surrogateescape")


def split_handle(handle: str, count: int) -> tuple[bytes, list[str]]:
    """The path and the `count` other parts of a `bound_handle`."""
    *rest, path = handle.split("\n", count)
    return path.encode("utf-8", "surrogateescape"), rest


@dataclass(frozen=True, slots=True)
class Put:
    """Make a completely sent version visible as `path`.

    With the upload `INLINE` the bytes are `source`'s, and their digest is taken on the way.
    """

    path: bytes
    upload: Upload
    size: int
    attrs: Attrs
    digests: tuple[Digest, ...]
    expected: str | None
    """Token of the object we expect under `path`, None when we know of none (rule W3)."""
    version: str = ""
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Make a symbolic link visible."""

    path: bytes
    target: bytes
    attrs: Attrs
    expected: str | None


@dataclass(frozen=True, slots=True)
class Mkdir:
    """Make a directory; one that exists already is adopted."""

    path: bytes
    attrs: Attrs


@dataclass(frozen=True, slots=True)
class Move:
    """Rename a published object or directory tree.

    Idempotent by `ident`: when `src` is gone and `dst` is the object `ident`, it is done.
    """

    src: bytes
    dst: bytes
    kind: Kind
    ident: str
    expected: str | None


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove an object; gone already is success. A directory that others filled stays (W4, R9)."""

    path: bytes
    kind: Kind
    expected: str | None


@dataclass(frozen=True, slots=True)
class SetAttrs:
    """Late attribute changes of something published. Gone already is success."""

    path: bytes
    kind: Kind
    attrs: Attrs
    expected: str | None


Op = Put | Link | Mkdir | Move | Remove | SetAttrs


@dataclass(frozen=True, slots=True)
class Applied:
    """The tier did it and its answer was checked. `token`/`ident` describe the object now there
    (empty after Remove)."""

    token: str = ""
    ident: str = ""
    conflict: bool = False
    """Somebody else's object was found there and kept under `.ckptfs/conflicts/` (W3)."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The tier did not do it."""

    trouble: Trouble
    message: str
    errno: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of an ordered batch: one `Applied` per op done; `failed` is about the next op.

    What follows the failed op was not attempted.
    """

    applied: tuple[Applied, ...]
    failed: Failed | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """Capacity as the tier reports it, in bytes; zeros when it has no such notion."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a probe found out."""

    url: str
    tier_id: str
    """Identity of the tier itself, so that an empty mount point is never taken for it."""
    durable: bool = True
    notes: tuple[str, ...] = field(default=())
    largest: int = LARGEST
    """Bytes of the largest file it can hold."""
    caps: str = ""
    """What else the tier needs to know of itself in other processes: its own text, handed to `open_tier` as
    `options["caps"]`."""


class Tier(Protocol):
    """A place for checkpoints. Raises `TierError` from every method."""

    def probe(self) -> TierInfo:
        """Check that the tier can be read, written and renamed in; leave nothing behind."""
        ...

    def begin(self, draft: Draft) -> Upload:
        """Open a place for the bytes of a version that no reader looks at."""
        ...

    def send(self, upload: Upload, offset: int, source: Source) -> bytes:
        """Copy `source` to `offset` of the upload; durable on return. Returns its xxh3-128."""
        ...

    def send_small(self, batch: Sequence[tuple[Draft, Source]]) -> list[tuple[Upload, bytes]]:
        """`begin` and `send` of whole small versions at once."""
        ...

    def apply(self, ops: Sequence[Op]) -> Outcome:
        """Apply `ops` one after the other, each checked and durable; stop at the first failure."""
        ...

    def listdir(self, path: bytes, familiar: Familiar | None = None) -> list[Found]:
        """Everything directly in a directory, ckptfs's own names left out. ENOENT/ENOTDIR when
        it is none (`TierError(CHANGED, errno=...)`). Where looking at each object costs a request, those
        that are as `familiar` says come with the attributes `UNASKED`."""
        ...

    def stat(self, path: bytes) -> Found | None:
        """One object, or None."""
        ...

    def digests(self, path: bytes, token: str) -> tuple[Digest, ...]:
        """Digests recorded when the object was published; empty when unverified."""
        ...

    def fetch(self, path: bytes, token: str, offset: int, length: int, into: str) -> int:
        """Copy `[offset, offset+length)` of the object into the same range of the local file
        `into`. Returns the number of bytes (short only at the end). `CHANGED` when the object is
        not `token`."""
        ...

    def read(self, path: bytes, token: str, offset: int, length: int) -> bytes:
        """Like `fetch`, returning the bytes (used when there is no cache room)."""
        ...

    def space(self) -> Space:
        """Capacity."""
        ...

    def abandon(self, uploads: Sequence[Upload]) -> None:
        """Remove the hidden bytes of uploads that will not be published."""
        ...

    def sweep(self, keep: frozenset[str]) -> int:
        """Remove this mount's hidden uploads whose handle is not in `keep`; returns how many."""
        ...
