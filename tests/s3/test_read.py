"""Looking at an object store and reading from it: ours, others', and what is in between."""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckptfs.tiers import s3_objects, s3_read
from ckptfs.tiers.base import Attrs, Digest, Kind, TierError, Trouble
from ckptfs.tiers.file_records import Record
from ckptfs.tiers.s3_meta import pack, seconds
from tests.s3.looking import ATTRS, MIB, Place, date_of
from tests.s3.proxy import Proxy
from tests.s3.servers import Server

pytestmark = pytest.mark.long

_numbers = itertools.count()


@pytest.fixture(params=["p/q", ""])
def place(seaweed: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """An empty prefix: below others' keys, and a whole bucket."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    bucket = seaweed.bucket(f"breading{next(_numbers)}")
    place = Place(seaweed.client(), bucket, request.param, seaweed.endpoint)
    if request.param:
        place.client.put_object(Bucket=bucket, Key="p/q-beside", Body=b"another prefix")
    return place


def trouble(call: Callable[[], Any], kind: Trouble = Trouble.CHANGED) -> TierError:
    with pytest.raises(TierError) as caught:
        call()
    assert caught.value.trouble is kind, caught.value
    return caught.value


# -- listings ------------------------------------------------------------------------------------


def test_nothing_is_an_empty_root(place: Place) -> None:
    assert place.listed() == {}
    root = place.reader.stat(b"")
    assert root is not None
    assert (root.kind, root.token, root.attrs.mode) == (Kind.DIR, "dir", 0o755)
    assert place.reader.stat(b"none") is None
    assert trouble(lambda: place.reader.listdir(b"none")).errno == errno.ENOENT


def test_objects_of_anybody(place: Place) -> None:
    tokens = {
        b"plain": place.put("plain", b"12345"),
        b"empty": place.put("empty"),
        b"rclone": place.put("rclone", b"r", {"mtime": "1700000000.123456789"}),
        b"ours": place.put("ours", b"o", pack(Kind.FILE, ATTRS, "me/v1")),
        b"link": place.put("link", b"where/\xff", pack(Kind.LINK, ATTRS, "me/link-1")),
        b"a b+c%41&\n": place.put("a b+c%41&\n", b"x"),
        "ü€".encode(): place.put("ü€", b"x"),
    }
    found = place.listed()
    assert {name: item.token for name, item in found.items()} == tokens
    assert {item.kind for name, item in found.items() if name != b"link"} == {Kind.FILE}
    date = date_of(place.head("plain"))
    assert found[b"plain"].attrs == Attrs(0o644, os.geteuid(), os.getegid(), date, date)
    assert (found[b"plain"].size, found[b"empty"].size, found[b"plain"].ident) == (5, 0, "")
    assert found[b"rclone"].attrs.mtime_ns == ATTRS.mtime_ns
    assert (found[b"ours"].attrs, found[b"ours"].ident) == (ATTRS, "me/v1")
    assert (found[b"link"].kind, found[b"link"].target, found[b"link"].size) == (Kind.LINK, b"where/\xff", 7)


def test_more_than_one_page(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def listing(real: Any, **request: Any) -> Any:
        return real.list_objects_v2(**{**request, "MaxKeys": 7})

    Answers(place, monkeypatch, list_objects_v2=listing)
    names = {b"d/%03d" % n: n for n in range(50)}
    for name in names:
        place.put(name.decode())
    for n in range(20):
        place.put(f"d/sub{n}/x")
    place.put("e")
    assert {b"d/" + name for name in place.listed(b"d")} == set(names) | {b"d/sub%d" % n for n in range(20)}
    assert set(place.listed()) == {b"d", b"e"}
    assert len(place.objects.below(place.base + "d/")) == 70


def test_directories(place: Place) -> None:
    place.put("marker/", b"", {"mode": str(stat.S_IFDIR | 0o700)}, ContentType="application/x-directory")
    place.put("implied/a/b", b"x")
    place.put("both/")
    place.put("both/x", b"x")
    found = place.listed()
    assert set(found) == {b"marker", b"implied", b"both"}
    assert {(item.kind, item.token, item.ident) for item in found.values()} == {(Kind.DIR, "dir", "dir")}
    assert place.listed(b"marker") == {}
    assert set(place.listed(b"implied")) == {b"a"}
    assert set(place.listed(b"both")) == {b"x"}
    assert found[b"implied"].attrs.mtime_ns == date_of(place.head("implied/a/b"))
    place.put("file", b"x")
    for path in (b"file", b"file/x", b"file/x/y"):
        assert trouble(lambda path=path: place.reader.listdir(path)).errno == errno.ENOTDIR
        assert path == b"file" or place.reader.stat(path) is None


def test_a_directory_whose_last_object_is_gone_is_gone(place: Place) -> None:
    """SeaweedFS goes on showing it as a prefix."""
    place.put("d/e/f", b"x")
    assert set(place.listed()) == {b"d"}
    place.delete("d/e/f")
    assert place.listed() == {}
    assert place.reader.stat(b"d") is None
    assert place.reader.stat(b"d/e") is None
    for path in (b"d", b"d/e"):
        assert trouble(lambda path=path: place.reader.listdir(path)).errno == errno.ENOENT


def test_a_directory_wins_over_an_object_of_its_name(place: Place) -> None:
    place.put("q", b"object")
    place.put("q/r", b"inside")
    assert place.listed()[b"q"].kind is Kind.DIR
    assert set(place.listed(b"q")) == {b"r"}
    assert place.objects.hidden == 1


def test_what_the_mount_cannot_show_is_left_out(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.put("good", b"x")
    place.put("ctl\x01", b"x")
    place.put("pipe", b"", {"mode": str(stat.S_IFIFO | 0o644)})
    place.put(".ckptfs-other", b"x")
    place.put(".ckptfs/tier-id", b"x")
    for _ in range(2):
        assert set(place.listed()) == {b"good"}
    assert place.objects.hidden == 2
    assert sum("not shown" in record.message for record in caplog.records) == 2
    for path in (
        b"pipe",
        b"ctl\x01",
        b"\xff",
        b".ckptfs",
        b".ckptfs/tier-id",
        b"x" * 300,
        b"a//b",
        b".",
        b"../x",
    ):
        assert place.reader.stat(path) is None
        assert place.reader.digests(path, "x") == ()
        assert trouble(lambda path=path: place.reader.listdir(path)).errno in (errno.ENOENT, errno.ENOTDIR)


class Answers:
    """A store whose answers are given: what real ones do that the one at hand does not."""

    def __init__(self, place: Place, monkeypatch: pytest.MonkeyPatch, **answers: Callable[..., Any]) -> None:
        original, client = place.store.run, self
        self.answers = answers

        def run(what: str, job: Callable[[Any], Any]) -> Any:
            def with_answers(real: Any) -> Any:
                client.real = real
                return job(client)

            return original(what, with_answers)

        monkeypatch.setattr(place.store, "run", run)
        self.real: Any = None

    def __getattr__(self, name: str) -> Any:
        answer = self.answers.get(name)
        return (lambda **request: answer(self.real, **request)) if answer else getattr(self.real, name)


def test_keys_that_only_other_stores_have(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("d/ok", b"x")
    base = place.base.replace(" ", "+")

    def listing(real: Any, **request: Any) -> Any:
        answer = real.list_objects_v2(**request)
        if request.get("Delimiter"):
            like = answer.get("Contents", [{}])[0] if answer.get("Contents") else None
            odd = ["%2Flead", "..", ".", "not%FFutf8", "ctl%01", "x" * 300]
            if like:
                answer["Contents"] += [{**like, "Key": base + "d/" + key} for key in odd]
            answer["CommonPrefixes"] = [
                *answer.get("CommonPrefixes", []),
                *({"Prefix": base + "d/" + key} for key in ("/", "../", "%01/", ".ckptfs/")),
            ]
        return answer

    Answers(place, monkeypatch, list_objects_v2=listing)
    assert {item.name for item in place.reader.listdir(b"d")} == {b"ok"}
    assert place.objects.hidden >= 8


def test_objects_that_change_between_the_listing_and_the_look(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        place.put(name, b"old")
    token = ""

    def listing(real: Any, **request: Any) -> Any:
        nonlocal token
        answer = real.list_objects_v2(**request)
        if request.get("Delimiter") and not token:
            token = place.put("a", b"new and longer")
            place.delete("b")
        return answer

    Answers(place, monkeypatch, list_objects_v2=listing)
    found = {item.name: item for item in place.reader.listdir(b"")}
    assert set(found) == {b"a", b"c"}
    assert (found[b"a"].token, found[b"a"].size) == (token, 14)


def test_an_object_whose_head_is_refused_is_shown(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a customer's key, say."""
    token = place.put("locked", b"12345")
    refusal = place.client.exceptions.ClientError(
        {"Error": {"Code": "400"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "HeadObject"
    )

    def head(real: Any, **request: Any) -> Any:
        raise refusal

    Answers(place, monkeypatch, head_object=head)
    found = place.listed()[b"locked"]
    assert (found.size, found.token, found.attrs.mode) == (5, token, 0o644)


def test_a_head_is_asked_for_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def head(real: Any, **request: Any) -> Any:
        asked.append(request["Key"])
        return real.head_object(**request)

    Answers(place, monkeypatch, head_object=head)
    monkeypatch.setattr(s3_objects, "SETTLED", s3_objects.SETTLED * 0)
    place.put("d/a", b"1")
    place.put("d/b", b"2")
    place.reader.listdir(b"d")
    assert len(asked) == 2
    place.reader.listdir(b"d")
    assert len(asked) == 2
    place.put("d/a", b"3")
    place.reader.listdir(b"d")
    assert len(asked) == 3


def test_a_young_object_is_looked_at_again(place: Place) -> None:
    """The same bytes with other metadata, within the second that dates have."""
    place.put("f", b"", pack(Kind.FILE, ATTRS, "me/v1"))
    assert place.listed()[b"f"].ident == "me/v1"
    place.put("f", b"", pack(Kind.FILE, replace(ATTRS, mtime_ns=5), "me/v2"))
    found = place.listed()[b"f"]
    assert (found.ident, found.attrs.mtime_ns) == ("me/v2", 5)


# -- records -------------------------------------------------------------------------------------


def test_late_attributes(place: Place) -> None:
    token = place.put("d/f", b"x", pack(Kind.FILE, ATTRS, "me/v1"))
    place.put("d/e/", b"")
    later, below = replace(ATTRS, mode=0o400, mtime_ns=5), replace(ATTRS, mode=0o711)
    assert place.attrs.put(b"d/f", Kind.FILE, token, later)
    assert place.attrs.put(b"d/e", Kind.DIR, "", below)
    assert place.attrs.put(b"d", Kind.DIR, "", below)
    assert place.attrs.put(b"", Kind.DIR, "", replace(below, mode=0o700))
    found = place.listed(b"d")
    assert (found[b"f"].attrs, found[b"e"].attrs) == (later, below)
    assert place.listed()[b"d"].attrs == below
    assert place.reader.attrs_of_dir(b"").mode == 0o700
    record = place.attrs.get(b"d/f")
    assert record is not None
    assert (record.kind, record.token) == (Kind.FILE, token)
    assert place.attrs.get(b"d/f", Kind.DIR) is None

    place.put("d/f", b"other bytes")  # the record is not about these
    assert place.listed(b"d")[b"f"].attrs.mode == 0o644
    place.attrs.drop(b"d/e", Kind.DIR)
    place.attrs.drop(b"d/e", Kind.DIR)
    assert place.listed(b"d")[b"e"].attrs.mode != 0o711


def test_records_move_with_their_tree(place: Place) -> None:
    for path in (b"a", b"a/b", b"a/b/c", b"ab"):
        place.attrs.put(path, Kind.DIR, "", replace(ATTRS, mode=len(path)))
    for _ in range(2):
        place.attrs.move(b"a", b"x/y")
        modes = {
            path: r.attrs.mode
            for path in (b"x/y", b"x/y/b", b"x/y/b/c", b"ab")
            if (r := place.attrs.get(path))
        }
        assert modes == {b"x/y": 1, b"x/y/b": 3, b"x/y/b/c": 5, b"ab": 2}
        assert all(place.attrs.get(path) is None for path in (b"a", b"a/b", b"a/b/c"))


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b'{"kind": 1}', b"\xff", b'{"kind":1,"token":"x","mode":"7"}']
)
def test_records_that_are_none_are_ignored(place: Place, data: bytes) -> None:
    place.put("f", b"x")
    place.client.put_object(Bucket=place.bucket, Key=place.attrs.key(b"f"), Body=data)
    assert place.listed()[b"f"].attrs.mode == 0o644


# -- reading -------------------------------------------------------------------------------------


def blob(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def ours(place: Place, data: bytes, chunk: int = MIB) -> str:
    """A large object of ours, with its manifest."""
    digests = tuple(
        Digest(at, min(chunk, len(data) - at), xxhash.xxh3_128_digest(data[at : at + chunk]))
        for at in range(0, len(data), chunk)
    )
    place.manifests.put("me/v1", Record(len(data), ATTRS.mtime_ns, "v1", digests))
    return place.put("f", data, pack(Kind.FILE, ATTRS, "me/v1"))


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 3 * MIB),
        (0, 1),
        (MIB - 3, 7),
        (2 * MIB, 50 * MIB),
        (0, 1 << 62),
        (3 * MIB, 4),
        (9 * MIB, 1),
        (5, 0),
    ],
)
def test_ranges(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, length: int
) -> None:
    monkeypatch.setattr(s3_read, "PIECE", 300_000)
    data = blob(3 * MIB)
    token = ours(place, data)
    part = data[offset : offset + length]
    assert place.reader.read(b"f", token, offset, length) == part
    into = tmp_path / "local"
    into.write_bytes(bytes(len(data)))
    assert place.reader.fetch(b"f", token, offset, length, str(into)) == len(part)
    assert into.read_bytes()[offset : offset + len(part)] == part


