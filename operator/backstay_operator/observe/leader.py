"""The leader's view (GET /v1/job) to the facts that decisions need. Pure."""

from __future__ import annotations

from backstay_operator.decide import LeaderFacts
from backstay_protocol.control import State
from backstay_protocol.messages import JobView, TierState
from backstay_protocol.names import REMOTE

HEARD_SECONDS = 10.0
FEW_SKIPS = 3
"""So many skipped saves may happen to anybody."""
NAMED_RANKS = 3


def facts_of(view: JobView | None) -> LeaderFacts | None:
    """None while the leader does not answer."""
    if view is None:
        return None
    newest = [tier.newest.step for tier in view.tiers if tier.newest is not None]
    remote = next((t for t in view.tiers if t.tier == REMOTE), TierState(tier=REMOTE))
    return LeaderFacts(
        phase=view.phase,
        message=view.message,
        attempt=view.attempt,
        step=view.step,
        newest_step=max(newest, default=-1),
        durable_step=view.newest_durable.step if view.newest_durable else -1,
        tier_troubles=tuple(t.message for t in view.tiers if not t.ok and t.message),
        remote_code="" if remote.ok else remote.code,
        remote_trouble="" if remote.ok else remote.message,
        skipping=_skipping(view),
        last_steps={
            one.replica: max(rank.step_time for rank in one.ranks)
            for one in view.replicas
            if one.ranks and all(rank.state == State.TRAINING for rank in one.ranks)
        },
        quiet_seconds=view.quiet_seconds,
        step_seconds=view.step_seconds,
        heard=frozenset(r.replica for r in view.replicas if r.seen_seconds_ago <= HEARD_SECONDS),
        spoken=frozenset(r.replica for r in view.replicas if r.ranks),
        code=view.code,
        outranked_by=view.outranked_by,
        unheeded=view.unheeded,
        unheeded_seconds=view.unheeded_seconds,
    )


def _skipping(view: JobView) -> tuple[str, ...]:
    """Of the attempt that runs: what is kept of such a rank grows old."""
    ranks = [rank for one in view.replicas for rank in one.ranks if rank.attempt == view.attempt]
    return tuple(
        f"rank {rank.rank} skipped {rank.skipped} of {rank.skipped + rank.saves} saves (the log of "
        "its trainer says why, and how large the memory volume must be)"
        for rank in ranks
        if rank.skipped >= FEW_SKIPS and rank.skipped >= rank.saves
    )[:NAMED_RANKS]


def missed_seconds(view: JobView | None, replica: int, generation: int) -> float:
    """How long the leader has not heard that pod; 0 if it does not say."""
    for one in view.replicas if view is not None else ():
        if (one.replica, one.generation) == (replica, generation):
            return one.seen_seconds_ago
    return 0.0
