"""What a tier is to the rest of the sidecar. One contract test runs against every implementation.

All methods block; they are called in threads. Errors are the protocol's: `Unreachable` (try again
later, proves nothing), `CorruptData` (what was read is proven bad), `OSError` (the disk's own
words), `TierFull`, `Unfit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from threading import Event
from typing import Protocol

from backstay_protocol.errors import BackstayError, Cancelled, CorruptData, Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import TIER_AWAY, TIER_REFUSES, ShardCopy
from backstay_sidecar.transfer.s3_errors import StoreRefused

__all__ = [
    "Cancelled",
    "FileReader",
    "ShardReader",
    "Tier",
    "TierFull",
    "Unfit",
    "WritableTier",
    "store_code",
]


class TierFull(BackstayError):
    """No room: the message says how much was needed and how much there is."""


class Unfit(BackstayError):
    """The tier can't take this very shard, now or later. It says nothing of other shards."""


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


class FileReader:
    """A shard that lies in a file of this machine: a slot, or a file on the disk."""

    def __init__(self, manifest: Manifest, descriptor: int, path: str) -> None:
        """The opener keeps and closes the descriptor; `path` is for errors."""
        self.manifest = manifest
        self._descriptor = descriptor
        self.path = path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`. Raises CorruptData where the file ends early."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if not count:
                raise CorruptData(f"{self.path} ends at byte {offset}, {len(buffer)} too early")
            buffer = buffer[count:]
            offset += count

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._descriptor


def store_code(error: BaseException) -> str:
    """Whether an object store refuses or is away, as one of the TIER_ codes; empty: neither."""
    if isinstance(error, StoreRefused):
        return TIER_REFUSES
    return TIER_AWAY if isinstance(error, Unreachable | TimeoutError) else ""
