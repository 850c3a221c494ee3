"""Recognising ops that were applied before: a batch may come again after a crash or a failed fsync.

Looking at one op alone is not enough: of "publish v1 as a; move a to b; publish v2 as a" the
first finds v2 at its name when the batch comes a second time. So an object is followed through
the rest of the batch to where it should be now. When in doubt the answer is "not done", which
costs a second upload, never data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ckptfs.tiers.base import Kind, Link, Move, Op, Put, Remove, Upload
from ckptfs.tiers.file_names import Seen


class View(Protocol):
    """What the tier shows now."""

    def at(self, path: bytes) -> Seen | None:
        """The object at a path."""
        ...

    def is_gone(self, upload: Upload) -> bool:
        """Whether the hidden file of an upload is gone."""
        ...


def landed(view: View, path: bytes, is_it: Callable[[Seen], bool], rest: Sequence[Op]) -> bool:
    """Whether an object made at `path` went through the ops `rest`, all applied before.

    `is_it` recognises it at its last place.
    """
    for index, op in enumerate(rest):
        later = rest[index + 1 :]
        if isinstance(op, Move):
            if path == op.src or path.startswith(op.src + b"/"):
                path = op.dst + path[len(op.src) :]
            elif path == op.dst:
                return _applied(view, op, later)
        elif isinstance(op, (Put, Link)):
            if path == op.path:
                return _applied(view, op, later)
        elif isinstance(op, Remove) and path == op.path:
            return view.at(path) is None
    there = view.at(path)
    return there is not None and is_it(there)


def _applied(view: View, op: Put | Link | Move, rest: Sequence[Op]) -> bool:
    """Whether an op that replaces something was applied."""
    if isinstance(op, Put):
        put = op
        return view.is_gone(put.upload) and landed(
            view, put.path, lambda there: is_upload(there, put.upload, put.size), rest
        )
    if isinstance(op, Link):
        link = op
        return landed(view, link.path, lambda there: is_link(there, link), rest)
    ident = op.ident
    return bool(ident) and landed(view, op.dst, lambda there: there.ident == ident, rest)


def is_upload(there: Seen, upload: Upload, size: int) -> bool:
    """Whether this is the published hidden file."""
    return there.kind is Kind.FILE and there.ident == upload.ident and there.st.st_size == size


def is_link(there: Seen, link: Link) -> bool:
    """Whether this is the symbolic link."""
    return there.kind is Kind.LINK and there.target == link.target
