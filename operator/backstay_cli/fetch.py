"""Pulling a whole checkpoint into a folder: parallel, every chunk verified, all or nothing.

The folder holds `<rank>.safetensors` with its manifest `<rank>.json` beside it and
`checkpoint.json`; stock `safetensors` and torch's HuggingFaceStorageReader read it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backstay_cli.catalog.base import Catalog, CorruptCopy, ShardSource
from backstay_cli.errors import Corrupt, NoAnswer, NotFound, UsageError
from backstay_protocol import codec
from backstay_protocol.errors import BackstayError, Cancelled, CorruptData, Unreachable
from backstay_protocol.files import sync_folder, write_atomically
from backstay_protocol.ids import CheckpointId, format_rank
from backstay_protocol.layout import MANIFEST_SUFFIX, SHARD_SUFFIX
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import CheckpointStatus

CHECKPOINT_FILE = "checkpoint.json"
_SHARDS_AT_ONCE = 4

Progress = Callable[[int, int], None]
"""(bytes verified so far, bytes in all that are known so far)."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """What was pulled; `-o json` prints it, checkpoint.json keeps it."""

    checkpoint: CheckpointId
    run: str
    world_size: int
    plan: str
    size: int
    """Bytes of all shards."""
    bytes_by_tier: dict[str, int]
    fingerprints: dict[int, str]
    metadata: dict[str, Any]
    """The user's own JSON, of rank 0."""
    bad_copies: tuple[str, ...] = ()
    """Copies that were proven bad and passed over."""


class _Stop(threading.Event):
    """Set by itself or with the event that it hangs on: one failed pull ends, another may begin."""

    def __init__(self, parent: threading.Event) -> None:
        """`parent` is never set from here."""
        super().__init__()
        self._parent = parent

    def is_set(self) -> bool:
        """By either."""
        return super().is_set() or self._parent.is_set()


@dataclass
class _Shared:
    progress: Progress
    cancel: _Stop
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: int = 0
    total: int = 0
    bad: list[str] = field(default_factory=list)

    def expect(self, size: int) -> None:
        with self.lock:
            self.total += size
        self.progress(self.done, self.total)

    def advance(self, size: int) -> None:
        with self.lock:
            self.done += size
        self.progress(self.done, self.total)


def fetch(
    catalog: Catalog,
    checkpoint: CheckpointStatus,
    run: str,
    out: Path,
    *,
    progress: Progress,
    cancel: threading.Event,
    threads: int = 8,
) -> Pulled:
    """Pull into `out`, which must not exist or be an empty folder. Raises BackstayError."""
    _check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    shared = _Shared(progress, _Stop(cancel))
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        pulled = _fetch_all(catalog, checkpoint, run, partial, shared, threads)
        partial.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
        sync_folder(str(out.parent))
        return pulled
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_out(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise UsageError(
            f"--out: {out} exists and is not an empty folder", "name a new one, or remove it"
        )


def _fetch_all(
    catalog: Catalog,
    checkpoint: CheckpointStatus,
    run: str,
    folder: Path,
    shared: _Shared,
    threads: int,
) -> Pulled:
    ranks = range(checkpoint.world_size)
    at_once = max(1, min(_SHARDS_AT_ONCE, len(ranks)))
    each = max(1, threads // at_once)

    def one(rank: int) -> tuple[Manifest, str]:
        try:
            return _fetch_shard(catalog, checkpoint, rank, folder, shared, each)
        except BaseException:
            shared.cancel.set()  # the others need not go on
            raise

    with ThreadPoolExecutor(at_once) as pool:
        work = [pool.submit(one, rank) for rank in ranks]
    errors = [error for w in work if (error := w.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, Cancelled)):  # the cause comes first
        raise error
    results = [w.result() for w in work]
    manifests = [manifest for manifest, _ in results]
    _check_together(manifests)
    tiers: dict[str, int] = {}
    for manifest, tier in results:
        tiers[tier] = tiers.get(tier, 0) + manifest.size
    pulled = Pulled(
        checkpoint=checkpoint.checkpoint,
        run=run,
        world_size=checkpoint.world_size,
        plan=manifests[0].plan,
        size=sum(manifest.size for manifest in manifests),
        bytes_by_tier=tiers,
        fingerprints={manifest.rank: manifest.fingerprint for manifest in manifests},
        metadata=manifests[0].metadata,
        bad_copies=tuple(shared.bad),
    )
    write_atomically(str(folder / CHECKPOINT_FILE), codec.dumps(pulled), mode=0o644)
    return pulled


def _check_together(manifests: list[Manifest]) -> None:
    plans = {manifest.plan for manifest in manifests}
    worlds = {manifest.world_size for manifest in manifests}
    if len(plans) > 1 or worlds != {len(manifests)}:
        raise Corrupt(
            f"the shards of {manifests[0].checkpoint} don't belong together: plans "
            f"{', '.join(sorted(plans))}, world sizes {', '.join(map(str, sorted(worlds)))}"
        )


def _fetch_shard(
    catalog: Catalog,
    checkpoint: CheckpointStatus,
    rank: int,
    folder: Path,
    shared: _Shared,
    threads: int,
) -> tuple[Manifest, str]:
    """The first source that gives all of it; what the others lacked is told if none does."""
    troubles: list[BackstayError | FileNotFoundError] = []
    for source in catalog.sources(checkpoint, rank):
        try:
            if isinstance(source, CorruptCopy):
                raise source.error
            _write_shard(source, folder, rank, shared, threads)
            return source.manifest, source.tier
        except (CorruptData, Unreachable, FileNotFoundError) as error:
            troubles.append(error)
            if isinstance(error, CorruptData):
                with shared.lock:
                    shared.bad.append(str(error))
    raise _no_source(checkpoint, rank, troubles)


def _no_source(
    checkpoint: CheckpointStatus, rank: int, troubles: list[BackstayError | FileNotFoundError]
) -> BackstayError:
    what = f"rank {rank} of {checkpoint.checkpoint} can't be read"
    told = "".join(f"\n  {trouble}" for trouble in troubles)
    if any(isinstance(trouble, CorruptData) for trouble in troubles):
        return Corrupt(f"{what}: every copy in reach is bad or gone{told}")
    if troubles:
        return NoAnswer(f"{what}{told}")
    if checkpoint.durable:
        return NotFound(f"{what}: no sidecar in reach has it", "it is durable: name its --bucket")
    return NotFound(f"{what}: no copy is in reach")


def _write_shard(
    source: ShardSource, folder: Path, rank: int, shared: _Shared, threads: int
) -> None:
    manifest = source.manifest
    path = folder / f"{format_rank(rank)}{SHARD_SUFFIX}"
    shared.expect(manifest.size)
    written = 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, manifest.size)

        def deliver(index: int, chunk: memoryview) -> None:
            nonlocal written
            start, _ = manifest.chunk(index)
            _write_at(descriptor, chunk, start)
            with shared.lock:
                written += len(chunk)
            shared.advance(len(chunk))

        try:
            source.pull(deliver, threads, shared.cancel)
        except BaseException:
            shared.advance(-written)
            shared.expect(-manifest.size)
            raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    write_atomically(
        str(folder / f"{format_rank(rank)}{MANIFEST_SUFFIX}"), manifest.to_json(), mode=0o644
    )


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
