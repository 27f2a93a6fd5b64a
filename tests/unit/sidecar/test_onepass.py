"""One pass over a shard: digests, and a disk that may fail or hang on the way."""

from __future__ import annotations

import threading

import pytest

from backstay_protocol.errors import DigestMismatch
from backstay_sidecar.tiers.base import TierFull, Unfit
from backstay_sidecar.tiers.onepass import MAX_CHUNK_BYTES, one_pass
from support.byte_shards import CHUNK, byte_shard, manifest_of

NEVER = threading.Event()


class Chunks:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.got: dict[int, bytes] = {}

    def write_chunk(self, index: int, data: memoryview) -> None:
        self.got[index] = bytes(data)


def test_an_unsealed_shard_gets_the_digests_that_sealing_needs() -> None:
    shard = byte_shard(sealed=False)
    assert one_pass(shard, None, NEVER).digests == manifest_of(bytes(shard.data)).digests


def test_the_sink_gets_every_chunk_once() -> None:
    shard, sink = byte_shard(1_000_000), Chunks()
    assert one_pass(shard, sink, NEVER).sink_error is None
    assert b"".join(sink.got[i] for i in sorted(sink.got)) == shard.data


def test_a_bad_chunk_of_a_sealed_shard_is_named() -> None:
    shard = byte_shard()
    shard.data[-1] ^= 1
    with pytest.raises(DigestMismatch, match="chunk 4"):
        one_pass(shard, None, NEVER)


def test_a_sink_that_fails_does_not_fail_the_pass() -> None:
    class Full(Chunks):
        def write_chunk(self, index: int, data: memoryview) -> None:
            if index == 2:
                raise TierFull("no room")
            super().write_chunk(index, data)

    shard = byte_shard(20 * CHUNK)
    result = one_pass(shard, Full(), NEVER)
    assert result.digests == manifest_of(bytes(shard.data)).digests
    assert isinstance(result.sink_error, TierFull)


@pytest.mark.parametrize("num_chunks", [1, 2, 20])
def test_a_sink_that_hangs_is_left_behind(num_chunks: int) -> None:
    released = threading.Event()

    class Stuck(Chunks):
        def write_chunk(self, index: int, data: memoryview) -> None:
            assert released.wait(30)

    shard = byte_shard(num_chunks * CHUNK)
    try:
        result = one_pass(shard, Stuck(), NEVER, stall_seconds=0.05)
        assert result.digests == manifest_of(bytes(shard.data)).digests
        assert "took no chunk" in str(result.sink_error)
    finally:
        released.set()


def test_chunks_that_would_not_fit_the_memory_are_refused() -> None:
    shard = byte_shard(chunk=MAX_CHUNK_BYTES + 4096)
    with pytest.raises(Unfit):
        one_pass(shard, None, NEVER)
