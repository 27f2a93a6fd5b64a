"""Reads one shard of the base from its sources, nearest first, every chunk verified.

Called by load.py. Slots (while their lock is held) and files are read by preadv, where that fits
straight into the live tensors: a fresh mapping costs more than it saves, and turns a bad disk into
a SIGBUS. Everything else comes by ranged pulls. Where a source fails, the chunks that are still
missing come from the next one: equal fingerprints mean equal bytes. What failed is kept as `bad`,
for the leader. Memory: one chunk per thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch

from backstay.digest import RunningDigest, digest, fingerprint
from backstay.scatter import Targets, batches
from backstay.shardfile import ShardIndex, read_header
from backstay_protocol import slots
from backstay_protocol.authorities import Authorities
from backstay_protocol.errors import CorruptData, DigestMismatch, Unreachable, VersionMismatch
from backstay_protocol.files import read_small
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import BadSource, ShardSources, Source
from backstay_protocol.names import REMOTE
from backstay_protocol.pull import Endpoint, get_bytes, pull

T = TypeVar("T")
Done = Callable[[int], None]

PULL_TIMEOUT_SECONDS = 60.0
READ_BYTES = 256 << 10
"""One read from a file: what was read is digested while it is in the core's own cache."""


class NoSource(Exception):
    """No source of a shard is left; `Shard.bad` says what was wrong with each."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How this rank can read."""

    memory: MemoryLayout
    threads: int = 2
    """Chunks in flight for one shard."""
    store: Authorities | None = None
    """Whom to trust as the object store; None: the public authorities."""

    def endpoint(self, source: Source, url: str) -> Endpoint:
        """Of a sidecar or of the object store."""
        tls = self.store.context if self.store is not None and source.tier == REMOTE else None
        return Endpoint(url, source.headers, tls=tls)


class _Opened(Protocol):
    """One source of one shard, open."""

    def fill(self, manifest: Manifest, targets: Targets, chunks: list[int], done: Done) -> None:
        """Verify the chunks and fill the targets; tells `done` of each, from several threads."""
        ...


class Shard:
    """One shard and what is left of its sources. Used by one thread at a time."""

    def __init__(self, sources: ShardSources, checkpoint: CheckpointId, reach: Reach) -> None:
        """Opens nothing yet."""
        self.rank = sources.rank
        self.chunk_size = sources.chunk_size
        self.bad: list[BadSource] = []
        self.bytes_by_tier: dict[str, int] = {}
        self._promise = sources
        self._checkpoint = checkpoint
        self._reach = reach
        self._sources = deque(sources.sources)
        self._manifest: Manifest | None = None
        self._index: ShardIndex | None = None

    @property
    def manifest(self) -> Manifest:
        """Known once anything was read."""
        assert self._manifest is not None
        return self._manifest

    def index(self) -> ShardIndex:
        """The verified header. Raises NoSource."""
        if self._index is None:
            cache: dict[int, bytearray] = {}
            self._index = read_header(
                lambda at, into: self._read(cache, at, into), self._promise.size
            )
        return self._index

    def read(self, start: int, stop: int) -> bytearray:
        """Verified bytes, for what is small (the objects blob). Raises NoSource."""
        data = bytearray(stop - start)
        self._read({}, start, memoryview(data))
        return data

    def fill(self, targets: Targets, done: Callable[[], None] = lambda: None) -> None:
        """Fill all targets; `done` is called after each chunk. Raises NoSource."""
        left = set(targets.chunks)
        lock = threading.Lock()

        def one_done(chunk: int) -> None:
            with lock:
                left.discard(chunk)
                self._count(chunk)
            done()

        while left:
            self._from_a_source(
                lambda opened: opened.fill(self.manifest, targets, sorted(left), one_done)
            )

    def _read(self, cache: dict[int, bytearray], start: int, into: memoryview) -> None:
        at = start
        while at < start + len(into):
            chunk = at // self.chunk_size
            if chunk not in cache:
                cache[chunk] = self._whole_chunk(chunk)
            inside = at - chunk * self.chunk_size
            part = memoryview(cache[chunk])[inside : inside + start + len(into) - at]
            if not part:
                raise CorruptData(f"shard {self.rank} ends before byte {at}")
            into[at - start : at - start + len(part)] = part
            at += len(part)

    def _whole_chunk(self, chunk: int) -> bytearray:
        begin = chunk * self.chunk_size
        data = bytearray(max(min(self.chunk_size, self._promise.size - begin), 0))
        if data:
            self.fill(Targets.of_buffer(data, begin, self.chunk_size))
        return data

    def _count(self, chunk: int) -> None:
        start, stop = self.manifest.chunk(chunk)
        tier = self._sources[0].tier
        self.bytes_by_tier[tier] = self.bytes_by_tier.get(tier, 0) + stop - start

    def _from_a_source(self, work: Callable[[_Opened], None]) -> None:
        if not self._sources:
            raise NoSource(f"shard {self.rank} of {self._checkpoint}")
        source = self._sources[0]
        try:
            with self._open(source) as opened:
                work(opened)
        except (OSError, CorruptData, Unreachable, VersionMismatch, slots.SlotBusy) as error:
            self.bad.append(_bad(self.rank, source, error))
            self._sources.popleft()

    @contextmanager
    def _open(self, source: Source) -> Iterator[_Opened]:
        if source.slot >= 0 and source.path:
            with slots.reading(self._reach.memory, source.slot_rank, source.slot) as manifest:
                if manifest is None or manifest.checkpoint != self._checkpoint:
                    raise FileNotFoundError(f"{source.path} does not hold it any more")
                self._accept(manifest, source.path)
                with _file(source.path) as descriptor:
                    yield _File(source.path, descriptor, self._reach.threads)
            return
        if source.path and (not source.url or os.access(source.path, os.R_OK)):
            with _file(source.path) as descriptor:
                self._accept_file(source.manifest_path)
                yield _File(source.path, descriptor, self._reach.threads)
            return
        self._accept_url(self._reach.endpoint(source, source.manifest_url))
        yield _Remote(self._reach.endpoint(source, source.url), self._reach.threads)

    def _accept_file(self, path: str) -> None:
        if self._manifest is None:
            self._accept(read_manifest(read_small(path), path), path)

    def _accept_url(self, endpoint: Endpoint) -> None:
        if self._manifest is None:
            manifest = read_manifest(get_bytes(endpoint), endpoint.name)
            self._accept(manifest, endpoint.name)

    def _accept(self, manifest: Manifest, where: str) -> None:
        """Take a manifest only if it is the one that the decision speaks of, digest by digest."""
        if manifest.digests is None:
            raise Unreachable(f"{where}: not sealed yet")
        promised = self._promise
        expected = (self._checkpoint, promised.rank, promised.size, promised.chunk_size)
        got = (manifest.checkpoint, manifest.rank, manifest.size, manifest.chunk_size)
        if got != expected or manifest.fingerprint != promised.fingerprint:
            raise CorruptData(f"{where}: the manifest is of {got}, decided was {expected}")
        if fingerprint(manifest.digests) != manifest.fingerprint:
            raise CorruptData(f"{where}: the digests do not give the manifest's fingerprint")
        self._manifest = manifest


