"""A tier in a dictionary: for tests of what uses tiers. The contract tests hold it to the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from backstay_protocol.copies import copy_of
from backstay_protocol.errors import DigestMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import ShardCopy
from backstay_sidecar.digest import digest, fingerprint
from backstay_sidecar.tiers.base import Cancelled, ShardReader
from support.byte_shards import BytesReader


class FakeTier:
    """Keeps whole shards; `fail_with` makes every call raise."""

    def __init__(self, name: str = "local", holder: int = 0) -> None:
        self.name = name
        self.holder = holder
        self.shards: dict[tuple[CheckpointId, int], tuple[Manifest, bytes]] = {}
        self.fail_with: Exception | None = None
        self.puts = 0

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        self._may_fail()
        self.puts += 1
        manifest = shard.manifest
        there = self.shards.get((manifest.checkpoint, manifest.rank))
        if there is not None:
            return there[0]
        data, digests = bytearray(manifest.size), []
        for index in range(manifest.num_chunks):
            if cancel.is_set():
                raise Cancelled(f"rank {manifest.rank} of {manifest.checkpoint}: told to stop")
            start, stop = manifest.chunk(index)
            view = memoryview(data)[start:stop]
            shard.read_into(start, view)
            digests.append(digest(view))
            if manifest.digests is not None and manifest.digests[index] != digests[-1]:
                raise DigestMismatch(f"chunk {index} of rank {manifest.rank}")
        sealed = manifest.seal(tuple(digests), fingerprint(digests))
        self.shards[manifest.checkpoint, manifest.rank] = (sealed, bytes(data))
        return sealed

    @contextmanager
    def open(self, checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        self._may_fail()
        if (checkpoint, rank) not in self.shards:
            raise FileNotFoundError(f"rank {rank} of {checkpoint}")
        manifest, data = self.shards[checkpoint, rank]
        yield BytesReader(data, manifest)

    def inventory(self) -> Iterator[ShardCopy]:
        self._may_fail()
        held = list(self.shards.values())
        return iter([copy_of(manifest, self.name, self.holder) for manifest, _ in held])

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        self._may_fail()
        self.shards.pop((checkpoint, rank), None)

    def _may_fail(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with
