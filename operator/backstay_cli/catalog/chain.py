"""One list from the nearest catalog, sources from several: sidecars first, then the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backstay_cli.catalog.base import Catalog, CorruptCopy, ShardSource
from backstay_cli.errors import NoAnswer
from backstay_protocol.errors import Unreachable
from backstay_protocol.messages import CheckpointList, CheckpointStatus


class ChainedCatalog:
    """The first catalog lists (running sidecars know the bucket too)."""

    def __init__(self, catalogs: Sequence[Catalog]) -> None:
        """At least one."""
        self._catalogs = tuple(catalogs)

    @property
    def where(self) -> str:
        """For people."""
        return self._catalogs[0].where

    @property
    def committed_only(self) -> bool:
        """The first one's."""
        return self._catalogs[0].committed_only

    def checkpoints(self) -> CheckpointList:
        """The first one's."""
        return self._catalogs[0].checkpoints()

    def sources(
        self, checkpoint: CheckpointStatus, rank: int
    ) -> Iterator[ShardSource | CorruptCopy]:
        """Of all, in order; one that can't be reached is passed over unless it is the last."""
        for index, catalog in enumerate(self._catalogs):
            try:
                yield from catalog.sources(checkpoint, rank)
            except (Unreachable, NoAnswer):
                if index == len(self._catalogs) - 1:
                    raise
