"""The remote tier against a real S3 server, and against what servers and networks do to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from backstay_protocol import codec
from backstay_protocol.errors import Cancelled, DigestMismatch, Unreachable
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.pull import Endpoint, get_bytes, pull, read_range
from backstay_protocol.records import CommitRecord, CommitShard
from backstay_sidecar.digest import digest
from backstay_sidecar.tiers.remote import DeletionIntended, NameTaken, RemoteStore, RemoteTier
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
from backstay_sidecar.transfer.upload import UploadSettings
from support.byte_shards import RUN, BytesReader, byte_shard
from support.s3 import S3Server
from support.s3_faults import S3Faults

pytest_plugins = ["support.s3"]

LAYOUT = RemoteLayout("", RUN)
PART_BYTES = 5 << 20
LARGE = 3 * PART_BYTES + 12_345
UPLOADER = Path(__file__).resolve().parents[1] / "support" / "uploader.py"
QUICK = RetryPolicy(first_seconds=0.01, most_seconds=0.05, budget_seconds=0.3)
PATIENT = RetryPolicy(first_seconds=0.01, most_seconds=0.05, budget_seconds=30)


@pytest.fixture
def faults(s3_server: S3Server) -> Iterator[S3Faults]:
    with S3Faults(s3_server.address) as proxy:
        yield proxy


def store_at(server: S3Server, name: str, at: str = "", **changes: Any) -> RemoteStore:
    settings: dict[str, Any] = {
        "endpoint": at or server.endpoint,
        "bucket": name,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "connect_seconds": 1.0,
        "read_seconds": 0.5,
    }
    return RemoteStore(**{**settings, **changes})


def tier_over(store: RemoteStore, retry: RetryPolicy = QUICK, **settings: Any) -> RemoteTier:
    return RemoteTier(
        store,
        LAYOUT,
        settings=UploadSettings(
            **{"concurrency": 2, "part_bytes": PART_BYTES, "retry": retry, **settings}
        ),
    )


@pytest.fixture
def direct(s3_server: S3Server, bucket: str) -> RemoteTier:
    """The tier, straight at the server."""
    return tier_over(store_at(s3_server, bucket, read_seconds=20))


@pytest.fixture
def shaken(s3_server: S3Server, bucket: str, faults: S3Faults) -> RemoteTier:
    """The tier, through the proxy."""
    return tier_over(store_at(s3_server, bucket, faults.endpoint))


def read_whole(tier: RemoteTier, reader: Any) -> bytes:
    with tier.open(reader.checkpoint, reader.manifest.rank) as opened:
        buffer = bytearray(opened.manifest.size)
        opened.read_into(0, memoryview(buffer))
        return bytes(buffer)


def assert_not_visible(tier: RemoteTier, reader: Any) -> None:
    assert list(tier.inventory()) == []
    with pytest.raises(FileNotFoundError), tier.open(reader.checkpoint, reader.manifest.rank):
        pass


def part_of(path: str) -> str:
    """The part number in a request's query, or nothing."""
    return parse_qs(path.partition("?")[2]).get("partNumber", [""])[0]


def wait_until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# --- each trouble by its own name -----------------------------------------------------------------

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
    store = store_at(s3_server, bucket, faults.endpoint)
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
    store = store_at(s3_server, bucket, faults.endpoint)
    for name, make, kind in TROUBLES:
        if name == "no-conditions":
            continue
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


# --- uploads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 300_000, PART_BYTES, LARGE])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_what_is_put_comes_back_byte_for_byte(direct: RemoteTier, size: int, sealed: bool) -> None:
    reader = byte_shard(size, sealed=sealed)
    manifest = direct.put(reader, threading.Event())
    assert manifest.sealed
    assert read_whole(direct, reader) == reader.data
    assert [copy.fingerprint for copy in direct.inventory()] == [manifest.fingerprint]


def test_a_failing_store_is_tried_again_until_it_is_mended(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint, read_seconds=20), PATIENT)
    faults.answer(503, "SlowDown")
    reader = byte_shard(LARGE)
    with ThreadPoolExecutor(1) as uploader:
        put = uploader.submit(tier.put, reader, threading.Event())
        wait_until(lambda: faults.hits >= 3)
        faults.heal()
        put.result()
    assert read_whole(tier, reader) == reader.data


def test_connections_that_break_in_the_middle_cost_only_what_was_in_flight(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint, read_seconds=20), PATIENT)
    faults.drop_after(1_000_000, times=4, only=lambda method, path: part_of(path) != "")
    reader = byte_shard(LARGE)
    tier.put(reader, threading.Event())
    assert read_whole(tier, reader) == reader.data
    assert len([path for _, path in faults.requests if part_of(path)]) == 4 + 4


