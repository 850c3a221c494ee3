"""What goes wrong between a mount and its store: nobody who writes notices, and all arrives."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.conftest import PATIENCE_S, end
from tests.crash.content import make
from tests.mounted.harness import wait_for
from tests.s3.mounts import SMALL_CHUNKS, S3Mount, arrives, save
from tests.s3.proxy import Proxy, ranking_of
from tests.s3.servers import Server
from tests.s3.stranger import Bucket
from tests.s3.wire import Request

pytestmark = pytest.mark.long

MIB = 1 << 20


@pytest.fixture(scope="module")
def one_proxy(seaweed: Server) -> Iterator[Proxy]:
    with Proxy(seaweed, ranking=ranking_of(seaweed)) as made:
        yield made


@pytest.fixture(scope="module")
def one_mount(seaweed: Server, one_proxy: Proxy) -> Iterator[S3Mount]:
    """One mount for most tests; each has directories of its own in it."""
    base = Path(tempfile.mkdtemp(prefix="ckptfs-crash-", dir="/var/tmp"))
    place = Bucket(seaweed.client(), seaweed.bucket("mounted"), "faults")
    try:
        made = S3Mount(base, "m", seaweed, place, [one_proxy.endpoint])
        made.start(config=SMALL_CHUNKS)
        yield made
        made.umount()
        assert place.uploads() == place.own("uploads") == place.own("moves") == []
    finally:
        end(base)
        shutil.rmtree(base)


@pytest.fixture
def proxy(one_proxy: Proxy) -> Iterator[Proxy]:
    """Nothing goes wrong before and after a test."""
    one_proxy.clear()
    yield one_proxy
    one_proxy.faults.end()
    one_proxy.rate = 0
    one_proxy.up()


@pytest.fixture
def mount(one_mount: S3Mount, proxy: Proxy) -> Iterator[S3Mount]:
    watchdog = threading.Timer(PATIENCE_S, one_mount.kill)
    watchdog.start()
    yield one_mount
    watchdog.cancel()


@pytest.fixture
def place(mount: S3Mount) -> Bucket:
    return mount.place


SMALL = {"operation": "PutObject", "key": "step[0-9]+/"}
COMPLETE = {"operation": "CompleteMultipartUpload"}
FAULTS: dict[str, dict[str, Any]] = {
    "SlowDown, again and again": {"answer": (503, "SlowDown"), "times": 8},
    "InternalError": {"answer": (500, "InternalError"), "times": 4},
    "parts are reset in mid-body": {"operation": "UploadPart", "cut": 1_000_000, "times": 2},
    "small files are reset in mid-body": {**SMALL, "cut": 10, "times": 2},
    "answers of parts are lost": {"operation": "UploadPart", "lose_answer": True, "times": 2},
    "answers of small files are lost": {**SMALL, "lose_answer": True, "times": 2},
    "answers of Create are lost": {"operation": "CreateMultipartUpload", "lose_answer": True, "times": 2},
    "answers of Complete are lost": {**COMPLETE, "lose_answer": True, "times": 2},
    "answers of HEAD are lost": {"operation": "HeadObject", "lose_answer": True, "times": 3},
    "Complete answers 200 with an error": {**COMPLETE, "answer": (200, "InternalError"), "times": 2},
    "parts are changed on the way": {"operation": "UploadPart", "flip": 1_000_000, "times": 2},
    "small files are changed on the way": {**SMALL, "flip": 10, "times": 2},
    "clocks differ for a while": {  # an answer to HEAD has no room for the reason
        "operation": "(?!Head).*",
        "answer": (403, "RequestTimeTooSkewed"),
        "times": 4,
    },
    "requests are slow": {"delay": 0.05},
}


@pytest.mark.parametrize("what", FAULTS)
def test_all_arrives_although(what: str, mount: S3Mount, proxy: Proxy) -> None:
    sent = mount.status()["reuploaded_bytes"]
    fault = proxy.faults.add(**FAULTS[what])
    contents = save(mount)
    arrives(mount, contents)
    if fault.times > 0:
        assert fault.hits == fault.times
    assert fault.hits
    if "Complete" in what or "HEAD" in what or "small files" in what:
        assert mount.status()["reuploaded_bytes"] == sent, "nothing of what was lost had to be sent again"


@pytest.mark.parametrize("when", ["UploadPart", "ListParts", "CompleteMultipartUpload"])
def test_uploads_that_others_abort_are_redone(when: str, mount: S3Mount, proxy: Proxy, place: Bucket) -> None:
    """As lifecycle rules of buckets do."""

    def abort(request: Request) -> None:
        where = {"Bucket": request.bucket, "Key": request.key, "UploadId": request.upload}
        with contextlib.suppress(place.client.exceptions.NoSuchUpload):
            place.client.abort_multipart_upload(**where)

    sent = mount.status()["reuploaded_bytes"]
    fault = proxy.faults.add(operation=when, key="shard", before=abort, times=2)
    arrives(mount, save(mount))
    assert fault.hits == 2
    if when != "UploadPart":
        assert mount.status()["reuploaded_bytes"] > sent


def test_a_store_that_stalls(mount: S3Mount, proxy: Proxy) -> None:
    proxy.rate = 5 * MIB
    contents = save(mount, "slow")
    assert mount.status()["pending"]["files"] > 0
    assert (mount.point / "slow" / "shard-0").read_bytes() == contents["slow/shard-0"]
    arrives(mount, save(mount, "slow"))  # newer ones, while the first are on their way


def test_nothing_is_published_while_the_store_is_away(mount: S3Mount, proxy: Proxy, place: Bucket) -> None:
    before = place.tree()
    proxy.down()
    contents = save(mount)
    wait_for(lambda: mount.status()["tier"]["state"] == "down", "status to say that the tier is down")
    contents |= save(mount)
    assert place.tree() == before
    proxy.up()
    arrives(mount, contents)
    assert mount.status()["tier"]["state"] == "up"


def test_what_is_refused_is_stuck_and_what_follows_waits(mount: S3Mount, proxy: Proxy, place: Bucket) -> None:
    before = place.tree()
    proxy.faults.add(key="secret", answer=(403, "AccessDenied"))
    (mount.point / "secret").write_bytes(make("secret", 1, 2 * MIB))
    (mount.point / "behind").write_bytes(b"behind")
    wait_for(lambda: mount.status()["stuck"], "a stuck entry")
    stuck = mount.status()["stuck"]
    assert [entry["path"] for entry in stuck] == ["secret"]
    assert "AccessDenied" in str(stuck)
    assert place.tree() == before
    mount.cli("skip", mount.point / "secret")
    wait_for(lambda: place.read("behind") == b"behind", "what is behind")
    assert (mount.point / "secret").read_bytes() == make("secret", 1, 2 * MIB)
    (mount.point / "secret").unlink()
    arrives(mount, {"behind": b"behind"})


@pytest.mark.long
@pytest.mark.parametrize("size", [10, 2 * MIB])
def test_what_is_refused_goes_when_it_is_allowed(
    size: int, mount: S3Mount, proxy: Proxy, place: Bucket
) -> None:
    fault = proxy.faults.add(key="wanted", answer=(403, "AccessDenied"))
    (mount.point / "wanted").write_bytes(make("wanted", 1, size))
    (mount.point / "after").write_bytes(b"after")
    wait_for(lambda: mount.status()["stuck"], "a stuck entry")
    proxy.faults.end(fault)
    wait_for(lambda: not mount.status()["stuck"], "another try", 60)
    arrives(mount, {"wanted": make("wanted", 1, size), "after": b"after"})


def test_one_name_again_and_again_at_all_sizes(mount: S3Mount, proxy: Proxy, place: Bucket) -> None:
    """Where uploads rank by their creation (R5): no older one is ever completed over a newer object."""
    proxy.rate = 20 * MIB
    data = b""
    for n in range(12):
        data = make("last", n, (7 * MIB, 100_000, 2 * MIB, 0)[n % 4])
        (mount.point / "last.tmp").write_bytes(data)
        if n % 3 == 2:
            (mount.point / "last.ckpt").unlink()
        (mount.point / "last.tmp").rename(mount.point / "last.ckpt")
        if n % 4 == 1:
            wait_for(lambda: mount.status()["pending"]["files"] == 0, "the tier", 30)
    arrives(mount, {"last.ckpt": data})
    assert {name for name in place.tree() if name.startswith("last")} == {"last.ckpt"}
    assert proxy.ranking is not None
    assert [key for key in proxy.ranking.trapped if "/probe-" not in key] == []


def test_reading_through_trouble_and_never_what_changed_on_the_way(mount: S3Mount, proxy: Proxy) -> None:
    contents = save(mount, "read")
    arrives(mount, contents)
    mount.umount()
    mount.start()
    harm = proxy.faults.add(operation="GetObject", key="read/(shard|config)", flip_answer=300)
    for name in ("read/shard-0", "read/shard-1", "read/config"):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (mount.point / name).read_bytes()
    assert harm.hits >= 3
    proxy.faults.end()
    proxy.faults.add(operation="GetObject", key="read/", cut_answer=300, times=3)
    proxy.faults.add(operation="GetObject", key="read/", answer=(503, "SlowDown"), times=3)
    assert {name: (mount.point / name).read_bytes() for name in contents} == contents
