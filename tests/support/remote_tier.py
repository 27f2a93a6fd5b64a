"""The remote tier over a real S3 server, plain or through the faulty proxy: fixtures and helpers.

    pytest_plugins = ["support.remote_tier"]

(PYTEST_DONT_REWRITE: test modules import it before pytest registers it.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest

from backstay_protocol.layout import RemoteLayout
from backstay_sidecar.tiers.remote import RemoteStore, RemoteTier
from backstay_sidecar.transfer.retry import RetryPolicy
from backstay_sidecar.transfer.upload import UploadSettings
from support.byte_shards import RUN, BytesReader
from support.s3 import S3Server
from support.s3_faults import S3Faults

LAYOUT = RemoteLayout("", RUN)
PART_BYTES = 5 << 20
LARGE = 3 * PART_BYTES + 12_345
QUICK = RetryPolicy(first_seconds=0.01, most_seconds=0.05, budget_seconds=0.3)
PATIENT = RetryPolicy(first_seconds=0.01, most_seconds=0.05, budget_seconds=30)


@pytest.fixture
def faults(s3_server: S3Server) -> Iterator[S3Faults]:
    """The proxy, healthy."""
    with S3Faults(s3_server.address) as proxy:
        yield proxy


@pytest.fixture
def direct(s3_server: S3Server, bucket: str) -> RemoteTier:
    """The tier, straight at the server."""
    return tier_over(store_at(s3_server, bucket))


@pytest.fixture
def shaken(s3_server: S3Server, bucket: str, faults: S3Faults) -> RemoteTier:
    """The tier, through the proxy; it tries again for long."""
    return tier_over(store_at(s3_server, bucket, faults.endpoint))


@pytest.fixture
def impatient(s3_server: S3Server, bucket: str, faults: S3Faults) -> RemoteTier:
    """The tier, through the proxy; it gives up soon. One part at a time."""
    return tier_over(store_at(s3_server, bucket, faults.endpoint), QUICK, concurrency=1)


def store_at(server: S3Server, name: str, at: str = "", **changes: Any) -> RemoteStore:
    """A bucket of the server, or of the proxy `at`."""
    settings: dict[str, Any] = {
        "endpoint": at or server.endpoint,
        "bucket": name,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
    }
    return RemoteStore(**{**settings, **changes})


def tier_over(store: RemoteStore, retry: RetryPolicy = PATIENT, **settings: Any) -> RemoteTier:
    """A tier with small parts."""
    chosen = {"concurrency": 2, "part_bytes": PART_BYTES, "retry": retry, **settings}
    return RemoteTier(store, LAYOUT, settings=UploadSettings(**chosen))


def read_whole(tier: RemoteTier, reader: BytesReader) -> bytes:
    """The shard's bytes, as the tier gives them."""
    with tier.open(reader.checkpoint, reader.manifest.rank) as opened:
        buffer = bytearray(opened.manifest.size)
        opened.read_into(0, memoryview(buffer))
        return bytes(buffer)


def assert_not_visible(tier: RemoteTier, reader: BytesReader) -> None:
    """Neither listed nor opened."""
    assert list(tier.inventory()) == []
    with pytest.raises(FileNotFoundError), tier.open(reader.checkpoint, reader.manifest.rank):
        pass


def part_of(path: str) -> str:
    """The part number in a request's query, or nothing."""
    return parse_qs(path.partition("?")[2]).get("partNumber", [""])[0]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Until it holds, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
