"""R9: what the tier cannot hold is refused when it is named, not when it is published."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from ckptfs.core import Core, Inode, State
from ckptfs.tiers.base import Attrs, Traits


def rule(path: bytes) -> int:
    """Like an object store: keys of bounded length, text only."""
    if len(path) > 20:
        return errno.ENAMETOOLONG
    return errno.EILSEQ if b"\xff" in path else 0


@pytest.fixture
def core() -> Core:
    return Core(State(Attrs(0o755, 0, 0, 0, 0)), traits=Traits(forbids=rule))


def refused(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=os.strerror(code)):
        call()


def mkdir(core: Core, parent: Inode, name: bytes) -> Inode:
    return core.names.mkdir(parent, name, 0o755, 0, 0, 1.0)


def test_new_names(core: Core) -> None:
    root = core.state.root
    d = mkdir(core, root, b"0123456789")
    for make in (
        lambda name: core.names.create(d, name, 0o644, 0, 0, core.state.next_id(), 1.0),
        lambda name: mkdir(core, d, name),
        lambda name: core.names.symlink(d, name, b"t", 0, 0, 1.0),
    ):
        refused(errno.EILSEQ, lambda make=make: make(b"\xff"))  # type: ignore[misc]
        refused(errno.ENAMETOOLONG, lambda make=make: make(b"0123456789"))  # type: ignore[misc]
    assert not d.children
    core.names.create(d, b"012345678", 0o644, 0, 0, core.state.next_id(), 1.0)


def test_a_rename_is_refused_for_what_is_inside(core: Core) -> None:
    root = core.state.root
    d = mkdir(core, root, b"d")
    e = mkdir(core, d, b"e")
    core.names.create(e, b"0123456789", 0o644, 0, 0, core.state.next_id(), 1.0)
    refused(errno.ENAMETOOLONG, lambda: core.names.rename(root, b"d", root, b"01234567", 0, 2.0))
    refused(errno.EILSEQ, lambda: core.names.rename(d, b"e", root, b"\xff", 0, 2.0))
    assert root.children == {b"d": d}
    assert d.children == {b"e": e}
    core.names.rename(root, b"d", root, b"0123456", 0, 2.0)
    assert root.children == {b"0123456": d}
