"""The probe of an object store: what it finds out, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cli.main import run
from ckptfs.errors import Exit
from ckptfs.tiers import s3_probe, s3_scratch
from ckptfs.tiers.base import TierError, Trouble
from ckptfs.tiers.s3_client import Capabilities, Store
from ckptfs.tiers.s3_keys import Keys
from ckptfs.tiers.s3_probe import Probe, probe
from ckptfs.tiers.s3_scratch import Scratch
from tests.s3.proxy import Proxy, ranking_of
from tests.s3.servers import Server

pytestmark = pytest.mark.long

_numbers = itertools.count()

ALL = Capabilities(crc32=True, md5=True, if_none_match=True, if_match=True, part_copy=True)


@dataclass
class Site:
    """A fresh bucket, and what is asked of it."""

    server: Server
    bucket: str
    prefix: bytes = b"a prefix"
    endpoints: tuple[str, ...] = ()

    def store(self, **options: str) -> Store:
        endpoints = " ".join(self.endpoints or (self.server.endpoint,))
        return Store(self.bucket, self.prefix, {"endpoint_url": endpoints, **options})

    def probe(self, tier_id: str = "") -> Any:
        return probe(self.store(), Keys(self.prefix), "s3://x", tier_id)

    def examined(self) -> tuple[dict[str, tuple[str, str]], TierError | None]:
        """The findings by name, and why it ended."""
        examination = Probe(self.store(), Keys(self.prefix), "s3://x")
        error = None
        try:
            examination.run(identify=False)
        except TierError as exc:
            error = exc
        return {one.name: (one.state.value, one.text) for one in examination.findings}, error

    def left(self) -> tuple[list[str], list[str]]:
        """Keys (of all versions) and uploads that are in the bucket."""
        client = self.server.client()
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=self.bucket).get("Contents", ())]
        versions = client.list_object_versions(Bucket=self.bucket)
        keys += [item["Key"] for kind in ("Versions", "DeleteMarkers") for item in versions.get(kind, ())]
        uploads = client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())
        return sorted(set(keys)), [item["Key"] for item in uploads]


@pytest.fixture
def site(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    return Site(seaweed, seaweed.bucket(f"probe{next(_numbers)}"))


@pytest.fixture
def fake(moto: Server, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    return Site(moto, moto.bucket(f"probe{next(_numbers)}"))


@pytest.fixture
def proxy(site: Site) -> Iterator[Proxy]:
    with Proxy(site.server) as made:
        site.endpoints = (made.endpoint,)
        yield made


def caught(call: Callable[[], Any]) -> TierError:
    with pytest.raises(TierError) as found:
        call()
    assert "\n" not in found.value.message
    return found.value


# -- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [b"", b"a/b c"])
def test_seaweedfs(site: Site, prefix: bytes) -> None:
    site.prefix = prefix
    started = time.monotonic()
    info = site.probe()
    assert time.monotonic() - started < 10  # 0.2 s where nothing else runs
    assert Capabilities.from_json(info.caps) == ALL
    assert (info.url, info.durable, info.largest) == ("s3://x", True, 5 << 40)
    assert len(info.notes) == 1
    assert "SeaweedFS" in info.notes[0]
    assert "verifies CRC32 and MD5, conditional writes, part copy" in info.notes[0]
    again = site.probe(info.tier_id)
    assert again.tier_id == info.tier_id
    assert len(info.tier_id) == 32
    where = (prefix + b"/" if prefix else b"").decode()
    assert site.left() == ([f"{where}.ckptfs/tier-id"], [])
    findings, error = site.examined()
    assert error is None
    assert findings["overlapping uploads"] == ("note", "the last Complete wins")
    assert findings["backslash in names"][0] == "note"  # it makes a slash of it
    assert findings["small parts"][1].startswith("of less than 5 MiB are refused")
    assert {name for name, (state, _) in findings.items() if state == "no"} == set()
    assert site.left() == ([f"{where}.ckptfs/tier-id"], [])


def test_moto_is_seen_to_verify_nothing(fake: Site) -> None:
    info = fake.probe()
    found = Capabilities.from_json(info.caps)
    assert (found.crc32, found.md5) == (False, False)
    assert found.part_copy
    assert any("verifies no checksums" in note for note in info.notes)
    assert fake.left() == (["a prefix/.ckptfs/tier-id"], [])


def test_a_look_leaves_nothing(site: Site) -> None:
    _, error = site.examined()
    assert error is None
    assert site.left() == ([], [])


def test_the_ranking_of_aws(site: Site) -> None:
    with Proxy(site.server, ranking=ranking_of(site.server)) as proxy:
        site.endpoints = (proxy.endpoint,)
        findings, error = site.examined()
    assert error is None
    assert findings["overlapping uploads"] == ("note", "an upload ranks by its start, as on AWS")
    assert site.left() == ([], [])


def test_a_versioned_bucket_is_told_and_left_without_versions(fake: Site) -> None:
    fake.server.client().put_bucket_versioning(
        Bucket=fake.bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    info = fake.probe()
    assert any("versioning of the bucket is on" in note for note in info.notes)
    assert fake.left() == (["a prefix/.ckptfs/tier-id"], [])


@pytest.mark.parametrize("odd", [(501, "NotImplemented"), (400, "InvalidArgument"), (403, "AccessDenied")])
@pytest.mark.parametrize(
    ("operation", "lost", "note"),
    [
        ("UploadPartCopy", "part_copy", "no part copy"),
        ("GetBucket", "", ""),  # GetBucketVersioning
        ("DeleteObjects", "", ""),
        ("CopyObject", "", ""),
    ],
)
def test_what_ckptfs_does_without(
    site: Site, proxy: Proxy, operation: str, lost: str, note: str, odd: tuple[int, str]
) -> None:
    fault = proxy.faults.add(operation=operation, answer=odd)
    info = site.probe()
    assert fault.hits
    found = Capabilities.from_json(info.caps)
    assert {
        name for name in Capabilities.__dataclass_fields__ if getattr(found, name) != getattr(ALL, name)
    } == ({lost} if lost else set())
    assert not note or any(note in one for one in info.notes)
    assert site.left() == (["a prefix/.ckptfs/tier-id"], [])


def lose(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Parameters of requests are lost on the way to the store."""
    ask = Scratch.ask

    def less(self: Scratch, method: str, name: str = "", **params: Any) -> Any:
        return ask(self, method, name, **{key: value for key, value in params.items() if key not in names})

    monkeypatch.setattr(Scratch, "ask", less)


