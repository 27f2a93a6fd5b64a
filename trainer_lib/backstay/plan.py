"""Which rank writes which piece, and under what name: computed locally, checked by one digest.

Owners of replicated pieces follow from mesh placements (DTensors) and known groups (DDP's process
group, the mesh of the parameter that owns optimizer state, what the user declared). One gather of
32 bytes per rank and structure proves that the ranks of a group hold the same things; never a
gathered global plan, which would not scale. What is not proven is kept per rank.

Called by capture at the first save of an attempt and at an announced replan, at the same step on
all ranks; never in between, since the other ranks would not come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from backstay.digest import DIGEST_BYTES, RunningDigest, binary_digest
from backstay.gathering import Gather, GatherFailed
from backstay.shardfile import Item
from backstay.structure import Kind, NamedTensor, Structure, local_of
from backstay_protocol.names import PLAN_LOCAL, rank_name

STAGING_BYTES = 64 << 20
NOTHING = bytes(2 * DIGEST_BYTES)
"""What a rank gathers that could not plan: it agrees with nobody."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One tensor that this rank writes."""

    tensor: NamedTensor
    name: str
    """In the shard file."""

    @property
    def item(self) -> Item:
        """As the layout of a shard file wants it."""
        tensor = self.tensor
        return Item(self.name, tensor.local.dtype, tuple(tensor.local.shape), tensor.offsets)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank writes until the structure changes."""

    id: str
    """The same on all ranks of a checkpoint; or `local`: this rank writes all that it holds."""
    pieces: tuple[Piece, ...]
    doubts: tuple[str, ...] = ()
    """Sentences for people: replicas that turned out not to be equal."""

    @property
    def items(self) -> tuple[Item, ...]:
        """In the order of `pieces`."""
        return tuple(piece.item for piece in self.pieces)


def make_plan(
    structure: Structure, rank: int, world_size: int, gather: Gather | None = None
) -> Plan:
    """Plan with all ranks: collective. Without `gather`, in a world of several, plan for one.

    Takes part in the gather whatever goes wrong here before it: the other ranks are waiting in it.
    Raises GatherFailed when not all of them came.
    """
    if world_size == 1:
        return Plan(_structure_digest(structure).hex(), _alone(structure))
    if gather is None:
        return local_plan(structure, rank, world_size)
    try:
        mine = _structure_digest(structure) + _replica_digest(structure)
    except BaseException:  # no memory left to compare values with, say
        give_nothing(gather)
        raise
    everyone = gather(mine)
    if len(everyone) != world_size or any(len(other) != len(mine) for other in everyone):
        raise GatherFailed(f"gathered {len(everyone)} digests for a world of {world_size}")
    if everyone[rank] != mine:
        raise GatherFailed("the digests that were gathered are not of this world")
    replicas = [other[DIGEST_BYTES:] for other in everyone]
    return _Planner(structure, rank, replicas).plan(binary_digest(b"".join(everyone)).hex())


def give_nothing(gather: Gather) -> None:
    """Come to the gather although nothing can be planned here."""
    with contextlib.suppress(GatherFailed):
        gather(NOTHING)


def local_plan(structure: Structure, rank: int, world_size: int) -> Plan:
    """Everything that this rank holds, nothing left to others; no communication."""
    if world_size == 1:
        return make_plan(structure, rank, world_size)
    pieces = [Piece(t, _name(t, rank, trusted=bool(t.group))) for t in structure.tensors]
    return Plan(PLAN_LOCAL, tuple(pieces))


def carried_over(made: Plan, before: Structure, now: Structure) -> Plan | None:
    """The same plan over other memory, if only that has changed; needs no communication.

    Owners and names hang on names, shapes and groups, not on which objects hold the values: a
    tensor that the script puts anew into its dict at each step changes nothing for other ranks.
    """
    if _structure_digest(before) != _structure_digest(now):
        return None
    tensors = {tensor.name: tensor for tensor in now.tensors}
    pieces = tuple(Piece(tensors[piece.tensor.name], piece.name) for piece in made.pieces)
    return Plan(made.id, pieces, made.doubts)


def estimated_bytes(structure: Structure) -> int:
    """About what this rank will have to write, before there is a plan.

    Looks at optimizer state as it is now, not when the structure was taken apart: optimizers make
    it in their first step. Safe at any moment of training: it takes nothing apart.
    """
    shares = {
        id(t.source): max(1, len(t.group)) for t in structure.tensors if t.kind is Kind.PARAMETER
    }
    own = sum(
        t.local.nbytes // (1 if t.kind is Kind.BUFFER else max(1, len(t.group)))
        for t in structure.tensors
        if t.kind is not Kind.OPTIMIZER
    )
    state = sum(
        local_of(value).nbytes // shares.get(id(parameter), 1)
        for entry in structure.optimizers
        for parameter, values in entry.optimizer.state.items()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    return own + state


def _alone(structure: Structure) -> tuple[Piece, ...]:
    return tuple(Piece(t, t.name) for t in structure.tensors)


def _name(tensor: NamedTensor, rank: int, *, trusted: bool) -> str:
    """Under what name a rank of several writes a tensor.

    `trusted`: the ranks of its group hold the same one. Buffers differ between ranks even under
    DDP (BatchNorm): the first rank of the group gives the plain one, each other keeps its own.
    """
    if tensor.is_dtensor:
        return tensor.name
    first = tensor.kind is not Kind.BUFFER or rank == min(tensor.group, default=-1)
    return tensor.name if trusted and first else rank_name(rank, tensor.name)


class _Planner:
    """One rank's view of a gathered plan."""

    def __init__(self, structure: Structure, rank: int, replicas: Sequence[bytes]) -> None:
        self._structure = structure
        self._rank = rank
        self._replicas = replicas

    def plan(self, plan_id: str) -> Plan:
        pieces: list[Piece] = []
        shared: dict[tuple[int, ...], list[NamedTensor]] = {}
        doubts = []
        for tensor in self._structure.tensors:
            if tensor.kind is Kind.BUFFER and not tensor.is_dtensor:
                pieces.append(Piece(tensor, _name(tensor, self._rank, trusted=bool(tensor.group))))
            else:
                shared.setdefault(tensor.group, []).append(tensor)
        for group, tensors in shared.items():
            agreed = bool(group) and self._agree(group)
            if len(group) > 1 and not agreed:
                doubts.append(self._doubt(group, tensors))
            keep = self._owned(group, tensors) if agreed else tensors
            pieces += [Piece(t, _name(t, self._rank, trusted=agreed)) for t in keep]
        return Plan(plan_id, tuple(pieces), tuple(doubts))

    def _agree(self, group: tuple[int, ...]) -> bool:
        return all(self._replicas[r] == self._replicas[self._rank] for r in group)

    def _owned(self, group: tuple[int, ...], tensors: Iterable[NamedTensor]) -> list[NamedTensor]:
        """Largest first to the least loaded; each member of the group gets the same answer."""
        load = dict.fromkeys(group, 0)
        keep = []
        for tensor in sorted(tensors, key=lambda t: (-t.local.nbytes, t.name)):
            owner = min(group, key=lambda r: (load[r], r))
            load[owner] += tensor.local.nbytes or 1
            if owner == self._rank:
                keep.append(tensor)
        return keep

    def _doubt(self, group: tuple[int, ...], tensors: Sequence[NamedTensor]) -> str:
        others = [r for r in group if self._replicas[r] != self._replicas[self._rank]]
        return (
            f"ranks {list(group)[:8]} should hold the same {len(tensors)} tensors "
            f"({tensors[0].name} ...), but rank {self._rank} differs from {others[:8]}: each rank "
            "keeps its own copy"
        )