def test_an_upload_that_gave_up_is_invisible_and_goes_on_with_its_missing_parts(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
) -> None:
    shaken = tier_over(store_at(s3_server, bucket, faults.endpoint), concurrency=1)
    reader = byte_shard(LARGE)
    faults.answer(500, "InternalError", only=lambda method, path: part_of(path) in ("3", "4"))
    with pytest.raises(StoreFailing):
        shaken.put(reader, threading.Event())
    assert_not_visible(shaken, reader)
    faults.heal()
    faults.requests.clear()
    shaken.put(reader, threading.Event())
    sent = sorted(filter(None, (part_of(path) for _, path in faults.requests)))
    assert sent == ["3", "4"]
    assert read_whole(shaken, reader) == reader.data


def test_an_upload_begun_from_other_bytes_is_not_believed(
    shaken: RemoteTier, faults: S3Faults
) -> None:
    faults.answer(500, "InternalError", only=lambda method, path: part_of(path) == "4")
    with pytest.raises(StoreFailing):
        shaken.put(byte_shard(LARGE, seed=1), threading.Event())
    faults.heal()
    reader = byte_shard(LARGE, seed=2)
    shaken.put(reader, threading.Event())
    assert read_whole(shaken, reader) == reader.data


def test_an_upload_that_was_completed_although_the_answer_was_lost_is_complete(
    shaken: RemoteTier,
    faults: S3Faults,
    bucket: str,
) -> None:
    """The answer to the completion is cut off after its first bytes."""
    reader = byte_shard(LARGE)
    faults.drop_after(
        900, times=1, only=lambda method, path: method == "POST" and "uploadId" in path
    )
    shaken.put(reader, threading.Event())
    assert faults.hits == 1
    assert read_whole(shaken, reader) == reader.data


def test_repeating_a_put_sends_nothing(shaken: RemoteTier, faults: S3Faults) -> None:
    reader = byte_shard(LARGE)
    first = shaken.put(reader, threading.Event())
    faults.requests.clear()
    again = byte_shard(LARGE)
    assert shaken.put(again, threading.Event()) == first
    assert again.reads == 0
    assert {method for method, _ in faults.requests} == {"GET"}


def test_other_bytes_under_a_name_that_is_taken_are_refused_and_change_nothing(
    direct: RemoteTier,
) -> None:
    first = byte_shard(seed=1)
    direct.put(first, threading.Event())
    with pytest.raises(NameTaken, match="other bytes"):
        direct.put(byte_shard(seed=2), threading.Event())
    assert read_whole(direct, first) == first.data


@pytest.mark.parametrize("size", [300_000, LARGE])
def test_a_bad_source_is_never_made_visible(direct: RemoteTier, size: int) -> None:
    reader = byte_shard(size)
    reader.data[size - 5] ^= 1
    with pytest.raises(DigestMismatch, match=f"chunk {(size - 5) >> 16} of rank 0"):
        direct.put(reader, threading.Event())
    assert_not_visible(direct, reader)


@pytest.mark.parametrize("size", [300_000, LARGE])
def test_a_hanging_upload_is_cancelled_at_once(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
    size: int,
) -> None:
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint, read_seconds=20), PATIENT)
    faults.hang(only=lambda method, path: method == "PUT" and "safetensors" in path)
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as uploader:
        put = uploader.submit(tier.put, byte_shard(size), cancel)
        wait_until(lambda: faults.hits >= 1)
        cancel.set()
        with pytest.raises(Cancelled):
            put.result(timeout=10)


def test_two_uploaders_of_one_shard_do_not_harm_each_other(direct: RemoteTier) -> None:
    reader = byte_shard(LARGE)
    with ThreadPoolExecutor(2) as uploaders:
        puts = [uploaders.submit(direct.put, byte_shard(LARGE), threading.Event()) for _ in "ab"]
        assert puts[0].result() == puts[1].result()
    assert read_whole(direct, reader) == reader.data


def test_nothing_is_uploaded_under_a_deletion_intent(
    s3_server: S3Server,
    bucket: str,
    direct: RemoteTier,
) -> None:
    reader = byte_shard()
    store = store_at(s3_server, bucket)
    store.create(LAYOUT.deletion(reader.checkpoint), b"{}")
    with pytest.raises(DeletionIntended):
        direct.put(reader, threading.Event())
    assert store.list(LAYOUT.checkpoints) == []


def test_an_intent_written_while_the_bytes_travel_keeps_the_manifest_away(
    s3_server: S3Server,
    bucket: str,
    direct: RemoteTier,
) -> None:
    store = store_at(s3_server, bucket)
    reader = byte_shard()
    reader.before_read = lambda _: store.create(LAYOUT.deletion(reader.checkpoint), b"{}")
    with pytest.raises(DeletionIntended):
        direct.put(reader, threading.Event())
    assert_not_visible(direct, reader)


