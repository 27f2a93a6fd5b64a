"""What a tier is to the rest of the sidecar. One contract test runs against every implementation.

All methods block; they are called in threads. Errors are the protocol's: `Unreachable` (try again
later, proves nothing), `CorruptData` (proven bad), `OSError` (the disk's own words), `TierFull`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from threading import Event
from typing import Protocol

from backstay_protocol.errors import BackstayError, Cancelled
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import ShardCopy

__all__ = ["Cancelled", "ShardReader", "Tier", "TierFull", "WritableTier"]


class TierFull(BackstayError):
    """No room: the message says how much was needed and how much there is."""


class ShardReader(Protocol):
    """One opened shard. Valid inside the `with` of `Tier.open` only."""

    manifest: Manifest

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset` of the shard. Not verified: the caller digests."""
        ...

    def fileno(self) -> int | None:
        """A descriptor whose offset 0 is the shard's, for zero-copy sends; None: there is none."""
        ...


class Tier(Protocol):
    """Read, list, delete."""

    name: str

    def open(self, checkpoint: CheckpointId, rank: int) -> AbstractContextManager[ShardReader]:
        """Raises FileNotFoundError if the shard is not there whole."""
        ...

    def inventory(self) -> Iterator[ShardCopy]:
        """Every sealed shard in the tier that this sidecar can serve."""
        ...

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """Manifest first, then the bytes. No error if it is not there."""
        ...


class WritableTier(Tier, Protocol):
    """A tier that the sidecar itself fills."""

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        """Store a copy; every chunk is verified on the way (or sealed, if it was not yet).

        Visible whole and verified, or not at all. Repeating it is cheap: what is there stays, what
        was begun is taken up again. Returns the sealed manifest.
        """
        ...
