"""The truth about a job, as conditions: one function a condition, messages for people."""

from __future__ import annotations

from dataclasses import dataclass

from backstay_operator.api import names
from backstay_operator.decide.observed import Observed
from backstay_operator.decide.plan import Plan
from backstay_protocol.ring import neighbors


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One observation; who writes status adds times and observedGeneration."""

    type: str
    status: bool
    reason: str
    message: str


def conditions(observed: Observed, plan: Plan) -> tuple[Condition, ...]:
    """All conditions that can be told now; what is absent is unknown."""
    found = (
        _running(observed, plan),
        _restoring(observed, plan),
        _durable(observed),
        _degraded(observed),
        _suspended(observed),
        _over(plan, names.SUCCEEDED),
        _over(plan, names.FAILED),
    )
    return tuple(condition for condition in found if condition is not None)


def _running(observed: Observed, plan: Plan) -> Condition:
    training = observed.leader is not None and observed.leader.phase == "Training"
    return Condition(
        type=names.RUNNING,
        status=training and not plan.actions and not plan.record.outcome,
        reason=plan.reason,
        message=plan.message,
    )


def _restoring(observed: Observed, plan: Plan) -> Condition | None:
    leader = observed.leader
    if leader is None:
        return None
    restoring = leader.phase in ("Joining", "Restoring")
    reason = names.REASON_WAITING if restoring else names.REASON_ALL_TRAINING
    return Condition(type=names.RESTORING, status=restoring, reason=reason, message=leader.message)


def _durable(observed: Observed) -> Condition | None:
    leader = observed.leader
    if leader is None:
        return None
    if observed.job.spec.checkpoint.remote is None:
        message = "no remote tier is configured: nothing is durable"
        return Condition(
            type=names.DURABLE, status=False, reason=names.REASON_NO_REMOTE_TIER, message=message
        )
    if leader.durable_step < 0:
        message = "no checkpoint is durable yet"
        return Condition(
            type=names.DURABLE, status=False, reason=names.REASON_NONE_YET, message=message
        )
    message = f"step {leader.durable_step} is durable"
    return Condition(
        type=names.DURABLE, status=True, reason=names.REASON_COMMITTED, message=message
    )


def _degraded(observed: Observed) -> Condition | None:
    if observed.leader is None:
        return None
    troubles = observed.leader.tier_troubles
    if troubles:
        return Condition(
            type=names.DEGRADED,
            status=True,
            reason=names.REASON_TIER_TROUBLE,
            message="; ".join(troubles),
        )
    lonely = _lonely(observed)
    if lonely:
        return Condition(
            type=names.DEGRADED, status=True, reason=names.REASON_NO_NEIGHBOR, message=lonely
        )
    return Condition(
        type=names.DEGRADED,
        status=False,
        reason=names.REASON_ALL_TIERS_WELL,
        message="all tiers are well",
    )


def _lonely(observed: Observed) -> str:
    """Why copies on neighbours are no safer than they are: from where the pods really run."""
    neighbor, size = observed.job.spec.checkpoint.neighbor, observed.job.spec.replicas
    pods = [pod for r in range(size) if (pod := observed.current(r)) is not None and pod.node]
    if neighbor is None or len(pods) < size:
        return ""
    where = {pod.replica: pod.node for pod in pods}
    domains = {pod.replica: pod.domain for pod in pods if pod.domain}
    ring = neighbors(range(size), where, domains or None)
    if not ring.warnings:
        return ""
    return f"{'; '.join(ring.warnings)} (spec.checkpoint.neighbor.topologyKey)"


def _suspended(observed: Observed) -> Condition | None:
    if not observed.job.spec.suspend:
        return None
    return Condition(
        type=names.SUSPENDED,
        status=True,
        reason=names.REASON_SUSPENDED,
        message="spec.suspend is true",
    )


def _over(plan: Plan, outcome: str) -> Condition | None:
    record = plan.record
    if record.outcome != outcome:
        return None
    return Condition(
        type=outcome, status=True, reason=record.outcome_reason, message=record.outcome_message
    )
