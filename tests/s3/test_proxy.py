"""The proxy does what tests of the object tier rely on: passes all else through, and fails as told."""

from __future__ import annotations

import base64
import hashlib
import random
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from tests.s3.faults import Faults
from tests.s3.proxy import Proxy, ranking_of
from tests.s3.servers import Server, client_of

pytestmark = pytest.mark.long

PART = 5 << 20
LOST = (BotoCoreError, ConnectionError, HTTPClientError)


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[Proxy]:
    with Proxy(seaweed, ranking=ranking_of(seaweed)) as made:
        yield made


@pytest.fixture
def bucket(seaweed: Server) -> str:
    return seaweed.bucket("test-proxy")


@pytest.fixture
def key() -> str:
    return f"{uuid.uuid4()}/a b+\u00e4&<x>%25"


@pytest.fixture
def client(proxy: Proxy) -> Any:
    return client_of(proxy.endpoint)


def code(caught: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def blob(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class Upload:
    """A multipart upload, step by step."""

    def __init__(self, client: Any, bucket: str, key: str, *parts: bytes) -> None:
        self.client, self.where, self.parts = client, {"Bucket": bucket, "Key": key}, parts
        self.id = client.create_multipart_upload(**self.where)["UploadId"]
        self.etags: list[str] = []

    def send(self, **more: Any) -> None:
        for number, data in enumerate(self.parts, 1):
            sent = self.client.upload_part(
                **self.where, UploadId=self.id, PartNumber=number, Body=data, **more
            )
            self.etags.append(sent["ETag"])

    def complete(self) -> str:
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(self.etags, 1)]
        done = self.client.complete_multipart_upload(
            **self.where, UploadId=self.id, MultipartUpload={"Parts": parts}
        )
        return str(done["ETag"])


def test_it_passes_everything_through_and_counts(proxy: Proxy, client: Any, bucket: str, key: str) -> None:
    data = blob(PART + 3)
    upload = Upload(client, bucket, key, data[:PART], data[PART:])
    upload.send()
    etag = upload.complete()
    assert client.head_object(Bucket=bucket, Key=key)["ETag"] == etag
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == data
    assert client.get_object(Bucket=bucket, Key=key, Range="bytes=7-9")["Body"].read() == data[7:10]
    client.put_object(Bucket=bucket, Key=key + "2", Body=b"x" * 70_000)
    client.copy_object(Bucket=bucket, Key=key + "3", CopySource={"Bucket": bucket, "Key": key + "2"})
    listed = client.list_objects_v2(Bucket=bucket, Prefix=key.split("/")[0])
    assert [item["Key"] for item in listed["Contents"]] == [key, key + "2", key + "3"]
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}, {"Key": key + "2"}]})
    client.delete_object(Bucket=bucket, Key=key + "3")
    assert proxy.part_bytes == PART + 3
    assert proxy.counts == {
        "CreateMultipartUpload": 1, "UploadPart": 2, "CompleteMultipartUpload": 1, "HeadObject": 1,
        "GetObject": 2, "PutObject": 1, "CopyObject": 1, "ListObjectsV2": 1, "DeleteObjects": 1,
        "DeleteObject": 1,
    }  # fmt: skip
    assert {seen.status for seen in proxy.seen} <= {200, 204, 206}


def test_https(seaweed: Server, tls: Any, bucket: str, key: str) -> None:
    with Proxy(seaweed, tls=tls.server) as proxy:
        client = client_of(proxy.endpoint, verify=str(tls.ca))
        client.put_object(Bucket=bucket, Key=key, Body=blob(300_000))
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == blob(300_000)
        with pytest.raises(LOST, match="CERTIFICATE_VERIFY_FAILED"):
            client_of(proxy.endpoint).head_object(Bucket=bucket, Key=key)


def test_refusals_do_not_reach_the_store(proxy: Proxy, client: Any, bucket: str, key: str) -> None:
    fault = proxy.faults.add(operation="Put.*", answer=(503, "SlowDown"), times=2, skip=1)
    client.put_object(Bucket=bucket, Key=key, Body=b"data")
    for _ in range(2):
        with pytest.raises(ClientError) as caught:
            client.put_object(Bucket=bucket, Key=key, Body=b"other")
        assert code(caught) == (503, "SlowDown")
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"data"
    client.put_object(Bucket=bucket, Key=key, Body=b"third")
    assert fault.hits == 2
    proxy.faults.add(key=key.split("/")[0], answer=(403, "AccessDenied"))
    for call in (client.get_object, client.delete_object):
        with pytest.raises(ClientError) as caught:
            call(Bucket=bucket, Key=key)
        assert code(caught) == (403, "AccessDenied")
    client.list_objects_v2(Bucket=bucket)
    proxy.faults.end()
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"third"


def test_a_lost_answer_of_complete(proxy: Proxy, client: Any, bucket: str, key: str) -> None:
    upload = Upload(client, bucket, key, b"data")
    upload.send()
    proxy.faults.add(operation="CompleteMultipartUpload", lose_answer=True, times=1)
    with pytest.raises(LOST):
        upload.complete()
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"data"


