"""Multipart uploads: begun, filled, listed, given up; this mount's and others'."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckptfs.tiers import s3_uploads
from ckptfs.tiers.base import Source, TierError, Trouble, Upload, bound_handle, bound_path
from ckptfs.tiers.s3_client import Capabilities
from ckptfs.tiers.s3_uploads import Uploads
from tests.s3.looking import ATTRS, MIB, Place, draft, stage
from tests.s3.servers import Server

pytestmark = pytest.mark.long

_numbers = itertools.count()
CHUNK = 5 * MIB


@pytest.fixture(params=["", "crc32", "md5", "crc32 if_none_match"])
def place(seaweed: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    """An empty prefix of a store with some capabilities."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    bucket = seaweed.bucket("buploads")
    place = Place(seaweed.client(), bucket, f"p{next(_numbers)}/träger", seaweed.endpoint)
    place.store.capabilities = Capabilities(**dict.fromkeys(request.param.split(), True))
    return place


def other(place: Place, uuid: str) -> Uploads:
    """Another mount of the same prefix."""
    return Uploads(place.store, place.keys, uuid, place.objects)


def redo(call: Callable[[], Any]) -> str:
    with pytest.raises(TierError) as caught:
        call()
    assert caught.value.trouble is Trouble.REDO
    return str(caught.value)


