"""One pass over a shard: read each chunk, digest it, and hand it on to a disk in the same pass.

Used to seal slots (replication) and to put shards on a disk (disk.py). Memory is bounded by
NUM_BUFFERS chunks. A sink that fails or hangs never fails the pass: its error is returned.
"""

from __future__ import annotations

import mmap
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from backstay_protocol.errors import BackstayError, Cancelled, DigestMismatch
from backstay_protocol.manifest import Manifest
from backstay_sidecar.digest import digest
from backstay_sidecar.tiers.base import ShardReader, Unfit

NUM_BUFFERS = 3
NUM_WRITERS = 2
MAX_CHUNK_BYTES = 256 << 20
SINK_STALL_SECONDS = 30.0  # a disk that takes no chunk for so long is left behind


class Sink(Protocol):
    """Takes chunks in any order, from several threads."""

    def write_chunk(self, index: int, data: memoryview) -> None:
        """Raises OSError or TierFull."""
        ...


@dataclass(frozen=True)
class PassResult:
    """What came out of a pass."""

    digests: tuple[str, ...]
    sink_error: Exception | None = None
    """Why the sink does not have all chunks; None: it does, or there was none."""


def one_pass(
    shard: ShardReader,
    sink: Sink | None,
    cancel: Event,
    stall_seconds: float = SINK_STALL_SECONDS,
) -> PassResult:
    """Read and digest the whole shard. A sealed one is verified: DigestMismatch at the first bad
    chunk. Raises Cancelled, Unfit, and CorruptData or OSError of the reader.
    """
    manifest = shard.manifest
    if manifest.chunk_size > MAX_CHUNK_BYTES:
        raise Unfit(
            f"rank {manifest.rank} of {manifest.checkpoint}: chunks of {manifest.chunk_size} "
            f"bytes; at most {MAX_CHUNK_BYTES} are read"
        )
    writers = _Writers(sink, stall_seconds, min(manifest.chunk_size, manifest.size))
    digests = []
    try:
        for index in range(manifest.num_chunks):
            if cancel.is_set():
                raise Cancelled(f"rank {manifest.rank} of {manifest.checkpoint}: told to stop")
            start, stop = manifest.chunk(index)
            buffer = writers.buffer()
            shard.read_into(start, buffer[: stop - start])
            digests.append(_checked(manifest, index, digest(buffer[: stop - start])))
            writers.write(index, buffer, stop - start)
        return PassResult(tuple(digests), writers.drain())
    finally:
        writers.close()


def _checked(manifest: Manifest, index: int, got: str) -> str:
    if manifest.digests is not None and manifest.digests[index] != got:
        raise DigestMismatch(
            f"chunk {index} of rank {manifest.rank} of {manifest.checkpoint}: its digest is {got}, "
            f"its manifest says {manifest.digests[index]}; this copy is bad"
        )
    return got


class _Writers:
    """Hands full buffers to a sink in a few threads and takes them back when they are written."""

    def __init__(self, sink: Sink | None, stall_seconds: float, buffer_bytes: int) -> None:
        self._sink = sink
        self._stall_seconds = stall_seconds
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._buffer_bytes = buffer_bytes
        self._pool = ThreadPoolExecutor(NUM_WRITERS, "disk-write") if sink is not None else None
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._out = 0
        for _ in range(NUM_BUFFERS if sink is not None else 1):
            self._free.put(self._allocate())

    def _allocate(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self._buffer_bytes))

    def buffer(self) -> memoryview:
        """A free buffer; where the sink gives none back in time, it is left behind."""
        if self._sink is None:
            return self._free.get()
        try:
            return self._free.get(timeout=self._stall_seconds)
        except queue.Empty:
            self._leave_behind()
            return self._allocate()

    def write(self, index: int, buffer: memoryview, num_bytes: int) -> None:
        if self._sink is None or self._pool is None or self._error is not None:
            self._free.put(buffer)
            return
        with self._lock:
            self._out += 1
        self._pool.submit(self._write, self._sink, index, buffer, num_bytes)

    def _write(self, sink: Sink, index: int, buffer: memoryview, num_bytes: int) -> None:
        try:
            if self._error is None:
                sink.write_chunk(index, buffer[:num_bytes])
        except (OSError, BackstayError) as error:
            self._error = self._error or error
        finally:
            with self._lock:
                self._out -= 1
            self._free.put(buffer)

    def drain(self) -> Exception | None:
        """Wait until the sink has everything, or is given up."""
        while self._error is None:
            with self._lock:
                if not self._out:
                    break
            try:
                self._free.get(timeout=self._stall_seconds)
            except queue.Empty:
                self._leave_behind()
        return self._error

    def _leave_behind(self) -> None:
        self._error = self._error or OSError(
            f"the disk took no chunk within {self._stall_seconds:g} s"
        )
        self._sink = None

    def close(self) -> None:
        """Threads that hang in the disk keep their buffers; nobody waits for them."""
        self._error = self._error or Cancelled("the pass is over")
        if self._pool is not None:
            self._pool.shutdown(wait=self._sink is not None, cancel_futures=True)
