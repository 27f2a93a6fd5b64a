"""What may be done in the remote tier, and in which order. Pure; used by the leader's duties.

A commit record only marks a checkpoint as durable. What must be guarded is removal: `Deletion` is
the small machine that a leader walks for each checkpoint. Rules carried here
(tests/support/protocol_rules.py): claimfirst, intent, and the courtesy that an attempt with a newer
claim beside it commits nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from backstay_protocol.completeness import CompleteCheckpoint
from backstay_protocol.history import Chain, Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.records import CommitRecord, CommitShard, Intent

INTENT_SECONDS = 24 * 3600.0
"""Intents stay at least so long: a stopped leader may wake up and go on with its deletion."""


class Answer(NamedTuple):
    """May it be done, and why (not)."""

    allowed: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where an attempt stands in the remote tier, by the leader's last listing."""

    lineage: Lineage
    """Of the attempt that runs."""
    claims: frozenset[int] = frozenset()
    """All attempts that are claimed."""
    base_recorded: bool = False
    """Whether this attempt's base record is there."""
    commits: frozenset[CheckpointId] = frozenset()
    intents: frozenset[CheckpointId] = frozenset()

    @property
    def attempt(self) -> int:
        """The attempt that runs."""
        return self.lineage.attempt


def may_claim_late(standing: Standing) -> Answer:
    """Whether an attempt that began while the remote tier was away may claim its number now."""
    newer = _newer_claim(standing)
    if newer:
        return Answer(False, newer)
    if standing.attempt in standing.claims:
        return Answer(False, f"attempt {standing.attempt} is claimed already")
    return Answer(True, f"attempt {standing.attempt} began without a claim and takes it now")


def may_upload(checkpoint: CheckpointId, standing: Standing) -> Answer:
    """Rule `claimfirst`: no byte before the claim and the base; none under an intent."""
    if standing.attempt not in standing.claims or not standing.base_recorded:
        return Answer(False, f"attempt {standing.attempt} has no claim and base record there yet")
    if checkpoint in standing.intents:
        return Answer(False, f"{checkpoint} is about to be deleted from the remote tier")
    if not standing.lineage.contains(checkpoint):
        return Answer(False, f"{checkpoint} is not on the lineage of attempt {standing.attempt}")
    return Answer(True, f"{checkpoint} belongs to the remote tier")


def may_commit(
    checkpoint: CheckpointId, whole: Collection[CheckpointId], standing: Standing
) -> Answer:
    """Whether to write (or, for an older attempt's checkpoint, adopt with) a commit record.

    `whole`: what `complete_in(copies, "remote")` found.
    """
    if checkpoint in standing.commits:
        return Answer(False, f"{checkpoint} is durable already")
    if checkpoint not in whole:
        return Answer(False, f"{checkpoint} is not complete in the remote tier")
    allowed = may_upload(checkpoint, standing)
    if not allowed.allowed:
        return allowed
    newer = _newer_claim(standing)
    if newer:
        return Answer(False, newer)
    return Answer(True, f"{checkpoint} is complete in the remote tier")


def commit_record(whole: CompleteCheckpoint, chain: Chain, created: float) -> CommitRecord:
    """The record that makes a checkpoint durable. `chain`: of the checkpoint's own attempt."""
    shards = tuple(
        CommitShard(rank=shard.rank, size=shard.size, fingerprint=shard.fingerprint)
        for shard in whole.shards
    )
    return CommitRecord(
        checkpoint=whole.checkpoint,
        world_size=whole.world_size,
        plan=whole.plan,
        chunk_size=whole.shards[0].chunk_size,
        chain=chain,
        shards=shards,
        created=created,
    )


def _newer_claim(standing: Standing) -> str:
    newest = max(standing.claims, default=0)
    return f"attempt {newest} is newer than {standing.attempt}" if newest > standing.attempt else ""


# --- deletion -------------------------------------------------------------------------------------


class Deleting(Enum):
    """What a deletion does next."""

    LIST_CLAIMS = "list claims"
    WRITE_INTENT = "write the intent"
    LIST_CLAIMS_AGAIN = "list claims again"
    REMOVE_COMMIT = "remove the commit record"
    REMOVE_SHARDS = "remove the shards"
    NOTHING = "nothing"


_NEXT = {
    Deleting.LIST_CLAIMS: Deleting.WRITE_INTENT,
    Deleting.WRITE_INTENT: Deleting.LIST_CLAIMS_AGAIN,
    Deleting.LIST_CLAIMS_AGAIN: Deleting.REMOVE_COMMIT,
    Deleting.REMOVE_COMMIT: Deleting.REMOVE_SHARDS,
    Deleting.REMOVE_SHARDS: Deleting.NOTHING,
}


@dataclass(frozen=True)
class Deletion:
    """One checkpoint on its way out of the remote tier. Each step may be repeated; none skipped.

    A step that fails (the store does not answer) leaves the machine where it is.
    """

    checkpoint: CheckpointId
    attempt: int
    """The attempt whose leader deletes."""
    todo: Deleting = Deleting.LIST_CLAIMS
    stopped: bool = False
    why: str = ""

    def listed(self, claims: Iterable[int]) -> Deletion:
        """The claims were listed: go on, unless there is a newer one, or none of our own."""
        assert self.todo in (Deleting.LIST_CLAIMS, Deleting.LIST_CLAIMS_AGAIN), self.todo
        seen = set(claims)
        newest = max(seen, default=0)
        if newest > self.attempt:
            return self._stop(f"attempt {newest} is newer than {self.attempt}")
        if self.attempt not in seen:
            return self._stop(f"attempt {self.attempt} has no claim")
        return replace(self, todo=_NEXT[self.todo])

    def done(self) -> Deletion:
        """The intent was written, or the commit record, or all shards were removed."""
        assert self.todo not in (
            Deleting.LIST_CLAIMS,
            Deleting.LIST_CLAIMS_AGAIN,
            Deleting.NOTHING,
        ), self.todo
        return replace(self, todo=_NEXT[self.todo])

    def _stop(self, why: str) -> Deletion:
        text = f"{self.checkpoint} is left alone: {why}"
        return replace(self, todo=Deleting.NOTHING, stopped=True, why=text)


def spent_intents(
    intents: Iterable[Intent], left: Mapping[CheckpointId, int], now: float
) -> tuple[CheckpointId, ...]:
    """Intents that may be lifted: a day old, and no object of the checkpoint is left.

    `left`: checkpoint -> number of objects under its folder.
    """
    return tuple(
        intent.checkpoint
        for intent in intents
        if now - intent.created >= INTENT_SECONDS and not left.get(intent.checkpoint, 0)
    )