def _structure_digest(structure: Structure) -> bytes:
    rows = [
        f"{t.name} {t.kind.name} {t.local.dtype} {tuple(t.local.shape)} {t.offsets} "
        f"{t.global_shape} {t.group} {t.is_dtensor}"
        for t in structure.tensors
    ]
    return binary_digest("\n".join(rows).encode())


def _replica_digest(structure: Structure) -> bytes:
    """Equal on two ranks when all that they may hold in common is equal, values included.

    DTensors go in by what all ranks of their mesh know of them; their values are never compared.
    """
    running = RunningDigest()
    running.update("\n".join(sorted(structure.dtensor_rows)).encode())
    shared = [
        t
        for t in structure.tensors
        if len(t.group) > 1 and not t.is_dtensor and t.kind is not Kind.BUFFER
    ]
    for tensor in sorted(shared, key=lambda t: t.name):
        local = tensor.local
        running.update(f"\n{tensor.name} {local.dtype} {tuple(local.shape)}\n".encode())
        _add_values(running, local)
    return running.digest()


def _add_values(running: RunningDigest, tensor: torch.Tensor) -> None:
    """The same for equal values however they are laid out; never more than a piece is copied."""
    if not tensor.numel():
        return
    if not tensor.is_contiguous() and tensor.nbytes > STAGING_BYTES:
        length = STAGING_BYTES * tensor.shape[0] // tensor.nbytes
        for start in range(0, tensor.shape[0], length or 1):
            part = tensor[start : start + length] if length else tensor[start]
            _add_values(running, part)
        return
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, raw.numel(), STAGING_BYTES):
        running.update(raw[start : start + STAGING_BYTES].cpu().numpy().data)
