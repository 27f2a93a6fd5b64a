"""One body for every tier: memory, local disk, neighbour, S3, and the fake that other tests use.

A tier of a later issue is added by a harness and an entry in TIERS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event

import pytest

from backstay_protocol import slots
from backstay_protocol.copies import copy_of
from backstay_protocol.errors import Cancelled, DigestMismatch, Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.pull import Endpoint, read_range
from backstay_sidecar.digest import digest, fingerprint
from backstay_sidecar.tiers.base import ShardReader, Tier
from backstay_sidecar.tiers.disk import DiskStore
from backstay_sidecar.tiers.memory import MemoryTier
from backstay_sidecar.tiers.neighbor import Neighbor, NeighborTier
from backstay_sidecar.tiers.onepass import one_pass
from backstay_sidecar.tiers.remote import RemoteStore, RemoteTier
from backstay_sidecar.transfer.retry import RetryPolicy
from backstay_sidecar.transfer.upload import UploadSettings
from support.byte_shards import CHUNK, RUN, BytesReader, byte_shard
from support.fake_tier import FakeTier
from support.peer_server import PeerServer
from support.s3 import S3Server

SIZE = 5 * CHUNK + 321


Put = Callable[[BytesReader, Event], Manifest]
Delete = Callable[[CheckpointId, int], None]


class Harness:
    """A tier under test, and how a shard gets into it."""

    def __init__(self, tier: Tier, put: Put, delete: Delete | None = None) -> None:
        self.tier = tier
        self.delete = delete or tier.delete
        self._put = put

    def put(self, reader: BytesReader, cancel: Event | None = None) -> Manifest:
        return self._put(reader, cancel or Event())

    def read(self, reader: BytesReader) -> bytes:
        with self.tier.open(reader.checkpoint, reader.manifest.rank) as opened:
            buffer = bytearray(opened.manifest.size)
            opened.read_into(0, memoryview(buffer))
            return bytes(buffer)

    def visible(self, reader: BytesReader) -> bool:
        """Whether anybody could see the shard, in a listing or by opening it."""
        listed = [(copy.checkpoint, copy.rank) for copy in self.tier.inventory()]
        if (reader.checkpoint, reader.manifest.rank) in listed:
            return True
        try:
            with self.tier.open(reader.checkpoint, reader.manifest.rank):
                return True
        except FileNotFoundError:
            return False


# --- how each is set up ---------------------------------------------------------------------------


@contextmanager
def fake(_: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    tier = FakeTier()
    yield Harness(tier, tier.put)


@contextmanager
def disk(_: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    layout = DiskLayout(str(folder), RUN, 0)
    store = DiskStore(layout.shards, "local", 0, RUN)
    store.prepare()
    yield Harness(store, store.put)


@contextmanager
def memory(_: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    """The trainer fills it: a slot for each shard, published, then sealed by the sidecar."""
    layout = MemoryLayout(str(folder))
    tier, taken = MemoryTier(layout, RUN, 0), dict[int, int]()

    def put(reader: BytesReader, cancel: Event) -> Manifest:
        manifest = reader.manifest
        rank = manifest.rank
        Path(layout.rank_folder(rank)).mkdir(parents=True, exist_ok=True)
        slot = taken[rank] = taken.get(rank, -1) + 1
        Path(layout.slot(rank, slot)).write_bytes(reader.data)
        slots.publish(layout, rank, slot, manifest)
        with tier.open_slot(rank, slot) as opened:
            assert opened is not None
            digests = one_pass(opened, None, cancel).digests
            sealed = manifest.seal(digests, fingerprint(digests))
            tier.seal(rank, slot, sealed)
        return sealed

    yield Harness(tier, put)


@contextmanager
def neighbor(_: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    """Two real servers: the offering one serves what is being put, the other keeps copies."""
    layout = DiskLayout(str(folder), RUN, 1)
    store = DiskStore(layout.replicas, "neighbor", 1, RUN)
    store.prepare()
    offered: dict[tuple[CheckpointId, int], BytesReader] = {}

    @contextmanager
    def open_offered(checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        if (checkpoint, rank) not in offered:
            raise FileNotFoundError
        yield offered[checkpoint, rank]

    with PeerServer(open_offered) as sender, PeerServer(store.open, store, RUN) as keeper:
        tier = NeighborTier(
            replica=0,
            address=sender.address,
            neighbor=lambda: Neighbor(1, keeper.address),
            attempt=lambda: 1_000_001,
            headers={},
        )

        def put(reader: BytesReader, cancel: Event) -> Manifest:
            offered[reader.checkpoint, reader.manifest.rank] = reader
            return tier.put(reader, cancel)

        def delete(checkpoint: CheckpointId, rank: int) -> None:
            """On the leader's word each side deletes for itself."""
            tier.delete(checkpoint, rank)
            store.delete(checkpoint, rank)

        yield Harness(tier, put, delete)


