"""What a catalog is: it lists a run's checkpoints and names sources of their shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from backstay_cli.digest import fingerprint
from backstay_protocol.errors import CorruptData
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import CheckpointList, CheckpointStatus

Deliver = Callable[[int, memoryview], None]


class ShardSource(Protocol):
    """One copy of one shard that can be read now."""

    @property
    def name(self) -> str:
        """For people: where it is."""
        ...

    @property
    def tier(self) -> str:
        """memory, local, neighbor or remote."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Sealed."""
        ...

    def pull(self, deliver: Deliver, threads: int, cancel: threading.Event) -> None:
        """Deliver every chunk, each verified; from several threads at once, in no order.

        Raises FileNotFoundError (gone), CorruptData (proven bad), Unreachable, Cancelled.
        """
        ...


@dataclass(frozen=True)
class CorruptCopy:
    """A copy that is proven bad by its manifest alone."""

    name: str
    tier: str
    error: CorruptData


class Catalog(Protocol):
    """A run's checkpoints."""

    @property
    def where(self) -> str:
        """For people: what is being looked at."""
        ...

    @property
    def committed_only(self) -> bool:
        """Whether only a commit record tells that a checkpoint is whole for good (no leader)."""
        ...

    def checkpoints(self) -> CheckpointList:
        """Newest first. Raises BackstayError."""
        ...

    def sources(
        self, checkpoint: CheckpointStatus, rank: int
    ) -> Iterator[ShardSource | CorruptCopy]:
        """Copies of a shard, those that are best to read first. Raises BackstayError."""
        ...


def sealed_manifest(data: bytes, where: str, checkpoint: CheckpointId, rank: int) -> Manifest:
    """Read a manifest and check that it is sealed, consistent, and that of this shard.

    Raises CorruptData.
    """
    manifest = read_manifest(data, where)
    if manifest.digests is None:
        raise CorruptData(f"{where}: the manifest is not sealed")
    if (manifest.checkpoint, manifest.rank) != (checkpoint, rank):
        raise CorruptData(
            f"{where}: is the manifest of rank {manifest.rank} of {manifest.checkpoint}, expected "
            f"rank {rank} of {checkpoint}"
        )
    try:
        proven = fingerprint(manifest.digests)
    except ValueError as error:
        raise CorruptData(f"{where}: a digest is not hexadecimal") from error
    if proven != manifest.fingerprint:
        raise CorruptData(f"{where}: the fingerprint does not fit the digests")
    return manifest