def test_an_empty_object(place: Place) -> None:
    token = place.put("f", b"", pack(Kind.FILE, ATTRS, "me/v1", xxhash.xxh3_128_digest(b"")))
    assert place.reader.read(b"f", token, 0, 100) == b""
    assert place.reader.digests(b"f", token) == ()


def test_digests(place: Place) -> None:
    data = blob(2 * MIB + 5)
    token = ours(place, data)
    assert [item.length for item in place.reader.digests(b"f", token)] == [MIB, MIB, 5]
    assert place.reader.digests(b"f", "other") == ()
    assert place.reader.digests(b"none", token) == ()
    small = xxhash.xxh3_128_digest(b"small")
    token = place.put("s", b"small", pack(Kind.FILE, ATTRS, "me/v2", small))
    assert place.reader.digests(b"s", token) == (Digest(0, 5, small),)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_flipped_byte_is_corruption(place: Place, tmp_path: Path, manifest: bool) -> None:
    data = blob(3 * MIB)
    rotten = data[: MIB + 7] + bytes([data[MIB + 7] ^ 1]) + data[MIB + 8 :]
    into = tmp_path / "local"
    into.write_bytes(b"")
    if manifest:
        ours(place, data)
        token = place.put("f", rotten, pack(Kind.FILE, ATTRS, "me/v1"))
    else:
        token = place.put("f", rotten, pack(Kind.FILE, ATTRS, "me/v1", xxhash.xxh3_128_digest(data)))
    for call in (
        lambda: place.reader.read(b"f", token, 0, len(data)),
        lambda: place.reader.fetch(b"f", token, 0, len(data), str(into)),
    ):
        assert trouble(call, Trouble.CORRUPT).errno == errno.EIO
    assert place.reader.read(b"f", token, 0, MIB) == data[:MIB]