def _bad(rank: int, source: Source, error: Exception) -> BadSource:
    proven = isinstance(error, (CorruptData, FileNotFoundError))
    return BadSource(
        shard_rank=rank,
        tier=source.tier,
        holder=source.holder,
        proven=proven,
        detail=str(error) or type(error).__name__,
    )


@contextmanager
def _file(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _expect(manifest: Manifest, chunk: int, got: str, where: str) -> None:
    assert manifest.digests is not None
    if got != manifest.digests[chunk]:
        raise DigestMismatch(
            f"chunk {chunk} of {where}: digest {got}, its manifest says {manifest.digests[chunk]}"
        )


class _File:
    """A file on a disk that this pod mounts, or a slot."""

    def __init__(self, path: str, descriptor: int, threads: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._threads = threads

    def fill(self, manifest: Manifest, targets: Targets, chunks: list[int], done: Done) -> None:
        buffers = _Buffers(manifest, targets.on_device)

        def work(chunk: int) -> None:
            start, stop = manifest.chunk(chunk)
            if not self._fill_straight(manifest, targets, chunk):
                data = buffers.mine()[: stop - start]
                self._read(start, data)
                _expect(manifest, chunk, digest(data), self._path)
                targets.fill(chunk, start, data)
            done(chunk)

        in_threads(chunks, work, self._threads)

    def _fill_straight(self, manifest: Manifest, targets: Targets, chunk: int) -> bool:
        """Read into the targets themselves, digested there; False where they don't fit."""
        start, stop = manifest.chunk(chunk)
        views = targets.views(chunk, start, stop)
        if views is None:
            return False
        seen = RunningDigest()
        for some in batches(views, READ_BYTES):
            num_bytes = sum(map(len, some))
            if os.preadv(self._descriptor, some, start) != num_bytes:
                return False
            start += num_bytes
            for view in some:
                seen.update(view)
        _expect(manifest, chunk, seen.hexdigest(), self._path)
        return True

    def _read(self, start: int, view: memoryview) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], start)
            if not count:
                raise CorruptData(f"{self._path} ends at byte {start}")
            view, start = view[count:], start + count


class _Remote:
    """A sidecar or an object store."""

    def __init__(self, endpoint: Endpoint, threads: int) -> None:
        self._endpoint = endpoint
        self._threads = threads

    def fill(self, manifest: Manifest, targets: Targets, chunks: list[int], done: Done) -> None:
        buffers = _Buffers(manifest, targets.on_device)

        def into(chunk: int) -> list[memoryview]:
            start, stop = manifest.chunk(chunk)
            views = targets.views(chunk, start, stop)
            if views is None:
                return [buffers.mine()[: stop - start]]
            straight.add(chunk)
            return views

        def deliver(chunk: int, data: memoryview) -> None:
            if chunk not in straight:
                targets.fill(chunk, manifest.chunk(chunk)[0], data)
            done(chunk)

        straight: set[int] = set()
        pull(
            self._endpoint,
            manifest,
            digest,
            deliver,
            chunks=chunks,
            into=into,
            hasher=RunningDigest,
            threads=self._threads,
            timeout=PULL_TIMEOUT_SECONDS,
        )


class _Buffers:
    """One chunk buffer per thread, pinned where the targets are on a device."""

    def __init__(self, manifest: Manifest, pinned: bool) -> None:
        self._size = min(manifest.chunk_size, manifest.size)
        self._pinned = pinned
        self._threads = threading.local()

    def mine(self) -> memoryview:
        """The buffer of the calling thread."""
        if not hasattr(self._threads, "view"):
            memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)
            self._threads.view = memory.numpy().data
        return cast(memoryview, self._threads.view)


def in_threads(items: Iterable[T], work: Callable[[T], None], threads: int) -> None:
    """Do the work for all items, a few at once. The first error stops it and is raised."""
    queue = deque(items)
    if threads <= 1 or len(queue) <= 1:
        for item in queue:
            work(item)
        return

    def worker() -> None:
        while True:
            try:
                item = queue.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException:
                queue.clear()
                raise

    with ThreadPoolExecutor(min(threads, len(queue)), "backstay-load") as pool:
        futures = [pool.submit(worker) for _ in range(min(threads, len(queue)))]
    for future in futures:
        future.result()