def test_a_store_that_ignores_everything_special(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "ChecksumCRC32", "ContentMD5", "IfMatch", "IfNoneMatch")
    info = site.probe()
    assert Capabilities.from_json(info.caps) == Capabilities(part_copy=True)
    assert any("verifies no checksums" in note for note in info.notes)
    assert any("no conditional writes" in note for note in info.notes)
    findings, _ = site.examined()
    assert findings["conditional read"][0] == "no"


@pytest.mark.parametrize(("sums", "kept"), [("ChecksumCRC32", "md5"), ("ContentMD5", "crc32")])
def test_a_store_that_verifies_one_kind(
    site: Site, monkeypatch: pytest.MonkeyPatch, sums: str, kept: str
) -> None:
    lose(monkeypatch, sums)
    info = site.probe()
    found = Capabilities.from_json(info.caps)
    assert (found.crc32, found.md5) == (kept == "crc32", kept == "md5")
    assert any("Content-MD5 is sent instead" in note for note in info.notes) is (kept == "md5")


# -- what cannot be a tier -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        "ListObjectsV2", "PutObject", "HeadObject", "GetObject", "DeleteObject", "CreateMultipartUpload",
        "UploadPart", "ListParts", "CompleteMultipartUpload", "AbortMultipartUpload",
    ],
)  # fmt: skip
def test_a_verb_that_is_not_allowed_is_named(site: Site, proxy: Proxy, operation: str) -> None:
    fault = proxy.faults.add(operation=operation, answer=(403, "AccessDenied"))
    error = caught(site.probe)
    assert fault.hits
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EACCES)
    assert "access is denied" in error.message
    if operation not in ("ListObjectsV2", "GetObject"):  # asked for first, when the bucket is looked at
        assert operation in error.message
    proxy.faults.end()
    site.endpoints = ()
    site.probe()
    assert [key for key in site.left()[0] if "tier-id" not in key] == [] or operation == "DeleteObject"


