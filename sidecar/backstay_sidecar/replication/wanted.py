"""What a tier still has to take, in which order. Pure: the queue of each tier is derived anew from
what is here, what is there and what the leader says, so nothing is lost in a restart and nothing
needs to be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import FORCED
from backstay_protocol.messages import ProgressReply
from backstay_protocol.names import MEMORY, REMOTE
from backstay_protocol.schedules import due
from backstay_protocol.topology import Schedule

ShardKey = tuple[CheckpointId, int]
"""(checkpoint, rank)."""


@dataclass(frozen=True)
class Shard:
    """A sealed shard that is here: it can be moved on."""

    checkpoint: CheckpointId
    rank: int
    reason: str
    size: int
    in_memory: bool
    in_local: bool

    @property
    def key(self) -> ShardKey:
        """What names it."""
        return (self.checkpoint, self.rank)


@dataclass(frozen=True, kw_only=True)
class LeaderWord:
    """The leader's last word that counts here, and what this sidecar knows of its attempt."""

    attempt: int = 0
    lineage: Lineage | None = None
    base: CheckpointId | None = None
    complete: dict[str, tuple[CheckpointId, ...]] = field(default_factory=dict)
    persist: dict[str, tuple[CheckpointId, ...]] = field(default_factory=dict)
    thin: frozenset[CheckpointId] = frozenset()
    unwanted: frozenset[CheckpointId] = frozenset()

    @staticmethod
    def of(reply: ProgressReply, lineage: Lineage | None, base: CheckpointId | None) -> LeaderWord:
        """From a reply that counts."""
        return LeaderWord(
            attempt=reply.attempt,
            lineage=lineage,
            base=base,
            complete=reply.complete,
            persist=reply.persist,
            thin=frozenset(reply.thin),
            unwanted=frozenset(reply.unwanted),
        )


def wanted(
    tier: str,
    schedule: Callable[[int], Schedule],
    shards: Iterable[Shard],
    there: Collection[ShardKey],
    word: LeaderWord,
) -> list[Shard]:
    """Shards to move to `tier`, first one first.

    `schedule`: the tier's, for a step. `there`: what this sidecar knows to be in the tier.
    Checkpoints that are complete in memory go first, and of those the newest: a checkpoint that not
    all ranks have is of no use to anybody.
    """
    in_memory = frozenset(word.complete.get(MEMORY, ()))
    found = [s for s in shards if s.key not in there and _wanted(tier, schedule, s, word)]
    found.sort(key=lambda s: (s.checkpoint in in_memory, s.checkpoint, -s.rank), reverse=True)
    return found


def _wanted(tier: str, schedule: Callable[[int], Schedule], shard: Shard, word: LeaderWord) -> bool:
    checkpoint = shard.checkpoint
    complete = word.complete.get(tier, ())
    if checkpoint in complete or (checkpoint in word.unwanted and checkpoint != word.base):
        return False
    # What is thinned near has still to reach the store if people, a drain or the end asked for it.
    if checkpoint in word.thin and not (tier == REMOTE and shard.reason == FORCED):
        return False
    if word.lineage is not None and not word.lineage.contains(checkpoint):
        return False
    chosen = word.persist.get(tier, ())
    if checkpoint == word.base or checkpoint in chosen or shard.reason == FORCED:
        return True
    # Only a newer one that is whole in the tier makes an older one superfluous.
    superseded = any(checkpoint < newer for newer in complete)
    return due(schedule(checkpoint.step), checkpoint, shard.reason) and not superseded


def to_strike(published: Iterable[CheckpointId], word: LeaderWord) -> frozenset[CheckpointId]:
    """Checkpoints in slots that people deleted, and whose slots may be emptied now.

    The base and the newest one that all ranks have stay: there is always one to restart from.
    """
    newest = max(word.complete.get(MEMORY, ()), default=None)
    return frozenset(c for c in published if c in word.unwanted and c not in (word.base, newest))
