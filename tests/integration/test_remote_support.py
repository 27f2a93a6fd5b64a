"""The S3 server and the proxy that tests use do as they say, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backstay_sidecar.tiers.remote import RemoteStore
from support.s3 import S3Server
from support.s3_faults import S3Faults

_TESTS = Path(__file__).resolve().parents[1]
_STARTER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.s3 import running_s3
with running_s3(Path(sys.argv[2])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_the_server_dies_with_a_test_run_that_is_killed_with_9(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(_TESTS), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        assert alive(server)
        os.kill(starter.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(server):
        assert time.monotonic() < deadline, "the server outlived its test run"
        time.sleep(0.01)


def test_a_throttled_proxy_lets_go_at_once_when_it_is_healed(
    s3_server: S3Server, bucket: str
) -> None:
    with S3Faults(s3_server.address) as faults:
        store = RemoteStore(
            endpoint=faults.endpoint,
            bucket=bucket,
            access_key=s3_server.access_key,
            secret_key=s3_server.secret_key,
        )
        faults.throttle(10)
        with ThreadPoolExecutor(1) as creator:
            created = creator.submit(store.create, "k", bytes(100_000))
            deadline = time.monotonic() + 10
            while not faults.hits:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not created.done()
            faults.heal()
            assert created.result(timeout=20)


def test_a_refusing_proxy_comes_back_at_the_same_address(s3_server: S3Server, bucket: str) -> None:
    with S3Faults(s3_server.address) as faults:
        endpoint = faults.endpoint
        for _ in range(3):
            faults.refuse()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 5)
            faults.heal()
            assert faults.endpoint == endpoint
            socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 5).close()
