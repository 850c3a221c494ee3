"""Clients, endpoints and errors: what a request meets on its way, and what becomes of it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.exceptions import ClientError

from ckptfs.tiers import s3_client, s3_lanes
from ckptfs.tiers.base import Source, TierError, Trouble
from ckptfs.tiers.s3_body import Body, checks
from ckptfs.tiers.s3_client import Capabilities, Missing, Precondition, Store
from ckptfs.tiers.s3_errors import tier_error
from ckptfs.tiers.s3_lanes import Lane, Lanes
from tests.s3.certificates import Tls
from tests.s3.proxy import Proxy
from tests.s3.servers import KEY, REGION, SECRET, Server

pytestmark = pytest.mark.long

_numbers = itertools.count()


@pytest.fixture
def bucket(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket, and the credentials for it in the environment."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    return seaweed.bucket(f"client{next(_numbers)}")


@pytest.fixture
def proxies(seaweed: Server) -> Iterator[Callable[[], Proxy]]:
    made: list[Proxy] = []

    def make(**options: Any) -> Proxy:
        made.append(Proxy(seaweed, **options))
        return made[-1]

    yield make
    for proxy in made:
        proxy.down()


def store(bucket: str, *endpoints: str, **options: str) -> Store:
    return Store(bucket, b"", {"endpoint_url": " ".join(endpoints), **options})


def put(store: Store, key: str, body: Any = b"x", **more: Any) -> Any:
    return store.run(
        f"writing {key}", lambda c: c.put_object(Bucket=store.bucket, Key=key, Body=body, **more)
    )


def get(store: Store, key: str) -> bytes:
    return bytes(
        store.run(f"reading {key}", lambda c: c.get_object(Bucket=store.bucket, Key=key)["Body"].read())
    )


def caught(call: Callable[[], Any]) -> TierError:
    with pytest.raises(TierError) as found:
        call()
    assert "\n" not in found.value.message
    assert SECRET not in str(found.value)
    return found.value


# -- what answers mean ---------------------------------------------------------------------------


def answered(status: int, code: str, message: str = "said\nso.") -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Op"
    )


@pytest.mark.parametrize(
    ("status", "code", "trouble", "number"),
    [
        (403, "AccessDenied", Trouble.REFUSED, errno.EACCES),
        (403, "403", Trouble.REFUSED, errno.EACCES),
        (403, "InvalidAccessKeyId", Trouble.REFUSED, errno.EACCES),
        (403, "SignatureDoesNotMatch", Trouble.REFUSED, errno.EACCES),
        (400, "ExpiredToken", Trouble.REFUSED, errno.EACCES),
        (401, "Unauthorized", Trouble.REFUSED, errno.EACCES),
        (403, "RequestTimeTooSkewed", Trouble.DOWN, 0),
        (403, "QuotaExceeded", Trouble.REFUSED, errno.EDQUOT),
        (404, "NoSuchBucket", Trouble.REFUSED, errno.ENOENT),
        (404, "NoSuchUpload", Trouble.REDO, errno.ENOENT),
        (400, "InvalidPart", Trouble.REDO, errno.ENODATA),
        (400, "EntityTooSmall", Trouble.REFUSED, errno.EINVAL),
        (400, "EntityTooLarge", Trouble.REFUSED, errno.EFBIG),
        (400, "KeyTooLongError", Trouble.REFUSED, errno.ENAMETOOLONG),
        (400, "BadDigest", Trouble.DOWN, errno.EIO),
        (400, "RequestTimeout", Trouble.DOWN, errno.ETIMEDOUT),
        (400, "SomethingNew", Trouble.REFUSED, errno.EINVAL),
        (409, "OperationAborted", Trouble.DOWN, 0),
        (409, "409", Trouble.DOWN, 0),
        (416, "InvalidRange", Trouble.CHANGED, errno.EINVAL),
        (418, "Teapot", Trouble.REFUSED, errno.EINVAL),
        (501, "NotImplemented", Trouble.REFUSED, errno.EOPNOTSUPP),
        (507, "InsufficientStorage", Trouble.DOWN, errno.ENOSPC),
        (500, "InternalError", Trouble.DOWN, 0),
        (200, "InternalError", Trouble.DOWN, 0),
        (200, "Odd", Trouble.DOWN, 0),
        (502, "502", Trouble.DOWN, 0),
        (503, "SlowDown", Trouble.DOWN, errno.EBUSY),
        (503, "503", Trouble.DOWN, errno.EBUSY),
        (429, "TooManyRequests", Trouble.DOWN, errno.EBUSY),
        (0, "", Trouble.DOWN, 0),
    ],
)
def test_answers(status: int, code: str, trouble: Trouble, number: int) -> None:
    error = tier_error(answered(status, code), "sending s3://b/k")
    assert (error.trouble, error.errno) == (trouble, number)
    assert error.message.startswith("sending s3://b/k: ")
    assert "\n" not in error.message
    if code and not code.isdigit():
        assert code in error.message


@pytest.mark.parametrize(
    ("status", "code", "kind", "number"),
    [
        (404, "NoSuchKey", Missing, errno.ENOENT),
        (404, "404", Missing, errno.ENOENT),
        (404, "Odd", Missing, errno.ENOENT),
        (412, "PreconditionFailed", Precondition, errno.EAGAIN),
        (412, "412", Precondition, errno.EAGAIN),
    ],
)
def test_answers_with_a_class_of_their_own(
    status: int, code: str, kind: type[TierError], number: int
) -> None:
    error = tier_error(answered(status, code), "looking at s3://b/k")
    assert type(error) is kind
    assert (error.trouble, error.errno) == (Trouble.CHANGED, number)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.trouble, copy.errno, copy.message) == (
        kind, Trouble.CHANGED, number, error.message,
    )  # fmt: skip


def test_what_the_client_library_raises() -> None:
    inner = TierError(Trouble.REDO, "staging is gone", errno.ENOENT)
    assert tier_error(boto.HTTPClientError(error=inner), "x") is inner
    assert tier_error(boto.ConnectionClosedError(error=inner, endpoint_url="u"), "x") is inner
    for exc, trouble, number, part in [
        (boto.NoCredentialsError(), Trouble.REFUSED, errno.EACCES, "--profile"),
        (boto.ProfileNotFound(profile="p"), Trouble.REFUSED, errno.EACCES, "(p)"),
        (boto.ParamValidationError(report="r"), Trouble.REFUSED, errno.EINVAL, "can't be made"),
        (boto.ConnectTimeoutError(endpoint_url="http://u:s@h:1/b?x"), Trouble.DOWN, errno.ETIMEDOUT, "http://h:1"),
        (boto.ReadTimeoutError(endpoint_url="http://h/b"), Trouble.DOWN, errno.ETIMEDOUT, "from http://h"),
        (boto.ResponseStreamingError(error="e"), Trouble.DOWN, 0, "e"),
        (OSError(errno.ENOSPC, "full"), Trouble.DOWN, errno.ENOSPC, "full"),
        (RuntimeError("odd"), Trouble.DOWN, 0, "RuntimeError: odd"),
    ]:  # fmt: skip
        error = tier_error(exc, "doing x")
        assert (error.trouble, error.errno) == (trouble, number), exc
        assert part in error.message


def test_capabilities_travel_as_text() -> None:
    assert not any(getattr(Capabilities(), name) for name in Capabilities.__dataclass_fields__)
    some = Capabilities(crc32=True, if_match=True)
    assert Capabilities.from_json(some.to_json()) == some
    assert Store("bucket", b"", {"caps": some.to_json()}).capabilities == some
    for odd in ("", "{}", "x", "[]", '{"other": true}', '{"crc32": "yes", "md5": 1}', "null"):
        assert Capabilities.from_json(odd) == Capabilities()


# -- endpoints -----------------------------------------------------------------------------------


class Clock:
    """A clock of the test's own, for `s3_lanes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(s3_lanes.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(s3_lanes.random, "uniform", lambda low, high: high)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