def test_no_such_bucket(site: Site) -> None:
    site.bucket = "never-made"
    error = caught(site.probe)
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.ENOENT)
    assert "s3://never-made/a prefix" in error.message
    assert "create it" in error.message
    assert "never-made" not in [b["Name"] for b in site.server.client().list_buckets()["Buckets"]]


def test_wrong_credentials(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    error = caught(site.probe)
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EACCES)
    assert "correct the credentials" in error.message
    assert "hush" not in error.message


def test_a_store_that_loses_metadata(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "Metadata")
    error = caught(site.probe)
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EOPNOTSUPP)
    assert "metadata" in error.message
    assert site.left() == ([], [])


def test_another_bucket_in_its_place(site: Site) -> None:
    known = site.probe().tier_id
    error = caught(lambda: site.probe("0" * 32))
    assert (error.trouble, error.errno) == (Trouble.DOWN, errno.ENODEV)
    assert known in error.message
    site.server.client().delete_object(Bucket=site.bucket, Key="a prefix/.ckptfs/tier-id")
    error = caught(lambda: site.probe(known))
    assert (error.trouble, error.errno) == (Trouble.DOWN, errno.ENOENT)
    assert "emptied" in error.message
    assert site.left() == ([], [])


def test_two_mounts_at_once_agree_on_the_identity(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    other = site.store()
    identify = Probe._identify

    def late(self: Probe, capabilities: Capabilities) -> str:
        other.run(
            "",
            lambda c: c.put_object(Bucket=site.bucket, Key="a prefix/.ckptfs/tier-id", Body=b"the other's\n"),
        )
        return identify(self, capabilities)

    monkeypatch.setattr(Probe, "_identify", late)
    assert site.probe().tier_id == "the other's"


# -- endpoints -----------------------------------------------------------------------------------


def test_a_dead_endpoint_is_told(site: Site) -> None:
    site.endpoints = ("http://127.0.0.1:1", site.server.endpoint)
    info = site.probe()
    assert any(
        "endpoint http://127.0.0.1:1 did not answer: " in note and "Connection refused" in note
        for note in info.notes
    )
    site.endpoints = ("http://127.0.0.1:1",)
    error = caught(site.probe)
    assert (error.trouble, error.errno) == (Trouble.DOWN, errno.ECONNREFUSED)
    assert "http://127.0.0.1:1 (Connection refused)" in error.message


def test_endpoints_of_different_stores(site: Site, moto: Server) -> None:
    moto.bucket(site.bucket)
    site.probe()
    site.endpoints = (site.server.endpoint, moto.endpoint)
    error = caught(site.probe)
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EINVAL)
    assert "different buckets" in error.message


