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
        probe: Callable[[], None],
        recorded: Callable[[int], bool],
    ) -> None:
        """`attempt`: the one followed now, 0: none; the others ask the store (they block):
        `probe` raises if it does not do what is needed, `recorded`: is the attempt's base there.
        """
        self.name = tier.name
        self._tier = tier
        self._attempt = attempt
        self._probe = probe
        self._recorded = recorded
        self._probed = False
        self._known = 0

    def probe(self) -> None:
        """Prove once that the store can be used. Raises Unreachable with what is wrong."""
        if not self._probed:
            self._probe()
            self._probed = True

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        """As the tier's; raises Unreachable while no attempt is under way or recorded."""
        self.probe()
        attempt = self._attempt()
        if not attempt:
            raise Unreachable("no attempt is under way; uploads begin with the next one")
        if attempt != self._known:
            if not self._recorded(attempt):
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
