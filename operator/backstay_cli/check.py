"""Verifying: every chunk of every copy against its manifest, of a folder or of a catalog."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from backstay_cli.catalog.base import Catalog, CorruptCopy, ShardSource, sealed_manifest
from backstay_cli.catalog.disks import FileSource
from backstay_cli.errors import EXIT_CORRUPT, EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE, NotFound
from backstay_cli.rotation import replaced_by
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.errors import CorruptData, Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MANIFEST_SUFFIX, SHARD_SUFFIX
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import CheckpointList, CheckpointStatus

GOOD = "good"
CORRUPT = "corrupt"
MISSING = "missing"
ROTATED = "rotated"
UNREACHABLE = "unreachable"
_ASKED_AGAIN = 3
LAG_SECONDS = 2.0
"""A leader hears of what a sidecar has removed within this time."""


@dataclass(frozen=True, kw_only=True)
class CopyVerdict:
    """How one copy of one shard is."""

    rank: int
    tier: str
    where: str
    verdict: str
    """good, corrupt, missing, unreachable, or rotated (a newer checkpoint took its place)."""
    why: str = ""
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a checkpoint is."""

    checkpoint: CheckpointId
    world_size: int
    copies: tuple[CopyVerdict, ...]

    @property
    def exit_code(self) -> int:
        """The worst of all copies."""
        found = {copy.verdict for copy in self.copies}
        if CORRUPT in found:
            return EXIT_CORRUPT
        if MISSING in found:
            return EXIT_NOT_FOUND
        if UNREACHABLE in found:
            return EXIT_UNREACHABLE
        return EXIT_NOT_FOUND if self.replaced else EXIT_OK

    @property
    def replaced(self) -> bool:
        """Whether a newer checkpoint took its place meanwhile: a rank's copies are all rotated."""
        good = {copy.rank for copy in self.copies if copy.verdict == GOOD}
        return any(c.verdict == ROTATED and c.rank not in good for c in self.copies)


def verify_folder(folder: Path, tell: Callable[[CopyVerdict], None]) -> Verdict:
    """A pulled folder (or one checkpoint's folder on a disk). Raises NotFound if it is none."""
    manifests = [
        (path, read_manifest(path.read_bytes(), str(path)))
        for path in sorted(folder.glob(f"*{MANIFEST_SUFFIX}"))
        if path.stem.isdigit()
    ]
    if not manifests:
        raise NotFound(f"{folder}: no checkpoint is there (no <rank>.json)")
    first = manifests[0][1]
    verdicts = [_verify_file(path, m, first) for path, m in manifests]
    missing = set(range(first.world_size)) - {m.rank for _, m in manifests}
    verdicts += [_missing(rank, str(folder)) for rank in sorted(missing)]
    for verdict in verdicts:
        tell(verdict)
    return Verdict(checkpoint=first.checkpoint, world_size=first.world_size, copies=tuple(verdicts))


def _verify_file(path: Path, manifest: Manifest, first: Manifest) -> CopyVerdict:
    shard = path.with_suffix(SHARD_SUFFIX)
    try:
        same = (first.checkpoint, first.world_size, first.plan)
        if (manifest.checkpoint, manifest.world_size, manifest.plan) != same:
            raise CorruptData(f"{path}: belongs to another checkpoint than {first.checkpoint}")
        sealed = sealed_manifest(path.read_bytes(), str(path), first.checkpoint, int(path.stem))
    except CorruptData as error:
        return _bad(manifest.rank, "folder", str(shard), error)
    return _verify(FileSource(shard, sealed, "folder"), threading.Event(), 4)


def verify_everywhere(
    catalog: Catalog,
    checkpoint: CheckpointStatus,
    tell: Callable[[CopyVerdict], None],
    *,
    cancel: threading.Event,
    threads: int = 8,
    clock: Clock = SYSTEM_CLOCK,
) -> Verdict:
    """All copies of a checkpoint that the catalog can reach. Nothing is written.

    Copies that made room for a newer checkpoint meanwhile are `rotated`, not `missing`.
    """
    verdicts: list[CopyVerdict] = []
    for rank in range(checkpoint.world_size):
        found = list(_verify_rank(catalog, checkpoint, rank, cancel, threads))
        verdicts += found or [_missing(rank, catalog.where)]
    verdicts = _settled(catalog, checkpoint.checkpoint, verdicts, clock)
    for verdict in verdicts:
        tell(verdict)
    return Verdict(
        checkpoint=checkpoint.checkpoint,
        world_size=checkpoint.world_size,
        copies=tuple(verdicts),
    )


def _settled(
    catalog: Catalog, checkpoint: CheckpointId, verdicts: list[CopyVerdict], clock: Clock
) -> list[CopyVerdict]:
    """Ask the catalog again what became of missing copies: its list lags by a moment."""
    for again in range(_ASKED_AGAIN):
        if all(verdict.verdict != MISSING for verdict in verdicts):
            break
        if again:
            clock.sleep(LAG_SECONDS)
        now = catalog.checkpoints()
        verdicts = [_judged(verdict, checkpoint, now) for verdict in verdicts]
    return verdicts


def _judged(verdict: CopyVerdict, checkpoint: CheckpointId, now: CheckpointList) -> CopyVerdict:
    newer = replaced_by(checkpoint, now, verdict.tier) if verdict.verdict == MISSING else None
    if newer is None:
        return verdict
    why = f"step {newer.step} took its place while it was read"
    return replace(verdict, verdict=ROTATED, why=why)


def _verify_rank(
    catalog: Catalog,
    checkpoint: CheckpointStatus,
    rank: int,
    cancel: threading.Event,
    threads: int,
) -> Iterator[CopyVerdict]:
    for source in catalog.sources(checkpoint, rank):
        if isinstance(source, CorruptCopy):
            yield _bad(rank, source.tier, source.name, source.error)
        else:
            yield _verify(source, cancel, threads)


def _verify(source: ShardSource, cancel: threading.Event, threads: int) -> CopyVerdict:
    rank, size = source.manifest.rank, source.manifest.size
    try:
        source.pull(_ignore, threads, cancel)
    except CorruptData as error:
        return _bad(rank, source.tier, source.name, error)
    except FileNotFoundError:
        return _missing(rank, source.name, source.tier)
    except Unreachable as error:
        return CopyVerdict(
            rank=rank, tier=source.tier, where=source.name, verdict=UNREACHABLE, why=str(error)
        )
    return CopyVerdict(rank=rank, tier=source.tier, where=source.name, verdict=GOOD, size=size)


def _ignore(index: int, chunk: memoryview) -> None:
    """Verified on the way; nothing else is wanted."""


def _bad(rank: int, tier: str, where: str, error: CorruptData) -> CopyVerdict:
    return CopyVerdict(rank=rank, tier=tier, where=where, verdict=CORRUPT, why=str(error))


def _missing(rank: int, where: str, tier: str = "") -> CopyVerdict:
    return CopyVerdict(
        rank=rank, tier=tier, where=where, verdict=MISSING, why="no copy of this rank is there"
    )