@contextmanager
def remote(request: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    server: S3Server = request.getfixturevalue("s3_server")
    store = RemoteStore(
        endpoint=server.endpoint,
        bucket=request.getfixturevalue("bucket"),
        access_key=server.access_key,
        secret_key=server.secret_key,
    )
    settings = UploadSettings(retry=RetryPolicy(budget_seconds=0))
    tier = RemoteTier(store, RemoteLayout("pre/fix", RUN), settings=settings)
    yield Harness(tier, tier.put)


Setup = Callable[[pytest.FixtureRequest, Path], AbstractContextManager[Harness]]
TIERS: dict[str, Setup] = {
    "fake": fake,
    "memory": memory,
    "disk": disk,
    "neighbor": neighbor,
    "remote": remote,
}


@pytest.fixture(params=list(TIERS))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    with TIERS[request.param](request, tmp_path) as made:
        yield made


@pytest.fixture(params=[name for name in TIERS if name != "memory"])
def writable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """The tiers that the sidecar fills by `put` (memory is filled by the trainer)."""
    with TIERS[request.param](request, tmp_path) as made:
        yield made


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, CHUNK, SIZE])
def test_what_was_put_is_read_back_byte_for_byte(harness: Harness, size: int) -> None:
    reader = byte_shard(size)
    manifest = harness.put(reader)
    assert harness.read(reader) == reader.data
    with harness.tier.open(reader.checkpoint, 0) as opened:
        assert opened.manifest == manifest


def test_any_range_is_read(harness: Harness) -> None:
    reader = byte_shard(SIZE)
    harness.put(reader)
    with harness.tier.open(reader.checkpoint, 0) as opened:
        for start, stop in ((0, 1), (SIZE - 1, SIZE), (CHUNK - 3, 2 * CHUNK + 7), (777, 777)):
            buffer = bytearray(stop - start)
            opened.read_into(start, memoryview(buffer))
            assert buffer == reader.data[start:stop]


def test_a_descriptor_if_there_is_one_begins_with_the_shard(harness: Harness) -> None:
    import os

    reader = byte_shard(SIZE)
    harness.put(reader)
    with harness.tier.open(reader.checkpoint, 0) as opened:
        descriptor = opened.fileno()
        if descriptor is not None:
            assert os.pread(descriptor, SIZE, 0) == reader.data


@pytest.mark.parametrize(("step", "attempt", "rank"), [(8, 1, 0), (7, 2, 0), (7, 1, 3)])
def test_an_unknown_shard_is_not_found(
    harness: Harness, step: int, attempt: int, rank: int
) -> None:
    harness.put(byte_shard(step=7, attempt=1, rank=0))
    checkpoint = CheckpointId(step, attempt)
    with pytest.raises(FileNotFoundError), harness.tier.open(checkpoint, rank):
        pass


# --- listing --------------------------------------------------------------------------------------


def test_an_empty_tier_lists_nothing(harness: Harness) -> None:
    assert list(harness.tier.inventory()) == []


def test_the_inventory_says_all_there_is_to_say_of_each_shard(harness: Harness) -> None:
    shards = [
        byte_shard(seed=number, step=step, attempt=attempt, rank=rank)
        for number, (step, attempt, rank) in enumerate(
            [(7, 1_000_001, 0), (7, 1_000_001, 3), (7, 1_000_002, 0), (8, 1_000_001, 0)]
        )
    ]
    sealed = [harness.put(reader) for reader in shards]
    found = list(harness.tier.inventory())
    assert len({copy.holder for copy in found}) == 1
    expected = {copy_of(manifest, harness.tier.name, found[0].holder) for manifest in sealed}
    assert set(found) == expected
    assert len(found) == len(expected)


# --- deleting -------------------------------------------------------------------------------------


def test_a_deleted_shard_is_gone_and_no_other(harness: Harness) -> None:
    gone, stays = byte_shard(seed=1, rank=0), byte_shard(seed=2, rank=1)
    harness.put(gone)
    harness.put(stays)
    harness.delete(gone.checkpoint, 0)
    assert not harness.visible(gone)
    assert harness.read(stays) == stays.data
    assert [copy.rank for copy in harness.tier.inventory()] == [1]


