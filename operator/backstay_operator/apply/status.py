"""`status` of a TrainingJob: what people and schedulers read, and what is persisted. Pure.

Small on purpose: per tier, never per rank, but for the few that lag.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backstay_operator.apply.conditions import merged, shortened
from backstay_operator.cluster import Tree
from backstay_operator.decide import Condition, Observed, Plan
from backstay_operator.persisted import write_record
from backstay_operator.times import text_of
from backstay_protocol.ids import attempt_for_people
from backstay_protocol.messages import JobView, LastWord, TierState

MOST_LAGGING = 10
MOST_RECOVERIES = 10
_MESSAGE = 1024
_KEPT = (
    *("step", "durableStep", "durableTime", "restarts", "attempt", "attemptName", "tiers"),
    *("lastRestore", "recoveries"),
)
"""What stays as it was while the leader says nothing."""


def build_status(
    tree: Tree,
    observed: Observed,
    plan: Plan,
    view: JobView | None,
    told: Iterable[Condition],
    *,
    ready: int,
    now: float,
) -> dict[str, Any]:
    """The whole status of a job whose spec could be read. `ready`: replicas that are up."""
    job, old = observed.job, tree.get("status") or {}
    status: dict[str, Any] = {name: old[name] for name in _KEPT if name in old}
    status |= {
        "observedGeneration": _generation(tree),
        "conditions": merged(
            old.get("conditions") or [], told, generation=_generation(tree), now=now
        ),
        "run": job.run,
        "replicas": sum(not pod.finished or not pod.failed for pod in observed.pods),
        "ready": f"{ready}/{job.spec.replicas}",
        "reason": plan.record.outcome_reason or plan.reason,
        "generations": write_record(plan.record),
    }
    status.setdefault("restarts", 0)
    status.setdefault("step", 0)
    if view is not None:
        status |= _of_leader(view, old, plan.record.first_generation, now)
    elif observed.last_word is not None:
        status |= _of_last_word(observed.last_word, old, now)
    return status


def refused_status(
    tree: Tree, told: Iterable[Condition], reason: str, now: float
) -> dict[str, Any]:
    """The status of a job whose spec is refused: all that was known of it stays."""
    old = dict(tree.get("status") or {})
    generation = _generation(tree)
    conditions = merged(old.get("conditions") or [], told, generation=generation, now=now)
    return old | {"observedGeneration": generation, "conditions": conditions, "reason": reason}


def _generation(tree: Tree) -> int:
    return int(tree["metadata"].get("generation") or 0)


def _of_leader(view: JobView, old: Tree, first_generation: int, now: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tiers": {tier.tier: _tier(tier, now) for tier in view.tiers},
        "lagging": lagging(view, now),
    }
    if view.step > 0:  # a leader that knows of no rank yet, or of none any more, says 0
        found["step"] = view.step
    if view.attempt:
        found["attempt"] = view.attempt
        found["attemptName"] = attempt_for_people(view.attempt, first_generation)
    durable = view.newest_durable
    if durable is not None and durable.step != old.get("durableStep"):
        times = [t.newest_time for t in view.tiers if t.newest == durable and t.newest_time]
        found |= {"durableStep": durable.step, "durableTime": text_of(max(times, default=now))}
    return found


def _of_last_word(word: LastWord, old: Tree, now: float) -> dict[str, Any]:
    """Pods that end make one common save, which the leader may not live to tell of."""
    found: dict[str, Any] = {}
    if word.newest_step > int(old.get("step") or 0):
        found["step"] = word.newest_step
    if word.durable_step > int(old.get("durableStep", -1)):
        found |= {"durableStep": word.durable_step, "durableTime": text_of(now)}
    return found


def _tier(tier: TierState, now: float) -> dict[str, Any]:
    tree: dict[str, Any] = {"ok": tier.ok}
    if tier.newest is not None:
        tree["step"] = tier.newest.step
        if tier.newest_time:
            tree["ageSeconds"] = round(max(0.0, now - tier.newest_time))
    if tier.message and not tier.ok:
        tree["message"] = shortened(tier.message, _MESSAGE)
    return tree


def lagging(view: JobView, now: float) -> list[dict[str, Any]]:
    """Ranks behind the foremost by more than one step, the last first."""
    ranks = [(rank, replica.replica) for replica in view.replicas for rank in replica.ranks]
    foremost = max((rank.step for rank, _ in ranks), default=0)
    behind = sorted(
        ((rank, replica) for rank, replica in ranks if foremost - rank.step > 1),
        key=lambda pair: (pair[0].step, pair[0].rank),
    )
    return [
        {
            "rank": rank.rank,
            "replica": replica,
            "step": rank.step,
            "ageSeconds": round(max(0.0, now - rank.step_time), 1) if rank.step_time else 0,
        }
        for rank, replica in behind[:MOST_LAGGING]
    ]
