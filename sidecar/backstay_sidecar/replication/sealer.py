"""Seals slots: one pass that digests each chunk and, where the local tier is due, writes the disk.

Called by the replicator when a slot is published, and by the member before it reports what is
here. A slot is held by its shared lock during the pass. A disk that fails never keeps a slot from
being sealed: the local tier gets its own, later try.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from backstay_protocol.errors import BackstayError, CorruptData, VersionMismatch
from backstay_protocol.faults import fault
from backstay_protocol.manifest import Manifest
from backstay_protocol.slots import SlotBusy
from backstay_sidecar.digest import fingerprint
from backstay_sidecar.tiers.base import ShardReader
from backstay_sidecar.tiers.disk import DiskStore, DiskWriter
from backstay_sidecar.tiers.memory import MemoryTier
from backstay_sidecar.tiers.onepass import one_pass


@dataclass(frozen=True)
class Sealed:
    """What came of one slot."""

    manifest: Manifest
    in_local: bool
    local_error: Exception | None = None
    """The disk was due and did not take it."""


class Sealer:
    """One per sidecar. Methods block; safe for several threads."""

    def __init__(
        self,
        memory: MemoryTier,
        local: DiskStore | None,
        local_due: Callable[[Manifest], bool],
        cancel: Event,
    ) -> None:
        """`local_due`: whether the local tier takes a shard just now."""
        self._memory = memory
        self._local = local
        self._local_due = local_due
        self._cancel = cancel
        self._guard = threading.Lock()
        self._slot_locks: dict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)

    def seal_all(self) -> None:
        """Seal everything that is published, at memory speed: no disk in the pass.

        Slots that can't be sealed just now are passed over.
        """
        for found in self._memory.published():
            if not found.manifest.sealed:
                try:
                    self.seal(found.slot_rank, found.slot, to_local=False)
                except (SlotBusy, CorruptData, VersionMismatch, OSError):
                    continue

    def seal(self, rank: int, slot: int, *, to_local: bool = True) -> Sealed | None:
        """Seal one slot; None if there is nothing (left) to seal in it.

        Raises SlotBusy, CorruptData, OSError, Cancelled.
        """
        with self._guard:
            lock = self._slot_locks[rank, slot]
        with lock, self._memory.open_slot(rank, slot) as shard:
            if shard is None or shard.manifest.sealed:
                return None
            return self._pass(rank, slot, shard, to_local)

    def _pass(self, rank: int, slot: int, shard: ShardReader, to_local: bool) -> Sealed:
        writer, error = self._begin(shard.manifest) if to_local else (None, None)
        if writer is None:
            result = one_pass(shard, None, self._cancel)
            return Sealed(self._seal(rank, slot, shard.manifest, result.digests), False, error)
        with writer:
            result = one_pass(shard, writer, self._cancel)
            sealed = self._seal(rank, slot, shard.manifest, result.digests)
            error = result.sink_error or _publish(writer, sealed)
        return Sealed(sealed, error is None, error)

    def _begin(self, manifest: Manifest) -> tuple[DiskWriter | None, Exception | None]:
        if self._local is None or not self._local_due(manifest):
            return None, None
        try:
            if self._local.find(manifest.checkpoint, manifest.rank) is not None:
                return None, None
            return self._local.begin(manifest), None
        except (OSError, BackstayError) as error:
            return None, error

    def _seal(self, rank: int, slot: int, manifest: Manifest, digests: tuple[str, ...]) -> Manifest:
        sealed = manifest.seal(digests, fingerprint(digests))
        fault("seal.before")
        self._memory.seal(rank, slot, sealed)
        fault("seal.after")
        return sealed


def _publish(writer: DiskWriter, sealed: Manifest) -> Exception | None:
    try:
        writer.publish(sealed)
    except (OSError, BackstayError) as error:
        return error
    return None
