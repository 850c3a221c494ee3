"""Random batches on an object tier, some of them twice, by several processes in turn, against a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rig import ATTRS, DIR_ATTRS, Rig, Session, blob

from ckptfs.tiers.base import Applied, Kind, Link, Mkdir, Move, Op, Remove, SetAttrs
from tests.s3.s3_rig import LEAST_PART, s3_rig
from tests.s3.servers import Server

pytestmark = pytest.mark.long

NAMES = (b"a", b"b", b"c d", b"e+")


@pytest.fixture
def rig(seaweed: Server, tmp_path: Path) -> Iterator[Rig]:
    with s3_rig(seaweed, tmp_path, bucket="walk") as made:
        yield made


@dataclass
class Thing:
    """What the mount believes of a name."""

    kind: Kind
    data: bytes = b""
    mode: int = 0
    token: str = ""
    ident: str = ""


class Walk:
    """Makes ops like the core's: parents are there, only empty directories are removed, renames are alone."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.chance = random.Random(seed)
        self.sessions = [Session(rig), Session(rig)]
        self.tree: dict[bytes, Thing] = {}
        self.count = 0

    def paths(self, *kinds: Kind) -> list[bytes]:
        return sorted(path for path, thing in self.tree.items() if thing.kind in kinds)

    def inside(self, path: bytes) -> list[bytes]:
        return [other for other in self.tree if other.startswith(path + b"/")]

    def free(self) -> bytes:
        """A name in some directory."""
        parent = self.chance.choice([b"", *self.paths(Kind.DIR)])
        name = self.chance.choice(NAMES)
        return parent + b"/" + name if parent else name

    def token(self, path: bytes) -> str | None:
        return self.tree[path].token if path in self.tree else None

    def next(self) -> tuple[Op, Thing | None] | None:
        """An op, and what is at its path afterwards; the tree is not changed yet."""
        way, path = self.chance.randrange(10), self.free()
        there = self.tree.get(path)
        self.count += 1
        if way < 4 and (there is None or there.kind is not Kind.DIR):
            size = self.chance.choice((0, 10, 10, 3000, LEAST_PART + 7))
            data, attrs = (
                blob(size, size and self.count),
                replace(ATTRS, mode=self.chance.choice((0o600, 0o644))),
            )
            session, number = self.sessions[0], f"w{self.count}"
            op = session.put_op(path, data, self.token(path), attrs)
            if size <= self.rig.inline:
                op = replace(op, version=number)  # each session counts for itself
            return op, Thing(Kind.FILE, data, attrs.mode)
        if way == 4 and (there is None or there.kind is not Kind.DIR):
            target = b"to %d" % self.count
            return Link(path, target, ATTRS, self.token(path)), Thing(Kind.LINK, target)
        if way < 7 and there is None:
            mode = self.chance.choice((0o700, 0o755))
            return Mkdir(path, replace(DIR_ATTRS, mode=mode)), Thing(Kind.DIR, mode=mode)
        if way == 7 and there is not None and not self.inside(path):
            return Remove(path, there.kind, there.token), None
        if way == 8 and there is not None and there.kind is not Kind.LINK:
            mode = self.chance.choice((0o700, 0o711))
            base = DIR_ATTRS if there.kind is Kind.DIR else ATTRS
            return SetAttrs(path, there.kind, replace(base, mode=mode), there.token), replace(
                there, mode=mode
            )
        if way == 9 and there is not None:
            dst = self.free()
            new = self.tree.get(dst)
            if dst == path or dst.startswith(path + b"/"):
                return None
            if new is not None and ((new.kind is Kind.DIR) != (there.kind is Kind.DIR) or self.inside(dst)):
                return None
            return Move(path, dst, there.kind, there.ident, self.token(dst)), there
        return None

    def batch(self) -> None:
        """Ops of which none needs an answer about another; applied, maybe twice."""
        ops: list[Op] = []
        results: list[tuple[Op, Thing | None]] = []
        for _ in range(self.chance.randrange(1, 12)):
            made = self.next()
            if made is None:
                continue
            op, after = made
            if isinstance(op, Move):
                if not ops:
                    ops, results = [op], [made]
                break
            if any(op.path == other.path for other in ops if not isinstance(other, Move)):
                break
            ops.append(op)
            results.append(made)
            if isinstance(op, Remove):
                self.tree.pop(op.path)
            elif after is not None:
                self.tree[op.path] = after
        session = self.chance.choice(self.sessions)
        answers = session.apply(*ops)
        if self.chance.random() < 0.3:
            again = self.chance.choice([*self.sessions, Session(self.rig)])
            assert again.apply(*ops) == answers, ops
        for (op, after), answer in zip(results, answers, strict=True):
            self._learn(op, after, answer)

    def _learn(self, op: Op, after: Thing | None, answer: Applied) -> None:
        assert not answer.conflict, op
        if isinstance(op, Move):
            moved = [op.src, *self.inside(op.src)]
            things = {op.dst + path[len(op.src) :]: self.tree.pop(path) for path in moved}
            self.tree.update(things)
        path = op.dst if isinstance(op, Move) else op.path
        if after is not None and not isinstance(op, Remove):
            self.tree[path].token, self.tree[path].ident = answer.token, answer.ident

    def check(self) -> None:
        """Every process sees exactly this."""
        for session in [*self.sessions, Session(self.rig)]:
            for parent in [b"", *self.paths(Kind.DIR)]:
                base = parent + b"/" if parent else b""
                wanted = {p[len(base) :] for p in self.tree if p.startswith(base)}
                assert session.names(parent) == {name for name in wanted if b"/" not in name}, parent
            for path, thing in self.tree.items():
                found = session.look(path)
                assert found.kind is thing.kind, path
                if thing.kind is not Kind.LINK:
                    assert found.attrs.mode == thing.mode, path
                if thing.kind is Kind.LINK:
                    assert found.target == thing.data, path
                if thing.kind is Kind.FILE:
                    # Copies of what came in parts have other ETags.
                    thing.token = found.token
                    assert session.tier.read(path, found.token, 0, len(thing.data) + 1) == thing.data, path
                    assert found.ident == thing.ident, path
                    if thing.data:
                        assert session.tier.digests(path, found.token), path


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(rig: Rig, seed: int) -> None:
    walk = Walk(rig, seed)
    for step in range(40):
        walk.batch()
        if step % 4 == 3:
            walk.check()
    assert rig.conflicts() == []