def test_a_byte_that_is_damaged_on_the_way_is_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blob(2 * MIB)
    token = ours(place, data)
    damaged = []

    def get(real: Any, **request: Any) -> Any:
        answer = real.get_object(**request)
        body = answer["Body"]
        if request["Key"] == place.base + "f" and not damaged:
            damaged.append(request)
            read = body.read
            body.read = lambda n: bytes([read(1)[0] ^ 1]) + read(n - 1)
        return answer

    Answers(place, monkeypatch, get_object=get)
    assert place.reader.read(b"f", token, 0, 2 * MIB) == data
    assert damaged


def test_what_another_writer_put_there_is_never_corrupt(place: Place) -> None:
    data = blob(2 * MIB)
    token = ours(place, data)
    # s3fs keeps what metadata it does not know, and sets the time
    metadata = {**pack(Kind.FILE, ATTRS, "me/v1", bytes(16)), "mtime": seconds(5)}
    changed = place.put("f", data[::-1], metadata)
    assert place.reader.digests(b"f", changed) == ()
    assert place.reader.read(b"f", changed, 0, len(data)) == data[::-1]
    trouble(lambda: place.reader.read(b"f", token, 0, len(data)))
    plain = place.put("f", b"plain")
    assert place.reader.read(b"f", plain, 0, 100) == b"plain"


