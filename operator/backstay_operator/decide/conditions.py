"""The truth about a job, as conditions: one function a condition, messages for people."""

from __future__ import annotations

from dataclasses import dataclass

from backstay_operator.api import names
from backstay_operator.api.job import DEFAULT_TOPOLOGY_KEY
from backstay_operator.decide.observed import Observed, PodState
from backstay_operator.decide.plan import Plan
from backstay_operator.times import text_of
from backstay_protocol.messages import TIER_AWAY, TIER_OWNED, TIER_REFUSES
from backstay_protocol.ring import neighbors

REMOTE_REASONS = {
    TIER_REFUSES: names.REASON_BUCKET_REFUSED,
    TIER_AWAY: names.REASON_BUCKET_UNREACHABLE,
    TIER_OWNED: names.REASON_RUN_OWNED_ELSEWHERE,
}
_NOT_RUNNING = (names.REASON_WAITING_FOR_RANKS, names.REASON_WAITING)
_NAMED_NODES = 5


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
    waits = plan.actions or plan.record.outcome or plan.reason in _NOT_RUNNING
    return Condition(
        type=names.RUNNING,
        status=training and not waits,
        reason=plan.reason,
        message=plan.message,
    )


def _restoring(observed: Observed, plan: Plan) -> Condition | None:
    leader = observed.leader
    if leader is None:
        return None
    if leader.phase == "Restoring":
        return Condition(
            type=names.RESTORING,
            status=True,
            reason=names.REASON_RESTORING,
            message=leader.message,
        )
    waits = leader.phase == "Joining" or plan.reason == names.REASON_WAITING_FOR_RANKS
    return Condition(
        type=names.RESTORING,
        status=waits,
        reason=names.REASON_WAITING_FOR_RANKS if waits else names.REASON_NOT_RESTORING,
        message=plan.message if waits else leader.message,
    )


def _durable(observed: Observed) -> Condition | None:
    if observed.job.spec.checkpoint.remote is None:
        message = "no remote tier is configured: nothing is durable"
        return _not_durable(names.REASON_NO_REMOTE_TIER, message)
    leader, word = observed.leader, observed.last_word
    if leader is None and word is None:
        return None
    step = leader.durable_step if leader is not None else word.durable_step if word else -1
    trouble, reason = _remote_trouble(observed)
    if step < 0:
        nothing = "no checkpoint is durable yet"
        return _not_durable(
            reason or names.REASON_NONE_YET, f"{nothing}: {trouble}" if trouble else nothing
        )
    message = f"step {step} is durable"
    if leader is None and word is not None and not word.safe:
        message += f", the newest that was saved is {word.newest_step}"
    return Condition(
        type=names.DURABLE,
        status=True,
        reason=names.REASON_COMMITTED,
        message=f"{message}; nothing newer is: {trouble}" if trouble else message,
    )


def _not_durable(reason: str, message: str) -> Condition:
    return Condition(type=names.DURABLE, status=False, reason=reason, message=message)


def _remote_trouble(observed: Observed) -> tuple[str, str]:
    """What is wrong with the bucket and since when, and the reason; empty: nothing."""
    leader = observed.leader
    if leader is None or not leader.remote_trouble:
        return "", ""
    reason = REMOTE_REASONS.get(leader.remote_code, names.REASON_TIER_TROUBLE)
    since = observed.remote_trouble_since
    when = f"since {text_of(since)} " if since else ""
    return f"{when}{leader.remote_trouble}", reason


def _degraded(observed: Observed) -> Condition | None:
    """Everything that makes a job less safe than it was asked to be; the worst names the reason."""
    leader = observed.leader
    if leader is None:
        return None
    found: list[tuple[str, str]] = []
    trouble, reason = _remote_trouble(observed)
    if trouble:
        found.append((reason, trouble))
    found += [
        (names.REASON_TIER_TROUBLE, t) for t in leader.tier_troubles if t != leader.remote_trouble
    ]
    found += [(names.REASON_SAVES_SKIPPED, sentence) for sentence in leader.skipping]
    if lonely := _lonely(observed):
        found.append((names.REASON_NO_NEIGHBOR, lonely))
    if observed.foreign_budgets:
        found.append((names.REASON_FOREIGN_BUDGET, _foreign(observed.foreign_budgets)))
    if not found:
        found = [(names.REASON_ALL_TIERS_WELL, "all tiers are well")]
    return Condition(
        type=names.DEGRADED,
        status=found[0][0] != names.REASON_ALL_TIERS_WELL,
        reason=found[0][0],
        message="; ".join(sentence for _, sentence in found),
    )


def _foreign(budgets: tuple[str, ...]) -> str:
    return (
        f"PodDisruptionBudget {', '.join(budgets)} selects this job's pods besides its own: with "
        "two, every eviction is refused, so that drains wait for ever; narrow its selector, or "
        "change the labels in spec.podTemplate.metadata"
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
    told = [*ring.warnings, *_unlabelled(pods, neighbor.topology_key)]
    return f"{'; '.join(told)} (spec.checkpoint.neighbor.topologyKey)" if told else ""


def _unlabelled(pods: list[PodState], key: str) -> list[str]:
    """Nodes of which nobody knows what fails with them, where the others or a person name it."""
    without = sorted({pod.node for pod in pods if not pod.domain})
    all_without = len(without) == len({pod.node for pod in pods})
    if not without or (all_without and key == DEFAULT_TOPOLOGY_KEY):
        return []
    named = ", ".join(without[:_NAMED_NODES])
    return [f"nodes without the label {key}: {named}: what fails together is not known of them"]


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
