"""Nothing is uploaded under an attempt whose claim and base are not in the remote tier yet.

Wraps the remote tier for the replicator. The leader writes both at the start of an attempt, or
late, where the store was away; until then uploads wait as if the store could not be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Event

from backstay_protocol.errors import Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import ShardCopy

from backstay_sidecar.tiers.base import ShardReader, WritableTier


class Gated:
    """A WritableTier that takes nothing before `recorded(attempt)`."""

    def __init__(
        self,
        tier: WritableTier,
        attempt: Callable[[], int],
        recorded: Callable[[int], bool],
    ) -> None:
        """`attempt`: the one followed now, 0: none; `recorded` asks the store (it blocks)."""
        self.name = tier.name
        self._tier = tier
        self._attempt = attempt
        self._recorded = recorded
        self._known = 0

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        """As the tier's; raises Unreachable while the attempt is not recorded."""
        attempt = self._attempt()
        if attempt != self._known:
            if not attempt or not self._recorded(attempt):
                raise Unreachable(
                    f"attempt {attempt} has no base record in the remote tier yet; uploads begin "
                    "when the leader has written it"
                )
            self._known = attempt
        return self._tier.put(shard, cancel)

    def open(self, checkpoint: CheckpointId, rank: int) -> AbstractContextManager[ShardReader]:
        """As the tier's."""
        return self._tier.open(checkpoint, rank)

    def inventory(self) -> Iterator[ShardCopy]:
        """As the tier's."""
        return self._tier.inventory()

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """As the tier's."""
        self._tier.delete(checkpoint, rank)
