"""Which checkpoints are history: the lineage of attempts. Pure; shared by every part.

An attempt's chain names the attempts it descends from, nearest first, each with the step at which
the chain leaves it. What is not on the lineage never happened. Used by restore, inventory,
retention, commit and the command alike; nobody may judge lineage another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from backstay_protocol.ids import CheckpointId
from backstay_protocol.records import AttemptRecord

Chain = tuple[tuple[int, int], ...]
"""Nearest first: (older attempt, step at which the chain leaves it)."""


@dataclass(frozen=True)
class Lineage:
    """An attempt and where it comes from."""

    attempt: int
    chain: Chain = ()

    def contains(self, checkpoint: CheckpointId) -> bool:
        """Whether the checkpoint is history as this attempt sees it."""
        if checkpoint.attempt == self.attempt:
            return True
        return any(
            checkpoint.attempt == attempt and checkpoint.step <= cut for attempt, cut in self.chain
        )

    @property
    def base(self) -> CheckpointId | None:
        """The checkpoint that the attempt started from; None: from nothing."""
        if not self.chain:
            return None
        attempt, step = self.chain[0]
        return CheckpointId(step, attempt)

    def extend(self, new_attempt: int, base: CheckpointId | None) -> Lineage:
        """The lineage of `new_attempt` that starts from `base`, which lies on this one.

        Raises ValueError for a base that does not: its chain must then come from its manifests.
        """
        if base is None:
            return Lineage(new_attempt)
        link = (base.attempt, base.step)
        if base.attempt == self.attempt:
            return Lineage(new_attempt, (link, *self.chain))
        for position, (attempt, cut) in enumerate(self.chain):
            if attempt == base.attempt and base.step <= cut:
                return Lineage(new_attempt, (link, *self.chain[position + 1 :]))
        raise ValueError(f"{base} is not on the lineage of attempt {self.attempt}")


def lineage_of(record: AttemptRecord) -> Lineage:
    """The lineage that a stored record stands for."""
    return Lineage(record.attempt, record.chain)


def newest_record(records: Iterable[AttemptRecord]) -> AttemptRecord | None:
    """The record of the greatest attempt; of equal ones the one that says it ran."""
    return max(records, key=lambda record: (record.attempt, record.ran), default=None)


def chain_after(
    head: Lineage | AttemptRecord | None,
    base: CheckpointId | None,
    chains: Mapping[int, Chain],
) -> Chain:
    """The chain of a new attempt that starts from `base`.

    `head`: the newest recorded attempt, `chains`: what the manifests in sight carry. A base off the
    head's lineage (a person chose it) brings its own chain; where that is unknown, history before
    the base is forgotten rather than guessed.
    """
    if base is None:
        return ()
    lineage = lineage_of(head) if isinstance(head, AttemptRecord) else head
    if lineage is not None and lineage.contains(base):
        return lineage.extend(base.attempt + 1, base).chain
    return ((base.attempt, base.step), *chains.get(base.attempt, ()))


def newest_lineage(records: Iterable[AttemptRecord], chains: Mapping[int, Chain]) -> Lineage | None:
    """The lineage of the greatest attempt that anything in sight tells of; None: nothing does.

    Records (of sidecars and the remote tier) and manifests count alike: an attempt is forgotten
    only when nothing of it can be read.
    """
    record = newest_record(records)
    newest = max(chains, default=0)
    if record is not None and record.attempt >= newest:
        return lineage_of(record)
    return Lineage(newest, chains[newest]) if chains else None