def test_a_clock_that_is_wrong(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(s3_probe.time, "time", lambda: now() - 100)
    info = site.probe()
    assert any("clock is 100 s ahead of ours" in note or "99 s ahead" in note for note in info.notes)


@pytest.mark.parametrize(
    ("date", "now", "ahead"),
    [
        ("Thu, 01 Jan 1970 00:16:40 GMT", 1000.0, 0.0),
        ("Thu, 01 Jan 1970 00:16:40 GMT", 1000.9, 0.0),
        ("Thu, 01 Jan 1970 00:16:40 GMT", 990.0, 10.0),
        ("Thu, 01 Jan 1970 00:16:40 GMT", 1011.0, -10.0),
        ("", 0.0, None),
        ("yesterday", 0.0, None),
    ],
)
def test_how_far_a_clock_is_ahead(date: str, now: float, ahead: float | None) -> None:
    assert s3_probe._ahead(date, now) == ahead


# -- cleaning up ---------------------------------------------------------------------------------


def test_a_store_that_goes_away_in_the_middle(site: Site, proxy: Proxy) -> None:
    proxy.faults.add(operation="CompleteMultipartUpload", before=lambda _: proxy.down())
    error = caught(site.probe)
    assert error.trouble is Trouble.DOWN
    keys, _ = site.left()
    assert keys  # it could not clean up
    site.endpoints = ()
    site.probe()
    assert set(keys) <= set(site.left()[0])  # another probe may be running: what is new is left alone


def test_what_an_earlier_probe_left_is_removed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client = site.server.client()
    client.put_object(Bucket=site.bucket, Key="a prefix/.ckptfs/probe-0123/a", Body=b"")
    client.create_multipart_upload(Bucket=site.bucket, Key="a prefix/.ckptfs/probe-0123/m")
    client.put_object(Bucket=site.bucket, Key="a prefix/probe-mine", Body=b"")
    monkeypatch.setattr(s3_scratch, "OLD", timedelta(seconds=-5))
    site.probe()
    assert site.left() == (["a prefix/.ckptfs/tier-id", "a prefix/probe-mine"], [])


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("CKPTFS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("CKPTFS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("ckptfs.config_file.default_file", lambda: str(tmp_path / "none.toml"))

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["probe", *arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_command(site: Site, command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    url = f"s3://{site.bucket}/some%20where"
    code, out, err = command(url, "--endpoint-url", site.server.endpoint, "--region", "us-east-1")
    assert (code, err) == (Exit.OK, "")
    lines = out.splitlines()
    assert lines[0] == url
    assert lines[-1] == "usable as a tier"
    assert any(line.startswith(f"endpoint {site.server.endpoint}  ok    answers in") for line in lines)
    assert not any(line.endswith(" ") for line in lines)
    assert site.left() == ([], [])
    config = tmp_path / "c.toml"
    config.write_text(f'tier = "{url}"\nendpoint_url = "{site.server.endpoint}"\n')
    code, out, err = command("--config", str(config), "--json")
    assert (code, err) == (Exit.OK, "")
    found = json.loads(out)
    assert (found["url"], found["usable"], found["error"]) == (url, True, None)
    assert found["capabilities"] == {name: getattr(ALL, name) for name in Capabilities.__dataclass_fields__}
    assert {"name": "put If-Match", "state": "ok", "text": "kept"} in found["findings"]


def test_the_command_about_what_is_no_tier(
    site: Site, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    options = ("--endpoint-url", site.server.endpoint)
    code, out, err = command("s3://never-made", *options)
    assert code == Exit.TIER_DOWN
    assert "  no    " in out
    assert err.startswith("ckptfs: the tier s3://never-made can't be used: ")
    assert err.count("\n") == 1
    code, out, err = command("s3://never-made", *options, "--json")
    assert (code, err) == (Exit.TIER_DOWN, "")
    found = json.loads(out)
    assert (found["usable"], found["notes"]) == (False, [])
    assert "no such bucket" in found["error"]
    assert command("s3:///x")[0] == Exit.USAGE
    assert command("s3:///x")[2].startswith("ckptfs: Tier 's3:///x' names no bucket")
    assert command(f"file://{tmp_path}", *options)[0] == Exit.USAGE
    (tmp_path / "tier").mkdir()
    assert command(f"file://{tmp_path}/tier")[0] == Exit.OK
    assert command(f"file://{tmp_path}/none")[0] == Exit.TIER_DOWN
