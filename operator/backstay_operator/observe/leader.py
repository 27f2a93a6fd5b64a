"""The leader's view (GET /v1/job) to the facts that decisions need. Pure."""

from __future__ import annotations

from backstay_operator.decide import LeaderFacts
from backstay_protocol.control import State
from backstay_protocol.messages import JobView


def facts_of(view: JobView | None) -> LeaderFacts | None:
    """None while the leader does not answer."""
    if view is None:
        return None
    newest = [tier.newest.step for tier in view.tiers if tier.newest is not None]
    return LeaderFacts(
        phase=view.phase,
        message=view.message,
        attempt=view.attempt,
        step=view.step,
        newest_step=max(newest, default=-1),
        durable_step=view.newest_durable.step if view.newest_durable else -1,
        tier_troubles=tuple(t.message for t in view.tiers if not t.ok and t.message),
        last_steps={
            one.replica: max(rank.step_time for rank in one.ranks)
            for one in view.replicas
            if one.ranks and all(rank.state == State.TRAINING for rank in one.ranks)
        },
    )


def missed_seconds(view: JobView | None, replica: int, generation: int) -> float:
    """How long the leader has not heard that pod; 0 if it does not say."""
    for one in view.replicas if view is not None else ():
        if (one.replica, one.generation) == (replica, generation):
            return one.seen_seconds_ago
    return 0.0
