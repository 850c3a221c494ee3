"""Small objects in a row: requests are made ahead, and never sent ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import DIR_ATTRS, Session

from ckptfs.tiers.base import Mkdir, Trouble
from tests.s3.proxy import Proxy
from tests.s3.s3_rig import s3_rig
from tests.s3.servers import Server


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[Proxy]:
    with Proxy(seaweed) as made:
        yield made


@pytest.fixture
def s(seaweed: Server, proxy: Proxy, tmp_path: Path) -> Iterator[Session]:
    with s3_rig(seaweed, tmp_path, bucket="ahead", endpoint=proxy.endpoint) as rig:
        made = Session(rig)
        made.apply(Mkdir(b"d", DIR_ATTRS))
        made.put(b"d/first", b"")
        proxy.clear()
        yield made


def put(proxy: Proxy) -> list[str]:
    """Names of what was put, in the order of the answers."""
    return [seen.key.rpartition("/")[2] for seen in proxy.seen if seen.operation == "PutObject"]


NAMES = [f"f{n}" for n in range(20)]


def batch(s: Session) -> list[object]:
    return [s.put_op(b"d/" + name.encode(), name.encode() * 10) for name in NAMES]


def test_each_is_put_once_in_order_and_whole(s: Session, proxy: Proxy) -> None:
    s.apply(*batch(s))  # type: ignore[arg-type]
    assert put(proxy) == NAMES
    for name in NAMES:
        assert s.rig.foreign_read(b"d/" + name.encode()) == name.encode() * 10


def test_nothing_is_sent_before_the_answer_about_the_one_before(s: Session, proxy: Proxy) -> None:
    """Else a reader could see a marker without what it vouches for."""
    early: list[int] = []
    begun: list[str] = []

    def look(_: object) -> None:
        early.append(len(begun) - len(put(proxy)))
        begun.append("")

    proxy.faults.add(operation="PutObject", before=look, delay=0.02)
    s.apply(*batch(s))  # type: ignore[arg-type]
    assert early == [0] * len(NAMES)


@pytest.mark.parametrize(
    ("fault", "trouble"),
    [
        ({"answer": (500, "InternalError")}, Trouble.DOWN),
        ({"answer": (403, "AccessDenied")}, Trouble.REFUSED),
        ({"cut": 3}, Trouble.DOWN),
    ],
)
def test_what_follows_a_failure_is_not_sent(
    s: Session, proxy: Proxy, fault: dict[str, object], trouble: Trouble
) -> None:
    ops = batch(s)
    proxy.faults.add(operation="PutObject", key="/f7$", **fault)
    outcome = s.tier.apply(ops)  # type: ignore[arg-type]
    assert outcome.failed is not None
    assert outcome.failed.trouble == trouble
    assert len(outcome.applied) == 7
    assert "f8" not in put(proxy)
    proxy.faults.end()
    s.apply(*ops[7:])  # type: ignore[arg-type]
    assert {"first", *NAMES} == {found.name.decode() for found in s.tier.listdir(b"d")}


@pytest.mark.parametrize(
    "fault", [{"lose_answer": True}, {"answer": (503, "SlowDown")}, {"answer": (500, "InternalError")}]
)
def test_one_that_fails_once_is_no_conflict(s: Session, proxy: Proxy, fault: dict[str, object]) -> None:
    ops = batch(s)
    proxy.faults.add(operation="PutObject", key="/f7$", times=1, **fault)
    done: list[object] = []
    while len(done) < len(ops):
        outcome = s.tier.apply(ops[len(done) :])  # type: ignore[arg-type]
        done += outcome.applied
    assert not any(applied.conflict for applied in done)  # type: ignore[attr-defined]
    assert s.rig.conflicts() == []


def test_bytes_that_change_on_the_way_are_found(s: Session, proxy: Proxy) -> None:
    ops = batch(s)
    fault = proxy.faults.add(operation="PutObject", key="/f7$", flip=2, times=1)
    s.apply(*ops)  # type: ignore[arg-type]
    assert fault.hits == 1
    assert s.rig.foreign_read(b"d/f7") == b"f7" * 10
