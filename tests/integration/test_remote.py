"""The remote tier against a real S3 server, and against what networks do to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from backstay_protocol import codec
from backstay_protocol.errors import Cancelled, DigestMismatch, Unreachable
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.pull import Endpoint, get_bytes, pull, read_range
from backstay_protocol.records import CommitRecord, CommitShard
from backstay_sidecar.digest import digest
from backstay_sidecar.tiers.remote import DeletionIntended, NameTaken, RemoteTier
from backstay_sidecar.transfer.s3_errors import StoreFailing
from support.byte_shards import BytesReader, byte_shard
from support.remote_tier import (
    LARGE,
    LAYOUT,
    PART_BYTES,
    assert_not_visible,
    part_of,
    read_whole,
    store_at,
    tier_over,
    wait_until,
)
from support.s3 import S3Server
from support.s3_faults import S3Faults

pytest_plugins = ["support.remote_tier"]

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
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint))
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
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint))
    faults.drop_after(1_000_000, times=4, only=lambda method, path: part_of(path) != "")
    reader = byte_shard(LARGE)
    tier.put(reader, threading.Event())
    assert read_whole(tier, reader) == reader.data
    assert len([path for _, path in faults.requests if part_of(path)]) == 4 + 4


def test_an_upload_that_gave_up_is_invisible_and_goes_on_with_its_missing_parts(
    impatient: RemoteTier, shaken: RemoteTier, faults: S3Faults
) -> None:
    reader = byte_shard(LARGE)
    faults.answer(500, "InternalError", only=lambda method, path: part_of(path) in ("3", "4"))
    with pytest.raises(StoreFailing):
        impatient.put(reader, threading.Event())
    assert_not_visible(shaken, reader)
    faults.heal()
    faults.requests.clear()
    shaken.put(reader, threading.Event())
    sent = sorted(filter(None, (part_of(path) for _, path in faults.requests)))
    assert sent == ["3", "4"]
    assert read_whole(shaken, reader) == reader.data


def test_an_upload_begun_from_other_bytes_is_not_believed(
    impatient: RemoteTier, shaken: RemoteTier, faults: S3Faults
) -> None:
    faults.answer(500, "InternalError", only=lambda method, path: part_of(path) == "4")
    with pytest.raises(StoreFailing):
        impatient.put(byte_shard(LARGE, seed=1), threading.Event())
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
    tier = tier_over(store_at(s3_server, bucket, faults.endpoint))
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


# --- presigned URLs -------------------------------------------------------------------------------


def test_a_shard_is_pulled_from_its_presigned_url_in_parallel(direct: RemoteTier) -> None:
    reader = byte_shard(LARGE)
    manifest = direct.put(reader, threading.Event())
    got = bytearray(LARGE)
    where, _ = direct.endpoint(reader.checkpoint, 0, 60)

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
    store = store_at(s3_server, bucket)
    keys = [f"many/{i:04d}" for i in range(1005)]
    with ThreadPoolExecutor(8) as creators:
        assert all(creators.map(lambda key: store.create(key, b"x"), keys))
    assert store.list("many/") == [(key, 1) for key in keys]
