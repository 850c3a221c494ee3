"""Recognising ops that were applied before, on an object tier: the sibling of `file_replay`.

Objects are recognised by their ident (metadata `ckptfs-version`), which says which version of which
mount they are. Directories have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from ckptfs.tiers.base import INLINE, Link, Mkdir, Move, Op, Put, Remove
from ckptfs.tiers.s3_objects import Seen

DIR = "dir"
"""Token and ident of every directory."""


def ident_of(op: Put | Link, mount_uuid: str) -> str:
    """The ident of the object that an op makes."""
    if isinstance(op, Put):
        return f"{mount_uuid}/{op.version}" if op.upload == INLINE else op.upload.ident
    hasher = xxhash.xxh3_128(op.target)
    hasher.update(repr((op.attrs, op.path)).encode())
    return f"{mount_uuid}/link-{hasher.hexdigest()}"


def landed(
    at: Callable[[bytes], Seen | None], mount_uuid: str, path: bytes, ident: str, rest: Sequence[Op]
) -> bool:
    """Whether the object `ident`, made at `path`, went through the ops `rest`, all applied before.

    `at` shows what is at a path now. When in doubt the answer is no, which costs a second upload, never data.
    """
    for index, op in enumerate(rest):
        later = rest[index + 1 :]
        if isinstance(op, Move):
            if path == op.src or path.startswith(op.src + b"/"):
                path = op.dst + path[len(op.src) :]
            elif path == op.dst:
                return bool(op.ident) and landed(at, mount_uuid, op.dst, op.ident, later)
        elif isinstance(op, (Put, Link)):
            if path == op.path:
                return landed(at, mount_uuid, path, ident_of(op, mount_uuid), later)
        elif isinstance(op, Remove) and path == op.path:
            return at(path) is None
    there = at(path)
    return there is not None and there.ident == ident


def made_later(rest: Sequence[Op], mount_uuid: str, below: bytes) -> tuple[frozenset[str], frozenset[bytes]]:
    """What the ops `rest` make in a directory: idents of objects, and paths of directories."""
    inside = [
        op
        for op in rest
        if isinstance(op, (Put, Link, Mkdir)) and (op.path == below or op.path.startswith(below + b"/"))
    ]
    return (
        frozenset(ident_of(op, mount_uuid) for op in inside if not isinstance(op, Mkdir)),
        frozenset(op.path for op in inside if isinstance(op, Mkdir)),
    )