@pytest.mark.parametrize("gone", [True, False])
def test_reading_what_changed(place: Place, tmp_path: Path, gone: bool) -> None:
    token = place.put("f", b"data")
    place.delete("f") if gone else place.put("f", b"more data")
    into = tmp_path / "local"
    into.write_bytes(b"")
    for offset, length in ((0, 4), (0, 0), (50, 4), (0, 1 << 40)):
        assert trouble(lambda o=offset, n=length: place.reader.read(b"f", token, o, n)).errno == errno.ESTALE
        trouble(lambda o=offset, n=length: place.reader.fetch(b"f", token, o, n, str(into)))


def test_an_object_that_changes_between_its_pieces(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_read, "PIECE", 300_000)
    token = ours(place, blob(3 * MIB))
    once: list[str] = []

    def get(real: Any, **request: Any) -> Any:
        answer = real.get_object(**request)
        if not once:
            once.append(place.put("f", blob(3 * MIB)[::-1]))
        return answer

    Answers(place, monkeypatch, get_object=get)
    trouble(lambda: place.reader.read(b"f", token, 0, 1 << 40))


def test_a_store_that_does_not_look_at_conditions(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    token = place.put("f", b"data")
    place.put("f", b"others")

    def get(real: Any, **request: Any) -> Any:
        request.pop("IfMatch", None)
        return real.get_object(**request)

    Answers(place, monkeypatch, get_object=get)
    trouble(lambda: place.reader.read(b"f", token, 0, 4))


# -- what goes wrong on the way ------------------------------------------------------------------


@pytest.fixture
def proxy(seaweed: Server, place: Place) -> Iterator[Proxy]:
    """Between the place and its store."""
    with Proxy(seaweed) as made:
        place.through(made.endpoint)
        yield made


def test_a_connection_that_breaks_in_mid_body(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    data = blob(2 * MIB)
    token = ours(place, data)
    into = tmp_path / "local"
    into.write_bytes(bytes(len(data)))
    proxy.faults.add(operation="GetObject", key="f$", cut_answer=MIB + 5)
    for call in (
        lambda: place.reader.read(b"f", token, 0, len(data)),
        lambda: place.reader.fetch(b"f", token, 0, len(data), str(into)),
    ):
        trouble(call, Trouble.DOWN)
    proxy.faults.end()
    assert place.reader.read(b"f", token, 0, len(data)) == data


def test_a_byte_damaged_on_the_network_is_read_again(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    data = blob(2 * MIB)
    token = ours(place, data)
    into = tmp_path / "local"
    into.write_bytes(bytes(len(data)))
    fault = proxy.faults.add(operation="GetObject", key="f$", flip_answer=MIB + 5, times=1)
    assert place.reader.fetch(b"f", token, 0, len(data), str(into)) == len(data)
    assert into.read_bytes() == data
    assert fault.hits == 1
    proxy.faults.add(operation="GetObject", key="f$", flip_answer=5)
    trouble(lambda: place.reader.read(b"f", token, 0, len(data)), Trouble.CORRUPT)


@pytest.mark.parametrize(
    ("status", "name", "kind"),
    [
        (500, "InternalError", Trouble.DOWN),
        (403, "AccessDenied", Trouble.REFUSED),
        (404, "NoSuchBucket", Trouble.REFUSED),
    ],
)
@pytest.mark.parametrize("operation", ["ListObjectsV2", "HeadObject", "GetObject"])
def test_a_store_in_trouble_is_never_an_empty_one(
    place: Place, proxy: Proxy, operation: str, status: int, name: str, kind: Trouble
) -> None:
    token = place.put("d/f", b"data")
    place.attrs.put(b"d/f", Kind.FILE, token, ATTRS)
    if operation == "HeadObject" and kind is Trouble.REFUSED:
        pytest.skip("says something about the one object")
    proxy.faults.add(operation=operation, answer=(status, name))
    if operation == "GetObject":
        trouble(lambda: place.reader.read(b"d/f", token, 0, 4), kind)
    trouble(lambda: place.reader.listdir(b"d"), kind)
    trouble(lambda: place.reader.stat(b"d/f"), kind)


def test_fetching_into_nothing(place: Place, tmp_path: Path) -> None:
    token = place.put("f", b"data")
    trouble(lambda: place.reader.fetch(b"f", token, 0, 4, str(tmp_path / "none")), Trouble.REDO)


def test_the_identity_of_others_cannot_lead_anywhere(place: Place) -> None:
    for ident in ("../../x", "a/b/c", "me/..", "me/", "x" * 500, "me/ü"[:3]):
        token = place.put("f", b"data", {"ckptfs-version": ident})
        assert place.reader.digests(b"f", token) == ()
        assert place.reader.read(b"f", token, 0, 4) == b"data"
        place.manifests.drop(ident)
        assert place.manifests.key(ident).endswith(".ckptfs/manifests/none")