def test_uploads_that_nobody_goes_on_with_are_thrown_away(
    s3_server: S3Server,
    bucket: str,
    direct: RemoteTier,
) -> None:
    store = store_at(s3_server, bucket)
    key = LAYOUT.shard(byte_shard().checkpoint, 0)
    store.begin_upload(key)
    assert direct.abort_stale_uploads() == 0
    assert direct.abort_stale_uploads(older_than_seconds=-60) == 1
    assert store.find_uploads(key) == ()


def test_deleting_takes_the_shard_and_what_was_begun(
    s3_server: S3Server,
    bucket: str,
    direct: RemoteTier,
) -> None:
    store, reader = store_at(s3_server, bucket), byte_shard()
    direct.put(reader, threading.Event())
    store.begin_upload(LAYOUT.shard(reader.checkpoint, 0))
    direct.delete(reader.checkpoint, 0)
    direct.delete(reader.checkpoint, 0)
    assert_not_visible(direct, reader)
    assert store.list("") == []
    assert store.unfinished_uploads("") == ()


# --- listing --------------------------------------------------------------------------------------


def commit_of(readers: list[BytesReader]) -> CommitRecord:
    first = readers[0].manifest
    return CommitRecord(
        checkpoint=first.checkpoint,
        world_size=first.world_size,
        plan=first.plan,
        chunk_size=first.chunk_size,
        chain=(),
        shards=tuple(
            CommitShard(rank=r.manifest.rank, size=len(r.data), fingerprint=r.manifest.fingerprint)
            for r in readers
        ),
        created=1.0,
    )


def test_a_commit_record_speaks_for_its_manifests_and_what_is_known_is_not_read_again(
    s3_server: S3Server, bucket: str, faults: S3Faults, direct: RemoteTier
) -> None:
    readers = [byte_shard(seed=rank, rank=rank) for rank in range(3)]
    loose = byte_shard(step=8)
    for reader in (*readers, loose):
        direct.put(reader, threading.Event())
    before = set(direct.inventory())
    store = store_at(s3_server, bucket)
    store.create(LAYOUT.commit(readers[0].checkpoint), codec.dumps(commit_of(readers)))
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint))
    assert set(tier.inventory()) == before
    read = [path.partition("?")[0].rpartition("/")[2] for _, path in faults.requests]
    assert sorted(read) == ["00000.json", "commit.json", bucket]
    faults.requests.clear()
    assert set(tier.inventory()) == before
    assert len(faults.requests) == 1


def test_a_manifest_without_its_bytes_or_that_is_none_is_not_listed(
    s3_server: S3Server, bucket: str, direct: RemoteTier
) -> None:
    store = store_at(s3_server, bucket)
    lonely, torn, short = (byte_shard(rank=rank) for rank in range(3))
    store.create(LAYOUT.manifest(lonely.checkpoint, 0), lonely.manifest.to_json())
    store.create(LAYOUT.manifest(torn.checkpoint, 1), torn.manifest.to_json()[:-9])
    store.create(LAYOUT.shard(torn.checkpoint, 1), bytes(torn.data))
    store.create(LAYOUT.manifest(short.checkpoint, 2), short.manifest.to_json())
    store.create(LAYOUT.shard(short.checkpoint, 2), bytes(short.data[:-1]))
    assert list(direct.inventory()) == []
    with pytest.raises(NameTaken, match="not a manifest"):
        direct.put(torn, threading.Event())


def test_a_run_does_not_see_another_run_of_the_same_bucket(
    s3_server: S3Server, bucket: str, direct: RemoteTier
) -> None:
    other = RemoteTier(store_at(s3_server, bucket), RemoteLayout("", "team/run-2"))
    direct.put(byte_shard(), threading.Event())
    assert list(other.inventory()) == []


# --- killed in the middle -------------------------------------------------------------------------