def test_deleting_what_is_not_there_is_no_error(harness: Harness) -> None:
    reader = byte_shard()
    harness.delete(reader.checkpoint, 0)
    harness.put(reader)
    harness.delete(reader.checkpoint, 0)
    harness.delete(reader.checkpoint, 0)


def test_a_deleted_shard_can_be_put_again(writable: Harness) -> None:
    reader = byte_shard()
    writable.put(reader)
    writable.delete(reader.checkpoint, 0)
    writable.put(reader)
    assert writable.read(reader) == reader.data


# --- putting --------------------------------------------------------------------------------------


def test_what_was_not_sealed_is_sealed_on_the_way(harness: Harness) -> None:
    reader = byte_shard(SIZE, sealed=False)
    manifest = harness.put(reader)
    view = memoryview(reader.data)
    chunks = [manifest.chunk(index) for index in range(manifest.num_chunks)]
    assert manifest.digests == tuple(digest(view[start:stop]) for start, stop in chunks)
    assert manifest.fingerprint == fingerprint(manifest.digests)
    assert manifest == reader.manifest.seal(manifest.digests, manifest.fingerprint)


def test_putting_again_changes_nothing(writable: Harness) -> None:
    reader = byte_shard(SIZE)
    first = writable.put(reader)
    assert writable.put(byte_shard(SIZE)) == first
    assert len(list(writable.tier.inventory())) == 1
    assert writable.read(reader) == reader.data


def test_nothing_is_visible_before_all_of_it_is_there(writable: Harness) -> None:
    reader = byte_shard(SIZE)
    seen: list[bool] = []
    reader.before_read = lambda _: seen.append(writable.visible(reader))
    writable.put(reader)
    assert seen
    assert not any(seen)
    assert writable.visible(reader)


@pytest.mark.parametrize("position", [0, 3 * CHUNK, SIZE - 1], ids=["first", "middle", "last"])
def test_a_corrupt_source_is_refused_and_never_visible(writable: Harness, position: int) -> None:
    reader = byte_shard(SIZE)
    reader.data[position] ^= 1
    with pytest.raises(DigestMismatch, match=f"chunk {position // CHUNK} of rank 0"):
        writable.put(reader)
    assert not writable.visible(reader)


def test_a_good_source_is_taken_after_a_corrupt_one(writable: Harness) -> None:
    bad, good = byte_shard(SIZE), byte_shard(SIZE)
    bad.data[10] ^= 1
    with pytest.raises(DigestMismatch):
        writable.put(bad)
    writable.put(good)
    assert writable.read(good) == good.data


@pytest.mark.parametrize("position", [0, 3 * CHUNK], ids=["begin", "middle"])
def test_an_interrupted_put_is_invisible_and_can_be_taken_up_again(
    writable: Harness, position: int
) -> None:
    reader = byte_shard(SIZE)

    def break_off(offset: int) -> None:
        if offset >= position or reader.reads_whole:
            raise Unreachable("the source went away")

    reader.before_read = break_off
    with pytest.raises(Unreachable):
        writable.put(reader)
    assert not writable.visible(reader)
    reader.before_read = None
    writable.put(reader)
    assert writable.read(reader) == reader.data


def test_a_put_that_was_cancelled_before_it_began_does_nothing(writable: Harness) -> None:
    reader, cancel = byte_shard(SIZE), Event()
    cancel.set()
    with pytest.raises(Cancelled):
        writable.put(reader, cancel)
    assert not writable.visible(reader)


def test_a_put_that_is_cancelled_leaves_a_whole_shard_or_none(writable: Harness) -> None:
    reader, cancel = byte_shard(SIZE), Event()
    reader.before_read = lambda _: cancel.set()
    with contextlib.suppress(Cancelled):
        writable.put(reader, cancel)
    if writable.visible(reader):
        assert writable.read(reader) == reader.data
    reader.before_read = None
    writable.put(reader)
    assert writable.read(reader) == reader.data


# --- of the harness itself ------------------------------------------------------------------------


def test_the_peer_server_serves_ranges_as_a_sidecar_does() -> None:
    reader = byte_shard(SIZE)
    with PeerServer(lambda checkpoint, rank: contextlib.nullcontext(reader)) as server:
        where = Endpoint(f"http://{server.address}/v1/checkpoints/7-1000001/shards/0")
        buffer = bytearray(100)
        read_range(where, CHUNK - 50, memoryview(buffer))
    assert buffer == reader.data[CHUNK - 50 : CHUNK + 50]
