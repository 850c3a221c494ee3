"""Small objects in a row: one request each, one after the other, most of them made from the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from rig import DIR_ATTRS, Session

from ckptfs.tiers.base import Mkdir, Trouble
from ckptfs.tiers.s3_body import checks_of
from ckptfs.tiers.s3_quick import put_object
from tests.s3.proxy import Proxy
from tests.s3.s3_rig import s3_rig
from tests.s3.servers import Server


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[Proxy]:
    with Proxy(seaweed) as made:
        yield made


@pytest.fixture
def s(seaweed: Server, proxy: Proxy, tmp_path: Path) -> Iterator[Session]:
    with s3_rig(seaweed, tmp_path, bucket="smallputs", endpoint=proxy.endpoint) as rig:
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


# -- requests made from the first ----------------------------------------------------------------


@pytest.fixture
def client(seaweed: Server) -> Any:
    """One that nobody used before."""
    seaweed.bucket("smallputs")
    return seaweed.client(connect_timeout=4)


def signed_by_botocore(client: Any) -> list[str]:
    """Grows with every request that botocore signs."""
    calls: list[str] = []
    client.meta.events.register("before-sign.s3.PutObject", lambda **_: calls.append(""))
    return calls


def arguments(key: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {
        "Bucket": "smallputs", "Key": key, "Body": data,
        "Metadata": {"mode": "33188", "mtime": str(len(data))},
        "ContentType": "application/octet-stream", "ChecksumCRC32": checks_of(data).crc32, **more,
    }  # fmt: skip


def test_the_store_takes_requests_of_our_own_making(client: Any) -> None:
    calls = signed_by_botocore(client)
    keys = ["a", "b c", "d/+plus &=?#%41", "größe/模型", "~tilde!*'()", "/".join(["x" * 200] * 4), "end."]
    for number, key in enumerate(keys):
        data = b"x" * number
        answer = put_object(client, arguments("own/" + key, data))
        head = client.head_object(Bucket="smallputs", Key="own/" + key)
        assert head["ETag"] == answer["ETag"]
        assert head["ContentLength"] == number
        assert head["Metadata"] == {"mode": "33188", "mtime": str(number)}
    assert len(calls) == 1


def test_conditions_and_checksums_are_in_them(client: Any) -> None:
    first = put_object(client, arguments("kept", b"one"))
    calls = signed_by_botocore(client)
    for _ in range(2):  # the first of this kind, and one made from it
        with pytest.raises(ClientError) as info:
            put_object(client, arguments("kept", b"two", IfNoneMatch="*"))
        assert info.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
        with pytest.raises(ClientError):
            put_object(client, arguments("kept", b"two") | {"ChecksumCRC32": checks_of(b"other").crc32})
    assert client.get_object(Bucket="smallputs", Key="kept")["Body"].read() == b"one"
    assert calls
    put_object(client, arguments("kept", b"two", IfMatch=first["ETag"]))
    assert client.get_object(Bucket="smallputs", Key="kept")["Body"].read() == b"two"


def test_a_store_that_takes_only_botocores_requests(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_object(client, arguments("only/1", b"1"))
    monkeypatch.setattr("ckptfs.tiers.s3_quick._Pattern.signature", lambda *_: "0" * 64)
    calls = signed_by_botocore(client)
    for number in range(2, 5):
        put_object(client, arguments(f"only/{number}", b"x"))
    monkeypatch.undo()
    put_object(client, arguments("only/5", b"x"))
    assert len(calls) == 4
    assert client.get_object(Bucket="smallputs", Key="only/4")["Body"].read() == b"x"


def test_a_signature_that_differs_from_botocores_is_never_used(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfs.tiers.s3_quick._Pattern.signature", lambda *_: "0" * 64)
    calls = signed_by_botocore(client)
    put_object(client, arguments("never/1", b"1"))
    put_object(client, arguments("never/2", b"1"))
    assert len(calls) == 3
