"""What the base's shards hold, by name: built from verified headers, asked by load.py.

Names in shard files are plain, or carry the rank that keeps the tensor for itself. The catalog
knows which of them a given rank should read. It reads no tensor and touches no live state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backstay.boxes import Box
from backstay.shard_reader import Shard
from backstay.shardfile import Entry, ShardIndex
from backstay_protocol.names import RESERVED, rank_name

_RANK_PREFIX = f"{RESERVED}rank."


@dataclass(frozen=True)
class Saved:
    """One saved piece of a tensor."""

    shard: Shard
    entry: Entry

    @property
    def box(self) -> Box:
        """Which part of the global tensor it is."""
        return Box(self.entry.offsets, self.entry.shape)


@dataclass(frozen=True)
class Described:
    """A saved tensor as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_pieces: int


class Catalog:
    """All pieces of all shards that were indexed."""

    def __init__(self, rank: int, saved_world_size: int, same_world: bool) -> None:
        """`rank`: of the reader."""
        self._rank = rank
        self._saved_world_size = saved_world_size
        self._same_world = same_world
        self._pieces: dict[str, list[Saved]] = {}
        self._aliases: dict[str, str] = {}

    def add(self, shard: Shard, index: ShardIndex) -> None:
        """Take up one shard's header. The order is the order of preference for equal pieces."""
        for name, entry in index.entries.items():
            self._pieces.setdefault(name, []).append(Saved(shard, entry))
        self._aliases.update(index.aliases)

    def find(self, name: str, *, any_rank: bool) -> tuple[str, list[Saved]]:
        """The name in the files and the pieces from which this rank fills a tensor.

        Its own copy where the world is the same, else the common one; where `any_rank` the copies
        are equal by declaration, and the first rank's serves too. Empty: there is none.
        """
        for candidate in self._candidates(name, any_rank):
            if candidate in self._pieces:
                return candidate, self._pieces[candidate]
        return name, []

    def kept_by_ranks(self, name: str) -> bool:
        """Whether the saved ranks each kept their own."""
        return any(rank_name(rank, name) in self._pieces for rank in range(self._saved_world_size))

    def holders(self, name: str) -> set[int]:
        """Saved ranks whose shards have a piece of it, or a copy of their own."""
        own = {r for r in range(self._saved_world_size) if rank_name(r, name) in self._pieces}
        return own | {piece.shard.rank for piece in self._pieces.get(name, ())}

    def below(self, prefixes: tuple[str, ...]) -> dict[str, Described]:
        """Every tensor whose plain name begins so and that this rank is meant to have."""
        found = {}
        own = rank_name(self._rank, "")
        for stored, pieces in self._pieces.items():
            name = stored.removeprefix(own) if self._same_world else stored
            if name.startswith(prefixes):
                found[name] = describe(pieces)
        for alias, stored in self._aliases.items():
            if alias.startswith(prefixes) and stored in self._pieces:
                found[alias] = describe(self._pieces[stored])
        return found

    def unused(self, used: set[str]) -> list[str]:
        """Plain names of what is saved for this rank (or for all) and was not asked for."""
        own = rank_name(self._rank, "")
        left = []
        for name in self._pieces:
            if name in used:
                continue
            if name.startswith(own) and self._same_world:
                left.append(name.removeprefix(own))
            elif not name.startswith(_RANK_PREFIX):
                left.append(name)
        return sorted(left)

    def _candidates(self, name: str, any_rank: bool) -> Iterator[str]:
        stored = self._aliases.get(name, name)
        if self._same_world:
            yield rank_name(self._rank, name)
            yield rank_name(self._rank, stored)
        yield name
        yield stored
        if any_rank:
            yield rank_name(0, name)
            yield rank_name(0, stored)


def describe(pieces: list[Saved]) -> Described:
    """The whole that the pieces make up."""
    shape = tuple(map(max, *(piece.box.stops for piece in pieces), pieces[0].box.stops))
    boxes = {piece.box for piece in pieces}
    return Described(pieces[0].entry.dtype, shape, len(boxes))