def client_with(place: Place, monkeypatch: pytest.MonkeyPatch, **answers: Callable[..., Any]) -> None:
    """Some requests are answered by functions, which get the real client."""
    original = place.store.run

    def run(what: str, job: Callable[[Any], Any]) -> Any:
        def with_answers(real: Any) -> Any:
            class Client:
                def __getattr__(self, name: str) -> Any:
                    answer = answers.get(name)
                    return (lambda **given: answer(real, **given)) if answer else getattr(real, name)

            return job(Client())

        return original(what, with_answers)

    monkeypatch.setattr(place.store, "run", run)


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK + 12345])
def test_what_is_sent_is_what_is_completed(place: Place, tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    source = stage(tmp_path / "staged", data)
    upload = place.uploads.begin(draft("v1", "run/ü".encode(), size))
    assert (bound_path(upload), upload.ident) == ("run/ü".encode(), "me/v1")
    sizes = place.uploads.sizes(size, CHUNK)
    for index in random.Random(1).sample(range(len(sizes)), len(sizes) if size else 0):
        part = replace(source, offset=index * CHUNK, length=sizes[index])
        digest = place.uploads.send(upload, index * CHUNK, part)
        assert digest == xxhash.xxh3_128_digest(data[index * CHUNK : (index + 1) * CHUNK])
    parts = place.uploads.parts(upload)
    assert parts is not None
    assert [(part.number, part.size) for part in parts] == list(enumerate(sizes, 1))
    assert not place.exists("run/ü")
    token = place.complete(upload)
    head = place.head("run/ü")
    assert (head["ETag"], head["ContentLength"]) == (f'"{token}"', size)
    seen = place.objects.head("run/ü".encode())
    assert seen is not None
    assert (seen.ident, seen.attrs, seen.token) == ("me/v1", ATTRS, token)
    assert place.listed(b"run")["ü".encode()].token == token
    assert place.reader.read("run/ü".encode(), token, 0, size + 1) == data
    place.uploads.finished([upload])
    assert not place.exists(".ckptfs/uploads/me/v1")


def test_a_window_of_several_parts(place: Place, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2 * CHUNK + 17)
    upload = place.uploads.begin(draft("v1", b"f", len(data)))
    assert place.uploads.send(upload, 0, stage(tmp_path / "s", data)) == xxhash.xxh3_128_digest(data)
    assert [part.size for part in place.uploads.parts(upload) or ()] == [CHUNK, CHUNK, 17]


def test_parts_in_pages(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = place.uploads.begin(draft("v1", b"f", 7 * 100, chunk=100))
    source = stage(tmp_path / "s", bytes(700))
    place.uploads.send(upload, 0, source)
    client_with(place, monkeypatch, list_parts=lambda real, **given: real.list_parts(**given, MaxParts=2))
    assert [part.number for part in place.uploads.parts(upload) or ()] == [1, 2, 3, 4, 5, 6, 7]


def test_a_part_may_be_sent_again(place: Place, tmp_path: Path) -> None:
    upload = place.uploads.begin(draft("v1", b"f", 5))
    for text in (b"12345", b"abcde"):
        place.uploads.send(upload, 0, stage(tmp_path / "s", text))
    token = place.complete(upload)
    assert place.reader.read(b"f", token, 0, 5) == b"abcde"


def test_a_part_that_is_damaged_on_the_way_is_noticed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(real: Any, **given: Any) -> Any:
        body = given["Body"]
        data = bytearray(body.read())
        data[7] ^= 1
        return real.upload_part(**{**given, "Body": bytes(data)})

    upload = place.uploads.begin(draft("v1", b"f", 100))
    source = stage(tmp_path / "s", bytes(100))
    client_with(place, monkeypatch, upload_part=damaged)
    with pytest.raises(TierError) as caught:
        place.uploads.send(upload, 0, source)
    assert caught.value.trouble is Trouble.DOWN


def test_an_encrypted_part_has_an_etag_that_says_nothing() -> None:
    other = {"ETag": '"' + "0" * 32 + '"'}
    md5 = "1B2M2Y8AsgTpgAmY7PhCfg=="
    assert s3_uploads._differs(other, md5)
    assert not s3_uploads._differs({"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'}, md5)
    assert not s3_uploads._differs({**other, "ServerSideEncryption": "aws:kms"}, md5)
    assert not s3_uploads._differs({**other, "SSECustomerAlgorithm": "AES256"}, md5)
    assert not s3_uploads._differs({"ETag": '"something else"'}, md5)


def test_uploads_that_are_gone(place: Place, tmp_path: Path) -> None:
    upload = place.uploads.begin(draft("v1", b"f", 5))
    source = stage(tmp_path / "s", b"12345")
    place.uploads.send(upload, 0, source)
    for _ in range(2):
        place.uploads.abandon([upload, Upload("inline", "")])
        assert place.uploads.parts(upload) is None
        assert "upload is gone" in redo(lambda: place.uploads.send(upload, 0, source))
    assert place.live() == set()
    assert not place.exists(".ckptfs/uploads/me/v1")


@pytest.mark.parametrize(
    "handle", ["inline", "nonsense", "a\nb\nc\npath", bound_handle(b"f", "5", "0", "no-such-id")]
)
def test_handles_that_are_none(place: Place, tmp_path: Path, handle: str) -> None:
    source = stage(tmp_path / "s", b"12345")
    redo(lambda: place.uploads.send(Upload(handle, "me/v1"), 0, source))


def test_abandoning_leaves_what_is_published(place: Place, tmp_path: Path) -> None:
    upload = place.uploads.begin(draft("v1", b"f", 5))
    place.uploads.send(upload, 0, stage(tmp_path / "s", b"12345"))
    token = place.complete(upload)
    place.uploads.abandon([upload])
    assert place.head("f")["ETag"] == f'"{token}"'


def test_staged_bytes_that_are_gone(place: Place, tmp_path: Path) -> None:
    upload = place.uploads.begin(draft("v1", b"f", 5))
    missing = str(tmp_path / "missing")
    assert missing in redo(lambda: place.uploads.send(upload, 0, Source(missing, 0, 5)))
    short = stage(tmp_path / "short", b"123")
    assert short.ram_path in redo(lambda: place.uploads.send(upload, 0, replace(short, length=5)))


def test_what_cannot_be_sent_is_refused(place: Place, tmp_path: Path) -> None:
    for wrong in (
        draft("v1", b"a//b", 5),
        draft("../v1", b"f", 5),
        draft("v1", b"f", 10_001 * MIB, chunk=MIB),
    ):
        with pytest.raises(TierError) as caught:
            place.uploads.begin(wrong)
        assert caught.value.trouble is Trouble.REFUSED
    assert place.live() == set()
    upload = place.uploads.begin(draft("v1", b"f", CHUNK))
    with pytest.raises(TierError):
        place.uploads.send(upload, 1, stage(tmp_path / "s", b"12345"))


# -- beginning again, and the sweep --------------------------------------------------------------


def test_beginning_again_aborts_what_was_begun(place: Place, tmp_path: Path) -> None:
    first = place.uploads.begin(draft("v1", b"f", 5))
    second = place.uploads.begin(draft("v1", b"g", 5))
    redo(lambda: place.uploads.send(first, 0, stage(tmp_path / "s", b"12345")))
    assert place.live() == {place.uploads.opened(second).upload_id}


@pytest.mark.parametrize("lost", ["before", "after"])
def test_beginning_again_after_a_lost_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def create(real: Any, **given: Any) -> Any:
        if lost == "after":
            real.create_multipart_upload(**given)
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        client_with(place, patch, create_multipart_upload=create)
        with pytest.raises(TierError) as caught:
            place.uploads.begin(draft("v1", b"f", 5))
        assert caught.value.trouble is Trouble.DOWN
    assert len(place.live()) == (lost == "after")
    upload = place.uploads.begin(draft("v1", b"f", 5))
    assert place.live() == {place.uploads.opened(upload).upload_id}


def test_the_sweep_aborts_only_what_this_mount_began_and_does_not_keep(place: Place) -> None:
    kept = place.uploads.begin(draft("kept", b"d/f", 5))
    place.uploads.begin(draft("gone", b"d/f", 5))
    place.uploads.begin(draft("gone2", b"d/f2", 5))
    theirs = other(place, "they").begin(draft("gone", b"d/f", 5))
    foreign = place.client.create_multipart_upload(Bucket=place.bucket, Key=place.base + "d/f")["UploadId"]
    keep = frozenset({kept.handle, "inline", "nonsense"})
    assert place.uploads.sweep(keep) == 2
    assert place.uploads.sweep(keep) == 0
    assert place.live() == {
        place.uploads.opened(kept).upload_id,
        place.uploads.opened(theirs).upload_id,
        foreign,
    }
    assert place.uploads.sweep(frozenset()) == 1
    assert other(place, "m").sweep(frozenset()) == 0
    assert len(place.live()) == 2
    assert not place.exists(".ckptfs/uploads/me/kept")
    assert place.exists(".ckptfs/uploads/they/gone")


def unnamed(place: Place, uuid: str = "me", key: str = "d/f") -> str:
    """What a crash leaves between the creation of an upload and the record of its id."""
    place.put(f".ckptfs/uploads/{uuid}/crashed", (place.base + key).encode())
    return str(place.client.create_multipart_upload(Bucket=place.bucket, Key=place.base + key)["UploadId"])


def test_the_sweep_finds_what_a_crash_left_without_a_name(place: Place) -> None:
    kept = place.uploads.begin(draft("kept", b"d/f", 5))
    theirs = other(place, "they").begin(draft("v1", b"d/f", 5))
    unnamed(place)
    longer = place.client.create_multipart_upload(Bucket=place.bucket, Key=place.base + "d/f2")["UploadId"]
    assert place.uploads.sweep(frozenset({kept.handle})) == 1
    assert place.live() == {
        place.uploads.opened(kept).upload_id,
        place.uploads.opened(theirs).upload_id,
        longer,
    }
    assert not place.exists(".ckptfs/uploads/me/crashed")


def test_the_sweep_leaves_what_was_begun_at_another_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = unnamed(place)
    monkeypatch.setattr(s3_uploads, "_BEFORE", timedelta(seconds=-100))
    assert place.uploads.sweep(frozenset()) == 0
    assert place.live() == {upload_id}


def test_the_sweep_leaves_what_may_be_another_mounts(place: Place) -> None:
    place.put(".ckptfs/uploads/they/crashed", (place.base + "d/f").encode())
    upload_id = unnamed(place)
    assert place.uploads.sweep(frozenset()) == 0
    assert place.live() == {upload_id}


@pytest.mark.parametrize("body", [b"", b"\xff", b"another/prefix", b"x" * 5000])
def test_records_that_are_none(place: Place, body: bytes) -> None:
    place.put(".ckptfs/uploads/me/odd", body)
    foreign = place.client.create_multipart_upload(Bucket=place.bucket, Key=place.base + "f")["UploadId"]
    assert place.uploads.sweep(frozenset()) == 0
    assert place.live() == {foreign}
    assert not place.exists(".ckptfs/uploads/me/odd")


def test_records_of_published_uploads_are_forgotten(place: Place, tmp_path: Path) -> None:
    upload = place.uploads.begin(draft("v1", b"f", 5))
    place.uploads.send(upload, 0, stage(tmp_path / "s", b"12345"))
    place.complete(upload)
    assert place.uploads.sweep(frozenset()) == 0
    assert place.exists("f")
    assert not place.exists(".ckptfs/uploads/me/v1")


def test_on_a_store_where_uploads_have_a_checksum_algorithm(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS: told at creation, and listed with the parts."""
    if not place.store.capabilities.crc32:
        pytest.skip("needs checksums")
    place.store.capabilities = replace(place.store.capabilities, crc32_listed=True)
    sent: dict[int, str] = {}

    def create(real: Any, **given: Any) -> Any:
        assert given["ChecksumAlgorithm"] == "CRC32"
        return real.create_multipart_upload(**given)

    def part(real: Any, **given: Any) -> Any:
        sent[given["PartNumber"]] = given["ChecksumCRC32"]
        return real.upload_part(**given)

    def listed(real: Any, **given: Any) -> Any:
        answer = real.list_parts(**given)
        for item in answer["Parts"]:
            item["ChecksumCRC32"] = sent[item["PartNumber"]]
        return answer

    client_with(place, monkeypatch, create_multipart_upload=create, upload_part=part, list_parts=listed)
    data = random.Random(1).randbytes(CHUNK + 3)
    upload = place.uploads.begin(draft("v1", b"f", len(data)))
    place.uploads.send(upload, 0, stage(tmp_path / "s", data))
    token = place.complete(upload)
    assert place.reader.read(b"f", token, 0, len(data)) == data
