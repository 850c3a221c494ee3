"""The servers that the tests of the object tier believe in behave as those tests assume."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.mounted.harness import alive, wait_for
from tests.s3.servers import Server

WRONG = base64.b64encode(b"\0\0\0\0").decode()


def code_of(caught: pytest.ExceptionInfo[ClientError]) -> int:
    return int(caught.value.response["ResponseMetadata"]["HTTPStatusCode"])


@pytest.mark.parametrize("name", ["seaweed", "moto"])
def test_objects_keep_bytes_and_metadata_on_seaweedfs_and_moto(
    name: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(name)
    client, bucket = server.client(), server.bucket("test-servers")
    key = f"{uuid.uuid4()}/f"
    client.put_object(Bucket=bucket, Key=key, Body=b"data", Metadata={"mode": "33188"})
    assert client.head_object(Bucket=bucket, Key=key)["Metadata"] == {"mode": "33188"}
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key=key, Body=b"other", IfNoneMatch="*")
    assert code_of(caught) == 412
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"data"


def test_seaweedfs_refuses_a_wrong_checksum(seaweed: Server) -> None:
    bucket = seaweed.bucket("test-servers")
    with pytest.raises(ClientError) as caught:
        seaweed.client().put_object(Bucket=bucket, Key="bad", Body=b"data", ChecksumCRC32=WRONG)
    assert code_of(caught) == 400


def test_moto_accepts_a_wrong_checksum(moto: Server) -> None:
    moto.client().put_object(Bucket=moto.bucket("test-servers"), Key="bad", Body=b"data", ChecksumCRC32=WRONG)


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even when that is killed: nothing is left running by a test run that was."""
    program = (
        "import pathlib, sys, time; from tests.s3.servers import start_moto;"
        f"print(start_moto(pathlib.Path({str(tmp_path)!r})).process.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        assert alive(server)
        os.kill(starter.pid, signal.SIGKILL)
    wait_for(lambda: not alive(server), "the server's end")
