"""Short builders of the protocol's values, for unit tests."""

from __future__ import annotations

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import JoinRequest, RankJoin, ShardCopy
from backstay_protocol.records import AttemptRecord, Origin


def point(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(step, attempt)


def copy(
    checkpoint: CheckpointId,
    rank: int,
    tier: str = "local",
    holder: int | None = None,
    *,
    world_size: int = 2,
    plan: str = "plan",
    size: int = 8,
    fingerprint: str = "",
) -> ShardCopy:
    """One copy; by default the shard's own replica (one rank each) holds it."""
    return ShardCopy(
        checkpoint=checkpoint,
        rank=rank,
        tier=tier,
        holder=(-1 if tier == "remote" else rank) if holder is None else holder,
        world_size=world_size,
        plan=plan,
        size=size,
        chunk_size=8,
        fingerprint=fingerprint or f"f{checkpoint.step}.{rank}",
    )


def copies(checkpoint: CheckpointId, tier: str = "local", world_size: int = 2) -> list[ShardCopy]:
    """All shards of one checkpoint in one tier."""
    return [copy(checkpoint, rank, tier, world_size=world_size) for rank in range(world_size)]


def record(
    attempt: int,
    base: CheckpointId | None = None,
    *,
    chain: tuple[tuple[int, int], ...] | None = None,
    ran: bool = True,
    deaths: int = 0,
    restarts: int = 0,
    choice: str = "",
    origin: Origin | None = None,
) -> AttemptRecord:
    """A stored record; its chain is the base alone unless given."""
    alone = ((base.attempt, base.step),) if base else ()
    return AttemptRecord(
        attempt=attempt,
        base=base,
        chain=alone if chain is None else chain,
        ran=ran,
        origin=origin,
        deaths=deaths,
        restarts=restarts,
        choice=choice,
        world_size=2,
        replicas=2,
    )


def join(
    replica: int,
    generation: int = 1,
    *,
    nonce: str = "a",
    current: dict[int, int] | None = None,
    world_size: int = 2,
    ranks: tuple[int, ...] | None = None,
    last_step: int = -1,
    last_attempt: int = 0,
) -> JoinRequest:
    """The join of one replica with one rank."""
    own = (replica,) if ranks is None else ranks
    return JoinRequest(
        replica=replica,
        generation=generation,
        current=current or {},
        replaces=0,
        uid="",
        address="",
        ranks=tuple(
            RankJoin(
                rank=rank,
                local_rank=0,
                nonce=f"{nonce}{rank}",
                world_size=world_size,
                last_step=last_step,
                last_attempt=last_attempt,
            )
            for rank in own
        ),
    )
