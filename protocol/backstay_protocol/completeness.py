"""Which checkpoints are whole, and from what. Pure; used by restore, leader duties and the command.

A checkpoint is complete when every rank of its world has a sealed shard and all shards carry one
plan id (or all say `local`). Copies of one shard with different bytes are never mixed: a number
that was used twice (a bare topology without generations) must not make a checkpoint of two worlds.
Where copies differ, a tier that holds one consistent set by itself is believed, the one that is
hardest to lose first; where no tier does, the checkpoint is not complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CopySource, ShardCopy, ShardPlan
from backstay_protocol.names import TIERS

SHOWN_RANKS = 8
"""At most so many ranks are named in a sentence."""

_World = tuple[int, str]  # (world size, plan id): what all shards of a checkpoint share
_Content = tuple[int, int, str]  # (size, chunk size, fingerprint): equal means equal bytes


@dataclass(frozen=True)
class CompleteCheckpoint:
    """One whole checkpoint: for each rank in order what it is and all places that have it."""

    checkpoint: CheckpointId
    world_size: int
    plan: str
    shards: tuple[ShardPlan, ...]


def complete(copies: Iterable[ShardCopy]) -> dict[CheckpointId, CompleteCheckpoint]:
    """Every checkpoint that these copies, of all tiers together, make whole."""
    found = {}
    for checkpoint, own in _by_checkpoint(copies).items():
        whole = _whole(checkpoint, own)
        if whole is not None:
            found[checkpoint] = whole
    return found


def complete_in(copies: Iterable[ShardCopy], tier: str) -> dict[CheckpointId, CompleteCheckpoint]:
    """Every checkpoint that is whole in one tier by itself."""
    return complete(copy for copy in copies if copy.tier == tier)


def incomplete(copies: Iterable[ShardCopy]) -> dict[CheckpointId, str]:
    """Every checkpoint that is not whole -> what is wrong with it, in a sentence."""
    return {
        checkpoint: _fault(own)
        for checkpoint, own in _by_checkpoint(copies).items()
        if _whole(checkpoint, own) is None
    }


def published_by_all(
    published: Mapping[int, Collection[CheckpointId]], world_size: int
) -> frozenset[CheckpointId]:
    """Checkpoints that every rank 0..world_size-1 holds in a slot (complete in memory)."""
    if any(rank not in published for rank in range(world_size)):
        return frozenset()
    return frozenset(published[0]).intersection(*(published[r] for r in range(1, world_size)))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2 and 5`, or the first few and how many more."""
    named = sorted(ranks)
    if len(named) == 1:
        return f"rank {named[0]}"
    if len(named) > SHOWN_RANKS:
        shown = ", ".join(str(rank) for rank in named[:SHOWN_RANKS])
        return f"ranks {shown} and {len(named) - SHOWN_RANKS} more"
    return f"ranks {', '.join(str(rank) for rank in named[:-1])} and {named[-1]}"


def _by_checkpoint(copies: Iterable[ShardCopy]) -> dict[CheckpointId, list[ShardCopy]]:
    grouped: dict[CheckpointId, list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        grouped[copy.checkpoint].append(copy)
    return grouped


def _whole(checkpoint: CheckpointId, copies: list[ShardCopy]) -> CompleteCheckpoint | None:
    """One consistent set: of all copies if they agree, else of one tier by itself."""
    believed = _consistent(copies)
    for tier in reversed(TIERS):
        if believed is None:
            believed = _consistent([copy for copy in copies if copy.tier == tier])
    if believed is None:
        return None
    (world_size, plan), contents = believed
    shards = tuple(
        _shard(rank, contents[rank], (world_size, plan), copies) for rank in range(world_size)
    )
    return CompleteCheckpoint(checkpoint, world_size, plan, shards)


def _consistent(copies: list[ShardCopy]) -> tuple[_World, dict[int, _Content]] | None:
    """The only world in these copies that has each of its ranks, with one content each."""
    worlds = [
        (world, {rank: next(iter(contents)) for rank, contents in ranks.items()})
        for world, ranks in _worlds(copies).items()
        if not _missing(world, ranks) and all(len(contents) == 1 for contents in ranks.values())
    ]
    return worlds[0] if len(worlds) == 1 else None


def _worlds(copies: list[ShardCopy]) -> dict[_World, dict[int, set[_Content]]]:
    worlds: dict[_World, dict[int, set[_Content]]] = defaultdict(lambda: defaultdict(set))
    for copy in copies:
        worlds[copy.world_size, copy.plan][copy.rank].add(_content(copy))
    return worlds


def _content(copy: ShardCopy) -> _Content:
    return copy.size, copy.chunk_size, copy.fingerprint


def _missing(world: _World, ranks: Mapping[int, object]) -> list[int]:
    return [rank for rank in range(world[0]) if rank not in ranks]


def _shard(rank: int, content: _Content, world: _World, copies: list[ShardCopy]) -> ShardPlan:
    sources = {
        CopySource(tier=copy.tier, holder=copy.holder)
        for copy in copies
        if copy.rank == rank and _content(copy) == content and (copy.world_size, copy.plan) == world
    }
    size, chunk_size, fingerprint = content
    ordered = sorted(sources, key=lambda source: (TIERS.index(source.tier), source.holder))
    return ShardPlan(
        rank=rank,
        size=size,
        chunk_size=chunk_size,
        fingerprint=fingerprint,
        sources=tuple(ordered),
    )


def _fault(copies: list[ShardCopy]) -> str:
    worlds = _worlds(copies)
    if len({world_size for world_size, _ in worlds}) > 1:
        return "its shards were saved by worlds of different sizes"
    size = next(iter(worlds))[0]
    present = {copy.rank for copy in copies}
    lacking = _missing((size, ""), dict.fromkeys(present))
    if lacking:
        return f"no copy of {ranks_in_words(lacking)} (of {size}) is in sight"
    if len(worlds) > 1:
        return "its shards were saved under different plans"
    mixed = [rank for rank, contents in next(iter(worlds.values())).items() if len(contents) > 1]
    return f"copies of {ranks_in_words(mixed)} differ, and no tier holds one set of all ranks"
