"""Shards on a disk: visible whole or not at all, whatever was left behind."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backstay_protocol.errors import DigestMismatch
from backstay_protocol.files import read_small
from backstay_protocol.layout import DiskLayout
from backstay_protocol.names import LOCAL, NEIGHBOR, PROTOCOL_VERSION
from backstay_sidecar.tiers.base import Cancelled, TierFull, Unfit
from backstay_sidecar.tiers.disk import DiskStore, HeldTier
from support.byte_shards import RUN, BytesReader, byte_shard, manifest_of, noise

NEVER = threading.Event()


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(str(tmp_path / "shards"), LOCAL, 3, RUN)
    store.prepare()
    return store


def files(store: DiskStore) -> list[str]:
    found = [path for path in Path(store.area).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(store.area)) for path in found)


def again(store: DiskStore) -> DiskStore:
    """The same folder after a restart."""
    fresh = DiskStore(store.area, store.name, 3, RUN)
    fresh.prepare()
    return fresh


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read_all(store: DiskStore, shard: BytesReader) -> bytes:
    with store.open(shard.checkpoint, shard.manifest.rank) as reader:
        data = bytearray(reader.manifest.size)
        reader.read_into(0, memoryview(data))
        assert os.fstat(reader.fileno() or -1).st_size == reader.manifest.size
    return bytes(data)


@pytest.mark.parametrize("sealed", [True, False])
def test_what_was_put_is_read_back_and_listed(store: DiskStore, sealed: bool) -> None:
    shard = byte_shard(300_001, sealed=sealed)
    manifest = store.put(shard, NEVER)
    assert manifest == manifest_of(bytes(shard.data))
    assert read_all(store, shard) == shard.data
    (copy,) = store.inventory()
    assert (copy.tier, copy.holder, copy.fingerprint) == (LOCAL, 3, manifest.fingerprint)
    assert list(again(store).inventory()) == [copy]


def test_putting_again_reads_nothing(store: DiskStore) -> None:
    shard = byte_shard()
    store.put(shard, NEVER)
    reads = shard.reads
    store.put(shard, NEVER)
    assert shard.reads == reads


def test_a_bad_chunk_is_never_stored(store: DiskStore) -> None:
    shard = byte_shard()
    shard.data[70_000] ^= 1
    with pytest.raises(DigestMismatch, match="chunk 1 of rank 0"):
        store.put(shard, NEVER)
    assert files(store) == []
    assert list(store.inventory()) == []


def test_a_cancelled_put_leaves_nothing(store: DiskStore) -> None:
    cancel = threading.Event()
    shard = byte_shard()
    shard.before_read = lambda offset: cancel.set() if offset else None
    with pytest.raises(Cancelled):
        store.put(shard, cancel)
    assert files(store) == []


def test_a_full_disk_is_told_with_numbers_and_leaves_nothing(store: DiskStore) -> None:
    with (
        no_file_larger_than(100_000),
        pytest.raises(TierFull, match=r"needs 300000 bytes, \d+ are free"),
    ):
        store.put(byte_shard(), NEVER)
    assert files(store) == []
    store.put(byte_shard(), NEVER)
    assert len(list(store.inventory())) == 1


def test_a_chunk_size_that_no_disk_can_take_is_refused_and_blames_nobody(store: DiskStore) -> None:
    with pytest.raises(Unfit, match="no multiple of 4096"):
        store.put(byte_shard(chunk=1000), NEVER)


def test_leftovers_of_a_crash_are_invisible_and_cleaned(store: DiskStore) -> None:
    whole, torn, bare = byte_shard(rank=0), byte_shard(rank=1), byte_shard(rank=2)
    for shard in (whole, torn, bare):
        store.put(shard, NEVER)
    os.truncate(DiskLayout.shard(store.area, torn.checkpoint, 1), 100)
    os.unlink(DiskLayout.manifest(store.area, bare.checkpoint, 2))
    folder = os.path.dirname(DiskLayout.shard(store.area, whole.checkpoint, 0))
    for name in ("00003.safetensors.part-12-0", "00000.json.tmp-12"):
        Path(folder, name).write_bytes(b"x")
    assert [copy.rank for copy in store.inventory()] == [0]
    with pytest.raises(FileNotFoundError), store.open(torn.checkpoint, 1):
        pass
    fresh = again(store)
    assert [Path(name).name for name in files(fresh)] == ["00000.json", "00000.safetensors"]
    assert read_all(fresh, whole) == whole.data


def test_what_a_newer_backstay_wrote_is_left_alone(store: DiskStore) -> None:
    shard = byte_shard()
    store.put(shard, NEVER)
    path = DiskLayout.manifest(store.area, shard.checkpoint, 0)
    text = read_small(path).replace(PROTOCOL_VERSION.encode(), b"9.0")
    Path(path).write_bytes(text)
    fresh = again(store)
    assert list(fresh.inventory()) == []
    assert len(files(fresh)) == 2


def test_shards_of_another_run_are_not_ours(store: DiskStore) -> None:
    store.put(byte_shard(), NEVER)
    other = DiskStore(store.area, LOCAL, 3, "team/other")
    assert list(other.inventory()) == []


def test_a_manifest_that_lies_about_its_place_is_not_believed(store: DiskStore) -> None:
    shard = byte_shard()
    store.put(shard, NEVER)
    for suffix in ("json", "safetensors"):
        folder = Path(store.area, str(shard.checkpoint))
        (folder / f"00003.{suffix}").write_bytes((folder / f"00000.{suffix}").read_bytes())
    assert [copy.rank for copy in store.inventory()] == [0]


def test_deleting_takes_everything_and_may_be_repeated(store: DiskStore) -> None:
    shard = byte_shard()
    store.put(shard, NEVER)
    store.delete(shard.checkpoint, 0)
    store.delete(shard.checkpoint, 0)
    assert os.listdir(store.area) == []
    assert list(store.inventory()) == []


def test_a_listing_sees_what_others_changed(store: DiskStore) -> None:
    for rank in range(3):
        store.put(byte_shard(rank=rank), NEVER)
    assert len(store.scan()) == 3
    again(store).delete(byte_shard(rank=1).checkpoint, 1)
    assert [shelved.copy.rank for shelved in store.scan()] == [0, 2]


def test_nothing_is_written_before_the_folder_was_cleared(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path / "new"), LOCAL, 0, RUN)
    assert not store.prepared
    store.put(byte_shard(), NEVER)
    assert store.prepared


def test_siblings_are_offered_to_a_restore_but_do_not_count_as_neighbours(tmp_path: Path) -> None:
    own = DiskLayout(str(tmp_path), RUN, 0)
    gone = DiskLayout(str(tmp_path), RUN, 1)
    held = HeldTier(own, 0, RUN)
    kept, local_of_1, held_of_1 = (byte_shard(rank=r) for r in range(3))
    held.own.put(kept, NEVER)
    DiskStore(gone.shards, LOCAL, 1, RUN).put(local_of_1, NEVER)
    DiskStore(gone.replicas, NEIGHBOR, 1, RUN).put(held_of_1, NEVER)
    assert [copy.rank for copy in held.inventory()] == [0]
    copies = [shelved.copy for shelved in held.scan_all()]
    assert [(copy.rank, copy.tier, copy.holder) for copy in copies] == [
        (rank, NEIGHBOR, 0) for rank in range(3)
    ]
    with held.open(local_of_1.checkpoint, 1) as reader:
        assert reader.manifest.rank == 1
    held.delete(local_of_1.checkpoint, 1)
    assert len(held.scan_all()) == 3, "a sibling's folder is only read"


def test_concurrent_puts_of_one_shard_leave_one_whole_copy(store: DiskStore) -> None:
    shard = byte_shard(2_000_000)
    threads = [threading.Thread(target=store.put, args=(shard, NEVER)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_all(store, shard) == noise(2_000_000)
    assert len(files(store)) == 2
