"""Checkpoints on the disks of local nodes whose job does not run, and in pulled folders."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from backstay_cli.catalog.base import CorruptCopy, Deliver, ShardSource, sealed_manifest
from backstay_cli.catalog.sight import Sight
from backstay_cli.digest import digest
from backstay_protocol.completeness import complete_in
from backstay_protocol.copies import copy_of
from backstay_protocol.errors import Cancelled, CorruptData, DigestMismatch, ProtocolError
from backstay_protocol.history import Chain, newest_lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import ATTEMPT_FILE, MANIFEST_SUFFIX, SHARD_SUFFIX, DiskLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import CheckpointList, CheckpointStatus, ShardCopy
from backstay_protocol.names import LOCAL, NEIGHBOR
from backstay_protocol.records import AttemptFile, AttemptRecord


@dataclass(frozen=True)
class FileSource:
    """A copy in a file."""

    path: Path
    manifest: Manifest
    tier: str = LOCAL

    @property
    def name(self) -> str:
        """For people."""
        return str(self.path)

    def pull(self, deliver: Deliver, threads: int, cancel: threading.Event) -> None:
        """See ShardSource; also CorruptData where the file's size is not the shard's."""
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.manifest.size:
                raise CorruptData(
                    f"{self.path}: has {size} bytes, its manifest says {self.manifest.size}"
                )
            with ThreadPoolExecutor(max(1, threads)) as pool:
                work = [
                    pool.submit(self._chunk, file.fileno(), index, deliver, cancel)
                    for index in range(self.manifest.num_chunks)
                ]
                for one in work:
                    try:
                        one.result()
                    except BaseException:
                        pool.shutdown(cancel_futures=True)
                        raise

    def _chunk(self, file: int, index: int, deliver: Deliver, cancel: threading.Event) -> None:
        if cancel.is_set():
            raise Cancelled(f"{self.path}: told to stop")
        start, stop = self.manifest.chunk(index)
        data = memoryview(os.pread(file, stop - start, start))
        assert self.manifest.digests is not None
        expected, got = self.manifest.digests[index], digest(data)
        if got != expected:
            raise DigestMismatch(
                f"{self.path}: chunk {index} (from byte {start}): its digest is {got}, its "
                f"manifest says {expected}"
            )
        deliver(index, data)


class DiskCatalog:
    """One run on the disks of this machine's pretended nodes. Nobody may write there meanwhile."""

    def __init__(self, disks: Sequence[Path], run: str) -> None:
        """`disks`: roots, one a node; `run`: `<namespace>/<run name>`."""
        self._run = run
        self._folders = [Path(replica) for disk in disks for replica in _replicas(disk, run)]

    @property
    def where(self) -> str:
        """For people."""
        return f"the disks of the stopped job ({len(self._folders)} of them)"

    @property
    def committed_only(self) -> bool:
        """See Catalog."""
        return False

    def checkpoints(self) -> CheckpointList:
        """From what manifests and attempt records say."""
        copies, chains = self._copies()
        lineage = newest_lineage(self._records(), chains)
        whole = {tier: complete_in(copies, tier) for tier in (LOCAL, NEIGHBOR)}
        found = []
        for checkpoint in sorted({copy.checkpoint for copy in copies}, reverse=True):
            own = [copy for copy in copies if copy.checkpoint == checkpoint]
            sizes = {copy.rank: copy.size for copy in own}
            found.append(
                CheckpointStatus(
                    checkpoint=checkpoint,
                    world_size=max(copy.world_size for copy in own),
                    complete_in=tuple(tier for tier, names in whole.items() if checkpoint in names),
                    present_in={
                        tier: len({copy.rank for copy in own if copy.tier == tier})
                        for tier in whole
                    },
                    durable=False,
                    pinned=False,
                    on_lineage=lineage is not None and lineage.contains(checkpoint),
                    size=sum(sizes.values()),
                )
            )
        attempt = lineage.attempt if lineage is not None else 0
        return CheckpointList(run=self._run, attempt=attempt, checkpoints=tuple(found))

    def sources(
        self, checkpoint: CheckpointStatus, rank: int
    ) -> Iterator[ShardSource | CorruptCopy]:
        """Every copy of the shard; the owner's own first."""
        name = checkpoint.checkpoint
        for tier, area in ((LOCAL, "shards"), (NEIGHBOR, "replicas")):
            for folder in self._folders:
                path = Path(DiskLayout.shard(str(folder / area), name, rank))
                manifest = Path(DiskLayout.manifest(str(folder / area), name, rank))
                if not manifest.exists():
                    continue
                try:
                    found = sealed_manifest(manifest.read_bytes(), str(manifest), name, rank)
                except CorruptData as error:
                    yield CorruptCopy(str(manifest), tier, error)
                else:
                    yield FileSource(path, found, tier)

    def sight(self) -> Sight:
        """What a restore would see here."""
        copies, chains = self._copies()
        return Sight(records=tuple(self._records()), copies=tuple(copies), chains=chains)

    def _records(self) -> list[AttemptRecord]:
        found = []
        for folder in self._folders:
            with contextlib.suppress(OSError):
                state = AttemptFile(str(folder / ATTEMPT_FILE)).read()
                if state is not None and state.record is not None:
                    found.append(state.record)
        return found

    def _copies(self) -> tuple[list[ShardCopy], dict[int, Chain]]:
        copies: list[ShardCopy] = []
        chains: dict[int, Chain] = {}
        for holder, folder in enumerate(self._folders):
            for tier, area in ((LOCAL, "shards"), (NEIGHBOR, "replicas")):
                for path in sorted((folder / area).glob(f"*/*{MANIFEST_SUFFIX}")):
                    manifest = _readable(path)
                    if manifest is None:
                        continue
                    chains[manifest.attempt] = manifest.chain
                    copies.append(copy_of(manifest, tier, holder))
        return copies, chains


def _replicas(disk: Path, run: str) -> list[str]:
    root = disk / run
    return [str(path) for path in sorted(root.glob("replica-*")) if path.is_dir()]


def _readable(path: Path) -> Manifest | None:
    """A sealed manifest with its shard beside it; else the shard is not there."""
    try:
        CheckpointId.parse(path.parent.name)
        manifest = read_manifest(path.read_bytes(), str(path))
    except (OSError, ValueError, CorruptData, ProtocolError):
        return None
    shard = path.with_suffix(SHARD_SUFFIX)
    return manifest if manifest.sealed and shard.exists() else None
