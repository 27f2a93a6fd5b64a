"""Each trouble of an object store is told by its own name: which store, what, what to do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from backstay_protocol.errors import Unreachable
from backstay_sidecar.transfer.retry import RetryPolicy
from backstay_sidecar.transfer.s3_errors import (
    AccessDenied,
    ExpiredCredentials,
    MissingBucket,
    NoConditionalWrites,
    StoreConnectionBroken,
    StoreConnectionRefused,
    StoreError,
    StoreFailing,
    StoreNameUnknown,
    StoreRefused,
    StoreSilent,
    StoreTlsFailed,
    StoreTooSlow,
    UnknownAccessKey,
    WrongSecretKey,
)
from support.byte_shards import byte_shard
from support.remote_tier import (
    LARGE,
    part_of,
    store_at,
    tier_over,
)
from support.s3 import S3Server
from support.s3_faults import S3Faults

pytest_plugins = ["support.remote_tier"]

TROUBLES = [
    ("refused", lambda f: f.refuse(), StoreConnectionRefused),
    ("reset", lambda f: f.reset(), StoreConnectionBroken),
    ("hanging", lambda f: f.hang(), StoreSilent),
    ("500", lambda f: f.answer(500, "InternalError", "we broke"), StoreFailing),
    ("500-of-a-proxy", lambda f: f.answer(500), StoreFailing),
    ("503", lambda f: f.answer(503, "SlowDown", "please"), StoreFailing),
    ("denied", lambda f: f.answer(403, "AccessDenied", "no"), AccessDenied),
    ("signature", lambda f: f.wrong_signature(), WrongSecretKey),
    ("expired", lambda f: f.expired_token(), ExpiredCredentials),
    ("unknown-key", lambda f: f.unknown_key(), UnknownAccessKey),
    ("no-bucket", lambda f: f.answer(404, "NoSuchBucket", "none"), MissingBucket),
    ("no-conditions", lambda f: f.without_conditional_writes(), NoConditionalWrites),
]


@pytest.mark.parametrize(("make", "kind"), [t[1:] for t in TROUBLES], ids=[t[0] for t in TROUBLES])
def test_the_probe_names_each_trouble_with_endpoint_and_bucket(
    make: Any,
    kind: type[StoreError],
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    patience = 0.3 if kind is StoreSilent else 30
    store = store_at(s3_server, bucket, faults.endpoint, read_seconds=patience)
    make(faults)
    with pytest.raises(StoreError) as caught:
        store.probe()
    assert type(caught.value) is kind
    assert faults.endpoint in str(caught.value)
    assert bucket in str(caught.value)
    assert kind.hint in str(caught.value)


CALLS = [
    ("create", lambda s: s.create("k", b"1")),
    ("get", lambda s: s.get("k")),
    ("list", lambda s: s.list("k")),
    ("delete", lambda s: s.delete("k")),
    ("begin", lambda s: s.begin_upload("k")),
    ("uploads", lambda s: s.unfinished_uploads("k")),
]


@pytest.mark.parametrize("call", [c[1] for c in CALLS], ids=[c[0] for c in CALLS])
def test_every_call_names_the_troubles_alike(
    call: Any,
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    for name, make, kind in TROUBLES:
        if name == "no-conditions":
            continue
        patience = 0.3 if kind is StoreSilent else 30
        store = store_at(s3_server, bucket, faults.endpoint, read_seconds=patience)
        make(faults)
        with pytest.raises(StoreError) as caught:
            call(store)
        assert type(caught.value) is kind, name
        faults.heal()


def test_a_probe_of_a_good_store_leaves_nothing_behind(s3_server: S3Server, bucket: str) -> None:
    store = store_at(s3_server, bucket)
    store.probe("some/prefix")
    assert store.list("") == []


def test_a_probe_of_a_store_without_conditions_cleans_up_too(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    faults.without_conditional_writes()
    with pytest.raises(NoConditionalWrites, match="If-None-Match"):
        store_at(s3_server, bucket, faults.endpoint).probe()
    assert store_at(s3_server, bucket).list("") == []


REAL = [
    ("key", {"access_key": "nobody"}, UnknownAccessKey),
    ("secret", {"secret_key": "not-the-secret"}, WrongSecretKey),
    ("bucket", {"bucket": "no-such-bucket"}, MissingBucket),
    ("name", {"endpoint": "http://no-such-host.invalid:9000"}, StoreNameUnknown),
]


@pytest.mark.parametrize(("change", "kind"), [r[1:] for r in REAL], ids=[r[0] for r in REAL])
def test_the_real_server_s_refusals_are_told_apart(
    change: dict[str, str],
    kind: type[StoreError],
    s3_server: S3Server,
    bucket: str,
) -> None:
    with pytest.raises(StoreError) as caught:
        store_at(s3_server, bucket, **change).probe()
    assert type(caught.value) is kind


def test_https_to_a_server_that_speaks_http_is_a_matter_of_tls(
    s3_server: S3Server,
    bucket: str,
) -> None:
    endpoint = s3_server.endpoint.replace("http:", "https:")
    with pytest.raises(StoreTlsFailed):
        store_at(s3_server, bucket, endpoint).probe()


def test_what_waiting_may_mend_and_what_a_person_must_are_told_apart() -> None:
    assert StoreFailing.passes
    assert StoreConnectionRefused.passes
    assert not MissingBucket.passes
    assert issubclass(MissingBucket, StoreRefused)
    assert issubclass(MissingBucket, Unreachable)
    assert not issubclass(StoreFailing, StoreRefused)


def test_an_upload_that_does_not_get_through_in_time_is_called_too_slow(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    store = store_at(s3_server, bucket, faults.endpoint)
    tier = tier_over(store, RetryPolicy(budget_seconds=0), part_seconds=0.2)
    faults.throttle(200_000, only=lambda method, path: part_of(path) != "")
    with pytest.raises(StoreTooSlow, match=r"of \d+ bytes"):
        tier.put(byte_shard(LARGE), threading.Event())
