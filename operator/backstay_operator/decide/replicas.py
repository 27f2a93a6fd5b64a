"""Which pods a job needs now. A list of small checks; the first that has something to do wins.

Generations: the first pods share the job's creation time in seconds; every replaced pod gets a
number of its own above all before, in a record that is persisted before the pod is created (DESIGN
section 4, Numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from backstay_operator.api import names
from backstay_operator.decide.observed import JobRecord, Observed, PodRecord, PodState
from backstay_operator.decide.plan import Action, CreatePod, DeletePod, Outcome, Plan
from backstay_operator.manifests.topology import pod_identity
from backstay_operator.settings import RestartSettings


@dataclass(frozen=True)
class _Case:
    observed: Observed
    record: JobRecord
    now: float
    settings: RestartSettings


_Check = Callable[[_Case], Plan | None]


def decide(observed: Observed, now: float, settings: RestartSettings) -> Plan:
    """What to do. `now`: seconds since the epoch."""
    record = observed.record
    if record is None:
        first = int(now)
        record = JobRecord(first_generation=first, generation=first)
    case = _Case(observed, record, now, settings)
    for check in _CHECKS:
        plan = check(case)
        if plan is not None:
            return plan
    return _steady(observed, record)


def _is_over(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    if not record.outcome:
        return None
    return Plan(
        record=record,
        actions=_delete_all(observed, f"the job has ended: {record.outcome}"),
        reason=record.outcome_reason,
        message=record.outcome_message,
    )


def _is_suspended(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    if not observed.job.spec.suspend:
        return None
    message = "spec.suspend is true: no pods; set it to false to go on from the last checkpoint"
    return Plan(
        record=record,
        actions=_delete_all(observed, "spec.suspend is true"),
        reason=names.REASON_SUSPENDED,
        message=message,
    )


def _leader_gave_up(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    leader = observed.leader
    if leader is None or leader.phase != "Failed" or _all_completed(observed):
        return None
    why = leader.message or "the leader gave no reason; look into the sidecar's log of replica 0"
    return _end(observed, record, succeeded=False, reason=names.REASON_LEADER_GAVE_UP, message=why)


def _dies_early(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    if observed.early_deaths < case.settings.early_deaths:
        return None
    words = observed.early_death_words or "a container of every start ends at once"
    message = f"{words} ({observed.early_deaths} times in a row)"
    return _end(
        observed, record, succeeded=False, reason=names.REASON_EARLY_DEATHS, message=message
    )


def _has_completed(case: _Case) -> Plan | None:
    """Succeeded only when the last checkpoint is durable, or after a stated deadline (invariant 6).

    Until then the pods stay: their sidecars go on bringing it out.
    """
    observed, record = case.observed, case.record
    if not _all_completed(observed):
        return None
    if observed.job.spec.checkpoint.remote is None:
        kept = "no remote tier is configured, so nothing is durable"
        return _succeed(case, names.REASON_ALL_COMPLETED, f"all replicas completed; {kept}")
    leader = observed.leader
    if leader is not None and leader.durable_step >= leader.newest_step:
        kept = f"the last checkpoint, step {leader.durable_step}, is durable"
        return _succeed(case, names.REASON_ALL_COMPLETED, f"all replicas completed; {kept}")
    completed_at = max(p.trainer.ended.at for p in _currents(observed) if p.trainer.ended)
    limit = case.settings.flush_seconds
    if case.now < completed_at + limit:
        message = f"all replicas completed; waiting up to {limit:g} s until the last is durable"
        return Plan(record=record, reason=names.REASON_NOT_DURABLE, message=message)
    message = (
        f"all replicas completed, but {limit:g} s later the last checkpoint is not known to be "
        "durable"
    )
    return _succeed(case, names.REASON_NOT_DURABLE, message)


def _needs_first_pods(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    missing = [r for r in range(observed.job.spec.replicas) if r not in record.pods]
    if not missing:
        return None
    if record.pods:  # the job grew: newcomers are replaced pods of nobody, each with its own number
        return _create(observed, record, missing, names.REASON_FIRST_PODS, "the job has grown")
    new = replace(record, pods={r: PodRecord(generation=record.generation) for r in missing})
    return _creations(new, missing, names.REASON_FIRST_PODS, "first pods of the job", {})


def _creation_unfinished(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    unfinished = [
        replica
        for replica, pod in sorted(record.pods.items())
        if not pod.created and observed.current(replica) is None
    ]
    if not unfinished:
        return None
    why = "an earlier creation was interrupted"
    return _creations(record, unfinished, names.REASON_CREATION_UNFINISHED, why, {})


def _has_lost_pods(case: _Case) -> Plan | None:
    observed, record = case.observed, case.record
    lost = {r: why for r in sorted(record.pods) if (why := _why_lost(observed, r))}
    if not lost:
        return None
    deletions: list[Action] = []
    for replica in lost:
        pod = observed.current(replica)
        if pod is not None:
            deletions.append(_delete(pod, lost[replica], graceful=pod.node_alive))
    near = {r: p.node for r in lost if (p := observed.current(r)) and p.node_alive}
    reason = _reason_lost(observed, next(iter(lost)))
    plan = _create(observed, record, list(lost), reason, "; ".join(lost.values()), near, lost)
    return replace(plan, actions=(*deletions, *plan.actions))


def _why_lost(observed: Observed, replica: int) -> str:
    pod = observed.current(replica)
    if pod is None:
        return f"the pod of replica {replica} is gone"
    if not pod.node_alive:
        return f"node {pod.node} of replica {replica} is lost: {pod.node_why or 'no answer'}"
    if pod.failed:
        return f"the pod of replica {replica} failed: {pod.failed}"
    return ""


def _reason_lost(observed: Observed, replica: int) -> str:
    pod = observed.current(replica)
    if pod is None:
        return names.REASON_POD_GONE
    return names.REASON_POD_FAILED if pod.node_alive else names.REASON_NODE_LOST


def _failed_after_end(case: _Case) -> Plan | None:
    """A replica that completed can't help a peer that failed later: it must run once more."""
    observed, record = case.observed, case.record
    completed = [p for p in _currents(observed) if p.trainer.completed]
    failed = [p for p in _currents(observed) if p.trainer.failed]
    if not completed or not failed:
        return None
    why = f"replica {failed[0].replica} failed after replica {completed[0].replica} had completed"
    deletions = tuple(_delete(pod, why, graceful=True) for pod in completed)
    near = {pod.replica: pod.node for pod in completed}
    replicas = [pod.replica for pod in completed]
    plan = _create(observed, record, replicas, names.REASON_PEER_FAILED_AFTER_END, why, near)
    return replace(plan, actions=(*deletions, *plan.actions))


