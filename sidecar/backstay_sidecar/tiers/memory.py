"""The memory tier: the slots of this pod's ranks, in the volume shared with the trainer.

Read through the hand-over of `backstay_protocol.slots`: while a shard is open its slot is held, so
the trainer can't withdraw it. The trainer fills the tier; this side seals, serves and strikes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backstay_protocol import slots
from backstay_protocol.copies import copy_of
from backstay_protocol.errors import CorruptData, VersionMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import ShardCopy
from backstay_protocol.names import MEMORY
from backstay_sidecar.tiers.base import FileReader, ShardReader


@dataclass(frozen=True)
class Published:
    """What one slot holds at the moment: a hint, seen without the lock."""

    slot: int
    slot_rank: int
    """Folder of the slot; the manifest's rank may be another only in a damaged volume."""
    manifest: Manifest


class MemoryTier:
    """One per sidecar. Methods block, and may be called from several threads."""

    name = MEMORY

    def __init__(self, layout: MemoryLayout, run: str, replica: int) -> None:
        """`run`: slots of another run are passed over, as if they were empty."""
        self.layout = layout
        self._run = run
        self._replica = replica
        self._seen: dict[tuple[int, int], tuple[tuple[int, int, int], Published]] = {}

    def published(self) -> list[Published]:
        """Every published slot, sealed or not. Unreadable ones are passed over."""
        found = (self._peek(rank, slot) for rank, slot in slots.list_slots(self.layout))
        return [published for published in found if published is not None]

    def inventory(self) -> Iterator[ShardCopy]:
        """Sealed shards."""
        return (self.copy_of(f.manifest) for f in self.published() if f.manifest.sealed)

    def copy_of(self, manifest: Manifest) -> ShardCopy:
        """What an inventory says of a sealed slot of this pod."""
        return copy_of(manifest, MEMORY, self._replica)

    @contextmanager
    def open(self, checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        """Hold the sealed shard. Raises FileNotFoundError if no slot has it."""
        with self._hold(checkpoint, rank) as (reader, _):
            if not reader.manifest.sealed:
                raise FileNotFoundError(f"rank {rank} of {checkpoint} is in memory, not yet sealed")
            yield reader

    @contextmanager
    def open_slot(self, rank: int, slot: int) -> Iterator[ShardReader | None]:
        """Hold one slot, sealed or not; None if nothing is published in it.

        Raises slots.SlotBusy or FileNotFoundError (no such slot), CorruptData.
        """
        with slots.reading(self.layout, rank, slot) as manifest:
            if manifest is None or not self._ours(manifest):
                yield None
                return
            with self._reader(manifest, rank, slot) as reader:
                yield reader

    def seal(self, slot_rank: int, slot: int, sealed: Manifest) -> None:
        """Publish the digests. Call it while the slot is held by `open_slot`."""
        slots.seal(self.layout, slot_rank, slot, sealed)

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """Hide a shard whose bytes were proven bad. The trainer alone makes room in memory."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._hold(checkpoint, rank) as (_, (slot_rank, slot)),
        ):
            slots.strike(self.layout, slot_rank, slot)

    @contextmanager
    def _hold(
        self, checkpoint: CheckpointId, rank: int
    ) -> Iterator[tuple[FileReader, tuple[int, int]]]:
        for found in self.published():
            if (found.manifest.checkpoint, found.manifest.rank) != (checkpoint, rank):
                continue
            with contextlib.ExitStack() as stack:
                try:
                    manifest = stack.enter_context(
                        slots.reading(self.layout, found.slot_rank, found.slot)
                    )
                except (slots.SlotBusy, FileNotFoundError):
                    continue  # it is being withdrawn just now
                if manifest is None or manifest.checkpoint != checkpoint:
                    continue  # it was overwritten between the look and the lock
                reader = stack.enter_context(self._reader(manifest, found.slot_rank, found.slot))
                yield reader, (found.slot_rank, found.slot)
                return
        raise FileNotFoundError(f"no slot holds rank {rank} of {checkpoint}")

    @contextmanager
    def _reader(self, manifest: Manifest, slot_rank: int, slot: int) -> Iterator[FileReader]:
        path = self.layout.slot(slot_rank, slot)
        # Another open file than the lock's: what is sent or mapped must not keep the lock alive.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < manifest.size:
                raise CorruptData(
                    f"{path} has {os.fstat(descriptor).st_size} bytes, its manifest says "
                    f"{manifest.size}; something truncated the slot"
                )
            yield FileReader(manifest, descriptor, path)
        finally:
            os.close(descriptor)

    def _peek(self, rank: int, slot: int) -> Published | None:
        """Looked at each second, and long for large shards: parsed once for each file."""
        try:
            stat = os.stat(self.layout.slot_manifest(rank, slot))
            signature = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            known = self._seen.get((rank, slot))
            if known is not None and known[0] == signature:
                return known[1]
            manifest = slots.peek(self.layout, rank, slot)
        except (CorruptData, VersionMismatch, OSError):
            return None
        if manifest is None or not self._ours(manifest):
            return None
        published = Published(slot, rank, manifest)
        self._seen[rank, slot] = (signature, published)
        return published

    def _ours(self, manifest: Manifest) -> bool:
        return manifest.run == self._run
