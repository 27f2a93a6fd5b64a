"""Shards of plain bytes for tests of transfers and tiers, and a reader of them that can be bad."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_sidecar.digest import digest, fingerprint

RUN = "team/run"
CHUNK = 64 << 10


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that no two of are alike by accident."""
    return random.Random((size << 8) + seed).randbytes(size)


def manifest_of(
    data: bytes,
    *,
    step: int = 7,
    attempt: int = 1_000_001,
    rank: int = 0,
    chunk: int = CHUNK,
    sealed: bool = True,
) -> Manifest:
    """The manifest of `data` as one shard."""
    manifest = Manifest(
        run=RUN,
        step=step,
        attempt=attempt,
        rank=rank,
        world_size=4,
        replica=rank,
        plan="plan",
        size=len(data),
        created=1.0,
        chunk_size=chunk,
    )
    if not sealed:
        return manifest
    view = memoryview(data)
    digests = tuple(digest(view[a:b]) for a, b in map(manifest.chunk, range(manifest.num_chunks)))
    return manifest.seal(digests, fingerprint(digests))


class BytesReader:
    """A ShardReader over bytes. `before_read(offset)` may raise, wait or change the world."""

    def __init__(
        self, data: bytes, manifest: Manifest, before_read: Callable[[int], None] | None = None
    ) -> None:
        self.data = bytearray(data)
        self.manifest = manifest
        self.before_read = before_read
        self.reads = 0
        self.reads_whole = False
        """The read under way wants all of the shard at once."""
        self._lock = threading.Lock()

    @property
    def checkpoint(self) -> CheckpointId:
        return self.manifest.checkpoint

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.reads += 1
            self.reads_whole = len(buffer) == len(self.data)
        if self.before_read is not None:
            self.before_read(offset)
        buffer[:] = self.data[offset : offset + len(buffer)]

    def fileno(self) -> None:
        return None


def byte_shard(size: int = 300_000, *, seed: int = 0, **manifest: int | bool) -> BytesReader:
    """A whole good shard."""
    data = noise(size, seed)
    return BytesReader(data, manifest_of(data, **manifest))