REFUSED = boto.EndpointConnectionError(endpoint_url="http://a", error=OSError())
RESET = boto.ConnectionClosedError(endpoint_url="http://a")
SLOW_DOWN = answered(503, "SlowDown")


def used(lanes: Lanes, count: int) -> Counter[str]:
    """How many of some good requests went where."""
    found: Counter[str] = Counter()
    for _ in range(count):
        with lanes.use() as turn:
            found[turn.lane.url] += 1
            turn.succeeded()
    return found


def test_requests_go_round_robin() -> None:
    assert used(Lanes("abc"), 30) == {"a": 10, "b": 10, "c": 10}


def test_an_endpoint_that_does_not_answer_is_left_out_and_tried_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = Lanes(["http://a", "http://b"])
    dead = lanes.all[0]

    def request(exc: Exception | None) -> str:
        while True:
            with lanes.use() as turn:
                if turn.lane is not dead:
                    turn.succeeded()
                    return turn.lane.url
                if exc is None:
                    turn.succeeded()
                else:
                    assert turn.failed(exc) is False  # the bytes may have arrived: the caller decides
                return turn.lane.url

    assert "http://a" in {request(RESET), request(RESET)}
    assert used(lanes, 10) == {"http://b": 10}
    for expected in (2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.now = dead.out_until
        assert "http://a" in {request(RESET), request(RESET)}
        assert dead.out_until - clock.now == expected
    assert caplog.text.count("does not answer") == 1
    clock.now = dead.out_until
    # One request tries it; the others keep away meanwhile.
    with lanes.use() as first, lanes.use() as second:
        turns = [first, second]
        trial = [turn for turn in turns if turn.lane is dead]
        assert len(trial) == 1
        assert used(lanes, 10) == {"http://b": 10}
        trial[0].succeeded()
    assert caplog.text.count("answers again") == 1
    assert used(lanes, 10) == {"http://a": 5, "http://b": 5}


def test_without_a_connection_the_request_goes_elsewhere_at_once(clock: Clock) -> None:
    lanes = Lanes("abc")
    with lanes.use() as turn:
        seen = [turn.lane.url]
        while turn.failed(REFUSED):
            seen.append(turn.lane.url)
    assert sorted(seen) == ["a", "b", "c"]
    assert [lane.failures for lane in lanes.all] == [1, 1, 1]
    # With all of them out one is used all the same: the caller has pauses of its own.
    assert sum(used(lanes, 3).values()) == 3


def test_the_only_endpoint_is_never_left_out(clock: Clock) -> None:
    lanes = Lanes([""])
    for _ in range(3):
        with lanes.use() as turn:
            assert not turn.failed(REFUSED)
    assert used(lanes, 3) == {"": 3}


def test_fewer_requests_after_slow_down_and_more_again(clock: Clock) -> None:
    lane = Lane("a", allowed=16, in_flight=16)
    lane.throttle(started=999, now=1000)
    assert (lane.allowed, lane.paused_until) == (8, 1000.25)
    lane.throttle(started=999.5, now=1000.1)  # sent before the reduction: no news
    assert (lane.allowed, lane.throttles) == (8, 1)
    lane.in_flight = 8
    for at, pause in ((1001.0, 0.5), (1002.0, 1.0), (1003.0, 2.0)):
        lane.throttle(started=at, now=at)
        assert lane.paused_until == at + pause
    assert lane.allowed == 1
    for _ in range(10):
        lane.throttle(started=1004, now=1004)
    assert lane.allowed == 1
    assert lane.paused_until == 1004 + s3_lanes.LAST_PAUSE
    lane.succeed(started=1003)
    assert lane.allowed == 1
    for wanted in (2, 3, 4, 5):  # one more for every round of answers
        for _ in range(wanted):
            lane.in_flight = int(lane.allowed)
            lane.succeed(started=1010)
        assert int(lane.allowed) == wanted
    assert lane.throttles == 0
    lane.allowed, lane.in_flight = s3_lanes.MOST, s3_lanes.MOST
    lane.succeed(started=1010)
    assert lane.allowed == s3_lanes.MOST
    idle = Lane("b", allowed=4, in_flight=1)
    idle.succeed(started=1)
    assert idle.allowed == 4  # a limit that is not reached says nothing


def test_the_limit_holds_and_nothing_gets_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_lanes, "FIRST_PAUSE", 0.01)
    lanes = Lanes("ab")
    for lane in lanes.all:
        lane.allowed = 2
    lock = threading.Lock()
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    refused = {"left": 5}

    def request(_: int) -> int:
        with lanes.use() as turn:
            while True:
                url = turn.lane.url
                with lock:
                    now[url] += 1
                    most[url] = max(most[url], now[url])
                    slow = refused["left"] > 0
                    refused["left"] -= slow
                with lanes.use() as nested:  # within the same thread: no place of its own, no deadlock
                    nested.succeeded()
                time.sleep(0.002)
                with lock:
                    now[url] -= 1
                if slow:
                    assert turn.failed(SLOW_DOWN)
                    continue
                turn.succeeded()
                return 1

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(request, range(200))) == 200
    assert set(now.values()) == {0}
    assert max(most.values()) < 16
    assert [lane.in_flight for lane in lanes.all] == [0, 0]
    assert all(lane.allowed > 1 for lane in lanes.all)


