"""Which checkpoints are whole, and from what. Pure; used by restore, leader duties and the command.

A checkpoint is complete when every rank of its world has a sealed shard and all shards carry one
plan id (or all say `local`). Copies of one shard with different bytes are never mixed: a number
that was used twice (a bare topology without generations) must not make a checkpoint of two worlds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CopySource, ShardCopy, ShardPlan
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE, TIERS

SHOWN_RANKS = 8
"""At most so many ranks are named in a sentence."""


@dataclass(frozen=True)
class CompleteCheckpoint:
    """One whole checkpoint: for each rank in order what it is and all places that have it."""

    checkpoint: CheckpointId
    world_size: int
    plan: str
    shards: tuple[ShardPlan, ...]


def complete(copies: Iterable[ShardCopy]) -> dict[CheckpointId, CompleteCheckpoint]:
    """Every checkpoint that these copies, of all tiers together, make whole."""
    raise NotImplementedError


def complete_in(copies: Iterable[ShardCopy], tier: str) -> dict[CheckpointId, CompleteCheckpoint]:
    """Every checkpoint that is whole in one tier by itself."""
    return complete(copy for copy in copies if copy.tier == tier)


def incomplete(copies: Iterable[ShardCopy]) -> dict[CheckpointId, str]:
    """Every checkpoint that is not whole -> what is wrong with it, in a sentence."""
    raise NotImplementedError


def published_by_all(
    published: Mapping[int, Collection[CheckpointId]], world_size: int
) -> frozenset[CheckpointId]:
    """Checkpoints that every rank 0..world_size-1 holds in a slot (complete in memory)."""
    raise NotImplementedError