def upload_in_another_process(
    server: S3Server,
    bucket: str,
    faults: str = "",
    **order: Any,
) -> int:
    order = {
        "endpoint": server.endpoint,
        "bucket": bucket,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "step": 7,
        "sealed": True,
        **order,
    }
    environment = {**os.environ, "BACKSTAY_FAULTS": faults}
    return subprocess.run(
        [sys.executable, str(UPLOADER), json.dumps(order)], env=environment, timeout=50
    ).returncode


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("size", [300_000, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("point", ["remote.mid_upload", "remote.before_manifest"])
def test_an_uploader_killed_with_9_leaves_nothing_visible_and_the_next_one_finishes(
    s3_server: S3Server,
    bucket: str,
    direct: RemoteTier,
    point: str,
    size: int,
    sealed: bool,
) -> None:
    reader = byte_shard(size, sealed=sealed)
    order = {"size": size, "sealed": sealed}
    killed = upload_in_another_process(s3_server, bucket, f"{point}=kill", **order)
    assert killed == -signal.SIGKILL
    assert_not_visible(direct, reader)
    direct.put(reader, threading.Event())
    assert read_whole(direct, reader) == reader.data
    assert store_at(s3_server, bucket).unfinished_uploads("") == ()


def test_what_a_killed_uploader_had_sent_is_not_sent_again(
    s3_server: S3Server,
    bucket: str,
    shaken: RemoteTier,
    faults: S3Faults,
) -> None:
    killed = upload_in_another_process(s3_server, bucket, "remote.mid_upload=kill", size=LARGE)
    assert killed == -signal.SIGKILL
    shaken.put(byte_shard(LARGE), threading.Event())
    assert len([path for _, path in faults.requests if part_of(path)]) <= 2
    again = byte_shard(LARGE, step=8)
    upload_in_another_process(s3_server, bucket, "remote.before_manifest=kill", size=LARGE, step=8)
    faults.requests.clear()
    shaken.put(again, threading.Event())
    assert {method for method, _ in faults.requests} == {"GET", "HEAD", "PUT"}
    assert [path for _, path in faults.requests if part_of(path)] == []
    assert read_whole(shaken, again) == again.data


def test_bytes_that_a_killed_uploader_left_are_not_taken_for_others(
    s3_server: S3Server, bucket: str, direct: RemoteTier
) -> None:
    upload_in_another_process(s3_server, bucket, "remote.before_manifest=kill", size=LARGE)
    other = byte_shard(LARGE, seed=3)
    direct.put(other, threading.Event())
    assert read_whole(direct, other) == other.data


# --- conditional create ---------------------------------------------------------------------------


def test_of_two_processes_that_create_one_key_exactly_one_wins(
    s3_server: S3Server,
    bucket: str,
) -> None:
    keys = [f"race/{i}" for i in range(30)]
    order = {
        "endpoint": s3_server.endpoint,
        "bucket": bucket,
        "access_key": s3_server.access_key,
        "secret_key": s3_server.secret_key,
        "create": keys,
    }
    racers = [
        subprocess.Popen(
            [sys.executable, str(UPLOADER), json.dumps({**order, "name": name})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        store = store_at(s3_server, bucket)
        for key in keys:
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            won = [int(racer.stdout.readline()) for racer in racers if racer.stdout]
            assert sorted(won) == [0, 1]
            assert store.get(key) == b"ab"[won.index(1) :][:1]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


# --- presigned URLs -------------------------------------------------------------------------------


def test_a_shard_is_pulled_from_its_presigned_url_in_parallel(direct: RemoteTier) -> None:
    reader = byte_shard(LARGE)
    manifest = direct.put(reader, threading.Event())
    got = bytearray(LARGE)
    where = direct.endpoint(reader.checkpoint, 0, 60)

    def deliver(index: int, view: memoryview) -> None:
        start, stop = manifest.chunk(index)
        got[start:stop] = view

    pull(where, manifest, digest, deliver, threads=3)
    assert got == reader.data


def test_an_expired_presigned_url_says_so(s3_server: S3Server, bucket: str) -> None:
    store = store_at(s3_server, bucket)
    store.create("k", b"12345")
    url = store.presign_get("k", 1)
    assert get_bytes(Endpoint(url)) == b"12345"

    said: list[str] = []

    def expired() -> bool:
        try:
            read_range(Endpoint(url), 0, memoryview(bytearray(5)))
        except Unreachable as error:
            said.append(str(error))
        return bool(said)

    wait_until(expired)
    assert "expired" in said[0]
    assert "Signature" not in said[0]


def test_a_presigned_url_of_nothing_is_proven_gone(s3_server: S3Server, bucket: str) -> None:
    store = store_at(s3_server, bucket)
    with pytest.raises(FileNotFoundError):
        read_range(Endpoint(store.presign_get("nothing", 60)), 0, memoryview(bytearray(5)))


def test_reading_goes_on_over_broken_connections(
    s3_server: S3Server,
    bucket: str,
    faults: S3Faults,
    direct: RemoteTier,
) -> None:
    reader = byte_shard(LARGE)
    direct.put(reader, threading.Event())
    faults.drop_after(2_000_000)
    shaken = tier_over(store_at(s3_server, bucket, faults.endpoint))
    assert read_whole(shaken, reader) == reader.data
    assert faults.hits >= 5


def test_a_listing_longer_than_one_page_is_whole(s3_server: S3Server, bucket: str) -> None:
    store = store_at(s3_server, bucket, read_seconds=20)
    keys = [f"many/{i:04d}" for i in range(1005)]
    with ThreadPoolExecutor(8) as creators:
        assert all(creators.map(lambda key: store.create(key, b"x"), keys))
    assert store.list("many/") == [(key, 1) for key in keys]