_CHECKS: tuple[_Check, ...] = (
    _is_over,
    _is_suspended,
    _leader_gave_up,
    _dies_early,
    _has_completed,
    _needs_first_pods,
    _creation_unfinished,
    _has_lost_pods,
    _failed_after_end,
)


def _steady(observed: Observed, record: JobRecord) -> Plan:
    leader = observed.leader
    pods = {
        replica: replace(pod, created=pod.created or observed.current(replica) is not None)
        for replica, pod in record.pods.items()
    }
    record = replace(record, pods=pods)
    if leader is not None and leader.phase == "Training":
        message = f"all replicas train, attempt {leader.attempt}, step {leader.step}"
        return Plan(record=record, reason=names.REASON_ALL_TRAINING, message=message)
    message = leader.message if leader is not None and leader.message else "waiting for replicas"
    return Plan(record=record, reason=names.REASON_WAITING, message=message)


# --- pieces of plans -------------------------------------------------------------------------


def _currents(observed: Observed) -> list[PodState]:
    replicas = range(observed.job.spec.replicas)
    return [pod for r in replicas if (pod := observed.current(r)) is not None]


def _all_completed(observed: Observed) -> bool:
    pods = _currents(observed)
    return len(pods) == observed.job.spec.replicas and all(p.trainer.completed for p in pods)


def _delete(pod: PodState, why: str, *, graceful: bool) -> DeletePod:
    return DeletePod(replica=pod.replica, generation=pod.generation, graceful=graceful, why=why)


def _delete_all(observed: Observed, why: str) -> tuple[Action, ...]:
    return tuple(_delete(pod, why, graceful=pod.node_alive) for pod in observed.pods)


def _succeed(case: _Case, reason: str, message: str) -> Plan:
    return _end(case.observed, case.record, succeeded=True, reason=reason, message=message)


def _end(
    observed: Observed, record: JobRecord, *, succeeded: bool, reason: str, message: str
) -> Plan:
    record = replace(
        record,
        outcome=names.SUCCEEDED if succeeded else names.FAILED,
        outcome_reason=reason,
        outcome_message=message,
    )
    return Plan(
        record=record,
        actions=_delete_all(observed, "the job has ended"),
        reason=reason,
        message=message,
        outcome=Outcome(succeeded=succeeded, reason=reason, message=message),
    )


def _create(
    observed: Observed,
    record: JobRecord,
    replicas: Iterable[int],
    reason: str,
    message: str,
    near: dict[int, str] | None = None,
    whys: dict[int, str] | None = None,
) -> Plan:
    """Raise the generation once for each of these pods, then create them."""
    replicas = list(replicas)
    for replica in replicas:
        old = record.pods.get(replica)
        pod = PodRecord(generation=record.generation + 1, replaces=old.generation if old else 0)
        record = replace(record.with_pod(replica, pod), generation=pod.generation)
    return _creations(record, replicas, reason, message, near or {}, whys)


def _creations(
    record: JobRecord,
    replicas: Iterable[int],
    reason: str,
    message: str,
    near: dict[int, str],
    whys: dict[int, str] | None = None,
) -> Plan:
    generations = record.generations
    actions = tuple(
        CreatePod(
            identity=pod_identity(replica, generations, record.pods[replica].replaces),
            near_node=near.get(replica, ""),
            why=(whys or {}).get(replica, message),
        )
        for replica in replicas
    )
    return Plan(record=record, actions=actions, reason=reason, message=message)