def test_resets_in_the_middle_of_bodies(
    proxy: Proxy, client: Any, bucket: str, key: str, seaweed: Server
) -> None:
    data = blob(PART)
    upload = Upload(client, bucket, key, data)
    proxy.faults.add(operation="UploadPart", cut=PART // 2, times=1)
    with pytest.raises(LOST):
        upload.send()
    assert not seaweed.client().list_parts(Bucket=bucket, Key=key, UploadId=upload.id).get("Parts")
    upload.send()
    upload.complete()
    proxy.faults.add(operation="GetObject", cut_answer=PART // 2, times=1)
    with pytest.raises(LOST):
        client.get_object(Bucket=bucket, Key=key)["Body"].read()
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == data


def test_a_bit_flips_on_the_way(proxy: Proxy, client: Any, bucket: str, key: str) -> None:
    data = blob(PART)
    changed = bytearray(data)
    changed[1000] ^= 1
    proxy.faults.add(operation="UploadPart", flip=1000, times=3)
    upload = Upload(client, bucket, key, data)
    with pytest.raises(ClientError) as caught:
        upload.send(ContentMD5=base64.b64encode(hashlib.md5(data).digest()).decode())
    assert code(caught)[0] == 400
    with pytest.raises(ClientError) as caught:
        upload.send(ChecksumCRC32=base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode())
    assert code(caught)[0] == 400
    upload.send()  # nobody asked for a check
    upload.complete()
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == bytes(changed)
    upload = Upload(client, bucket, key, data)
    upload.send()
    upload.complete()
    proxy.faults.add(operation="GetObject", flip_answer=1000, times=1)
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == bytes(changed)
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == data


def test_slowness(proxy: Proxy, client: Any, bucket: str, key: str) -> None:
    proxy.rate = 1_000_000
    started = time.monotonic()
    client.put_object(Bucket=bucket, Key=key, Body=blob(300_000))
    assert time.monotonic() - started > 0.25
    proxy.rate = 0
    proxy.faults.add(operation="HeadObject", delay=0.3)
    started = time.monotonic()
    client.head_object(Bucket=bucket, Key=key)
    assert time.monotonic() - started > 0.3


def test_down_and_up_again(proxy: Proxy, client: Any, bucket: str, key: str) -> None:
    client.put_object(Bucket=bucket, Key=key, Body=b"data")
    proxy.faults.add(operation="HeadObject", delay=0.2, times=1)
    threading.Timer(0.1, proxy.down).start()
    for _ in range(2):  # in the middle of a request, and with nobody there
        with pytest.raises(LOST):
            client.head_object(Bucket=bucket, Key=key)
    proxy.up()
    assert client.head_object(Bucket=bucket, Key=key)["ContentLength"] == 4


def test_many_connections_at_once(proxy: Proxy, bucket: str, key: str) -> None:
    client = client_of(proxy.endpoint, max_pool_connections=16)

    def work(n: int) -> bool:
        name, data = f"{key}{n}", blob(100_000 + n)
        client.put_object(Bucket=bucket, Key=name, Body=data)
        return bool(client.get_object(Bucket=bucket, Key=name)["Body"].read() == data)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(64)))
    assert proxy.counts["PutObject"] == 64


@pytest.mark.parametrize("later", ["put", "delete", "delete_objects", "complete"])
def test_ranking(later: str, proxy: Proxy, client: Any, bucket: str, key: str, seaweed: Server) -> None:
    """The trap: Complete of the older upload answers 200, and the newer write stays."""
    old = Upload(client, bucket, key, b"old")
    old.send()
    if later == "put":
        client.put_object(Bucket=bucket, Key=key, Body=b"new")
    elif later == "delete":
        client.delete_object(Bucket=bucket, Key=key)
    elif later == "delete_objects":
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]})
    else:
        new = Upload(client, bucket, key, b"new")
        new.send()
        new.complete()
    assert old.complete().endswith('-1"')
    if later.startswith("delete"):
        assert "Contents" not in client.list_objects_v2(Bucket=bucket, Prefix=key)
    else:
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"new"
    assert proxy.ranking is not None
    assert proxy.ranking.trapped == [key]
    with pytest.raises(ClientError) as caught:
        old.complete()
    assert code(caught) == (404, "NoSuchUpload")
    after = Upload(client, bucket, key, b"after")
    after.send()
    after.complete()
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"after"


def test_two_proxies_fail_together(seaweed: Server, bucket: str, key: str) -> None:
    faults = Faults()
    with Proxy(seaweed, faults=faults) as one, Proxy(seaweed, faults=faults) as two:
        fault = faults.add(operation="PutObject", answer=(403, "AccessDenied"))
        for proxy in (one, two):
            with pytest.raises(ClientError):
                client_of(proxy.endpoint).put_object(Bucket=bucket, Key=key, Body=b"x")
            assert proxy.counts == {"PutObject": 1}
        assert fault.hits == 2