# -- real requests -------------------------------------------------------------------------------


def test_answers_of_a_store(seaweed: Server, bucket: str) -> None:
    s = store(bucket, seaweed.endpoint)
    put(s, "k", b"one")
    assert get(s, "k") == b"one"
    assert type(caught(lambda: get(s, "none"))) is Missing
    head = lambda c: c.head_object(Bucket=bucket, Key="none")  # noqa: E731
    assert type(caught(lambda: s.run("looking", head))) is Missing
    assert type(caught(lambda: put(s, "k", b"two", IfNoneMatch="*"))) is Precondition
    assert get(s, "k") == b"one"
    other = store("no-such-bucket", seaweed.endpoint)
    lost = caught(lambda: other.run("listing", lambda c: c.list_objects_v2(Bucket="no-such-bucket")))
    assert (lost.trouble, lost.errno) == (Trouble.REFUSED, errno.ENOENT)
    gone = caught(lambda: s.run("x", lambda c: c.list_parts(Bucket=bucket, Key="k", UploadId="none")))
    assert gone.trouble is Trouble.REDO


def test_endpoints_share_the_requests_and_one_may_die(
    bucket: str, proxies: Callable[[], Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = proxies(), proxies()
    s = store(bucket, one.endpoint, two.endpoint)
    for n in range(10):
        put(s, f"k{n}")
    assert (one.counts["PutObject"], two.counts["PutObject"]) == (5, 5)
    two.down()
    one.clear()
    lost = 0
    for n in range(10):
        try:
            put(s, f"k{n}")
        except TierError:  # its connection was cut: whether it arrived is not known here
            lost += 1
    assert lost <= 1
    assert one.counts["PutObject"] == 10 - lost
    assert f"endpoint {two.endpoint} does not answer" in caplog.text
    two.up()
    two.clear()
    time.sleep(s3_lanes.FIRST_OUT)
    for n in range(10):
        put(s, f"k{n}")
    assert two.counts["PutObject"] >= 4


def test_every_endpoint_is_asked_and_a_slow_one_not_waited_for(
    bucket: str, proxies: Callable[[], Proxy]
) -> None:
    one, two, three = proxies(), proxies(), proxies()
    two.down()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        mute = f"http://127.0.0.1:{silent.getsockname()[1]}"
        s = store(bucket, one.endpoint, two.endpoint, mute, three.endpoint)
        started = time.monotonic()
        found = s.each_endpoint("asking", lambda c: c.list_objects_v2(Bucket=bucket)["KeyCount"], 0.5)
        assert time.monotonic() - started < 3
        assert [url for url, _ in found] == [one.endpoint, two.endpoint, mute, three.endpoint]
        assert (found[0][1], found[3][1]) == (0, 0)
        refused, late = found[1][1], found[2][1]
        assert isinstance(refused, TierError)
        assert isinstance(late, TierError)
        assert "Connection refused" in refused.message
        assert "within 0.5 s" in late.message
        one.clear()
        for n in range(10):
            put(s, f"k{n}")
        assert (one.counts["PutObject"], three.counts["PutObject"]) == (5, 5)


def test_slow_down_is_repeated_and_then_told(
    bucket: str, proxies: Callable[[], Proxy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(s3_lanes, "FIRST_PAUSE", 0.01)
    proxy = proxies()
    s = store(bucket, proxy.endpoint)
    (tmp_path / "f").write_bytes(os.urandom(3 << 20))
    body = Body(Source(str(tmp_path / "f"), 0, 3 << 20))
    fault = proxy.faults.add(operation="PutObject", answer=(503, "SlowDown"), times=3)
    put(s, "k", body)  # the same body every time: it is sent from the start again
    assert fault.hits == 3
    assert get(s, "k") == (tmp_path / "f").read_bytes()
    fault = proxy.faults.add(operation="PutObject", answer=(503, "SlowDown"))
    error = caught(lambda: put(s, "k"))
    assert (error.trouble, error.errno) == (Trouble.DOWN, errno.EBUSY)
    assert "fewer requests" in error.message
    assert fault.hits == s3_lanes.THROTTLED_TRIES + 1
    assert get(s, "k") == (tmp_path / "f").read_bytes()


def test_other_failures_are_told_at_once(bucket: str, proxies: Callable[[], Proxy], tmp_path: Path) -> None:
    proxy = proxies()
    s = store(bucket, proxy.endpoint)
    (tmp_path / "f").write_bytes(bytes(3 << 20))
    body = Body(Source(str(tmp_path / "f"), 0, 3 << 20))
    for fault, number in (
        ({"answer": (500, "InternalError")}, 0), ({"cut": 1 << 20}, errno.ECONNRESET),
        ({"lose_answer": True}, errno.ECONNRESET),
    ):  # fmt: skip
        made = proxy.faults.add(operation="PutObject", **fault)
        error = caught(lambda: put(s, "k", body))
        assert (error.trouble, error.errno, made.hits) == (Trouble.DOWN, number, 1), error
        assert error.message.startswith("writing k: ")
        proxy.faults.end()
    put(s, "k", body)
    assert get(s, "k") == bytes(3 << 20)
    proxy.faults.add(operation="GetObject", cut_answer=1 << 20)
    assert caught(lambda: get(s, "k")).trouble is Trouble.DOWN


def test_staging_that_fails_in_mid_request_is_not_the_endpoints_fault(
    seaweed: Server, bucket: str, tmp_path: Path
) -> None:
    """Nor the end of the object that is there."""
    s = store(bucket, seaweed.endpoint)
    put(s, "k", b"before")
    spilled = Source(str(tmp_path / "f"), 0, 16 << 20, str(tmp_path / "s"), 8 << 20, frozenset((1,)))
    for size, number in ((None, errno.ENOENT), (1 << 20, errno.ENODATA), (16 << 20, errno.ENOENT)):
        if size is not None:
            (tmp_path / "f").write_bytes(bytes(size))
        error = caught(lambda: put(s, "k", Body(spilled)))
        assert (error.trouble, error.errno) == (Trouble.REDO, number)
        assert get(s, "k") == b"before"
    assert s._lanes.all[0].failures == 0


def test_a_store_that_hangs_is_down(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "READ_TIMEOUT", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        s = store(bucket, f"http://127.0.0.1:{silent.getsockname()[1]}")
        error = caught(lambda: get(s, "k"))
    assert (error.trouble, error.errno) == (Trouble.DOWN, errno.ETIMEDOUT)
    assert "no answer in time" in error.message


def test_a_private_authority(bucket: str, proxies: Callable[..., Proxy], tls: Tls) -> None:
    proxy = proxies(tls=tls.server)
    put(store(bucket, proxy.endpoint, ca_bundle=str(tls.ca)), "k")
    put(store(bucket, proxy.endpoint, verify="false"), "k")
    for options in ({}, {"verify": "true"}):
        error = caught(lambda: put(store(bucket, proxy.endpoint, **options), "k"))  # noqa: B023
        assert error.trouble is Trouble.DOWN
        assert "--ca-bundle" in error.message


def test_bytes_that_change_on_the_way(bucket: str, proxies: Callable[[], Proxy], tmp_path: Path) -> None:
    proxy = proxies()
    s = store(bucket, proxy.endpoint)
    (tmp_path / "f").write_bytes(os.urandom(3 << 20))
    source = Source(str(tmp_path / "f"), 0, 3 << 20)
    sums = checks(source, md5=True)
    for more in ({"ChecksumCRC32": sums.crc32}, {"ContentMD5": sums.md5}):
        proxy.faults.add(operation="PutObject", flip=2 << 20, times=1)
        error = caught(lambda: put(s, "k", Body(source), **more))  # noqa: B023
        assert (error.trouble, error.errno) == (Trouble.DOWN, errno.EIO)
        put(s, "k", Body(source), **more)


# -- credentials ---------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str) -> Callable[[str, str], None]:
    """Credentials come from a file only; writes it."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def write(key: str, secret: str, profile: str = "default") -> None:
        new = tmp_path / "new"
        new.write_text(f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        new.replace(path)

    return write


def test_credentials_that_rotate_on_disk_are_used_at_once(
    seaweed: Server, bucket: str, files: Callable[..., None]
) -> None:
    s = store(bucket, seaweed.endpoint)
    error = caught(lambda: put(s, "k"))
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EACCES)
    assert "there are no credentials" in error.message
    files(KEY, "not the " + SECRET[:3])
    assert "SignatureDoesNotMatch" in caught(lambda: put(s, "k")).message
    files("unknown", SECRET)
    assert "InvalidAccessKeyId" in caught(lambda: put(s, "k")).message
    files(KEY, SECRET)
    put(s, "k")

    # They change while a request with the old ones is on its way.
    files("unknown", SECRET)
    s = store(bucket, seaweed.endpoint)
    tries = []

    def job(client: Any) -> Any:
        tries.append(client)
        if len(tries) == 1:
            files(KEY, SECRET)
        return client.put_object(Bucket=bucket, Key="k", Body=b"x")

    s.run("writing k", job)
    assert len(tries) == 2


def test_a_profile(seaweed: Server, bucket: str, files: Callable[..., None]) -> None:
    files(KEY, SECRET, "mine")
    put(store(bucket, seaweed.endpoint, profile="mine", region=REGION), "k")
    error = caught(lambda: put(store(bucket, seaweed.endpoint, profile="other"), "k"))
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EACCES)
    assert "other" in error.message
    assert "no credentials" in caught(lambda: put(store(bucket, seaweed.endpoint), "k")).message


def test_half_a_credentials_file_is_read_again(
    seaweed: Server, bucket: str, files: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text("[default\nnonsense")
    s = store(bucket, seaweed.endpoint)
    error = caught(lambda: put(s, "k"))
    assert (error.trouble, error.errno) == (Trouble.REFUSED, errno.EACCES)
    files(KEY, SECRET)
    put(s, "k")


def test_credentials_that_were_nowhere_are_looked_for_again(
    seaweed: Server, bucket: str, files: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a machine's role: no file changes when they come."""
    s = store(bucket, seaweed.endpoint)
    assert "no credentials" in caught(lambda: put(s, "k")).message
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert "no credentials" in caught(lambda: put(s, "k")).message
    monkeypatch.setattr(s3_client, "RENEW", 0.0)
    put(s, "k")


def test_secrets_are_in_no_log(
    seaweed: Server, bucket: str, files: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckptfs")
    files("unknown", SECRET)
    s = store(bucket, seaweed.endpoint, "http://127.0.0.1:1")
    for _ in range(4):
        assert SECRET not in str(caught(lambda: put(s, "k")))
    assert SECRET not in caplog.text
