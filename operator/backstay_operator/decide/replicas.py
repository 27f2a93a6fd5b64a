"""Which pods a job needs now. A list of small checks; the first that has something to do wins.

Generations: the first pods share the job's creation time in seconds; every replaced pod gets a
number of its own above all before, in a record that is persisted before the pod is created.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from backstay_operator.api import names
from backstay_operator.api.job import CLEAN_ALL, CLEAN_NONE, EPHEMERAL
from backstay_operator.decide.case import Case, Check, delete, may_delete
from backstay_operator.decide.conditions import REMOTE_REASONS
from backstay_operator.decide.observed import (
    JobRecord,
    Observed,
    PodRecord,
    PodState,
)
from backstay_operator.decide.plan import (
    Action,
    CreateFlushPod,
    CreatePod,
    DeleteJob,
    DeletePod,
    Flush,
    Outcome,
    Plan,
)
from backstay_operator.decide.renewal import (
    goes_by_another_token,
    is_outdated,
    leader_has_not_heard_of_the_choice,
)
from backstay_operator.decide.steady import how_it_stands
from backstay_operator.decide.stuck import why_hung
from backstay_operator.manifests.topology import pod_identity
from backstay_operator.settings import RestartSettings
from backstay_protocol.ids import generation_of
from backstay_protocol.messages import LastWord
from backstay_protocol.round_events import REMOTE_AWAY, STOOD_DOWN

_EVICTIONS = (
    "Evicted",
    "TerminationByKubelet",
    "EvictionByEvictionAPI",
    "PreemptionByScheduler",
    "DeletionByTaintManager",
)
"""Why a pod failed, where somebody ended it (conditions of type DisruptionTarget)."""
_NO_LIBRARY = re.compile(r"No module named '?backstay\b")


def decide(observed: Observed, now: float, settings: RestartSettings) -> Plan:
    """What to do. `now`: seconds since the epoch."""
    record = observed.record
    if record is None:
        first = int(now)
        record = JobRecord(first_generation=first, generation=first)
    record = _noted(observed, record)
    observed, kept = _without_kept(observed, record)
    case = Case(observed, record, now, settings)
    plans = (check(case) for check in _CHECKS)
    plan = next((plan for plan in plans if plan is not None), None) or _steady(case)
    strays = (*_stray_deletions(observed, plan), *_kept_no_more(observed, kept, plan))
    return replace(plan, actions=(*strays, *plan.actions))


def _without_kept(observed: Observed, record: JobRecord) -> tuple[Observed, tuple[PodState, ...]]:
    """The last pod of each replica that failed and was replaced stays for its logs, and counts for
    nothing: what is decided is decided without it.
    """
    named = set(record.generations.items())
    kept = tuple(p for p in _last_failed(observed) if (p.replica, p.generation) not in named)
    return replace(observed, pods=tuple(p for p in observed.pods if p not in kept)), kept


def _last_failed(observed: Observed) -> list[PodState]:
    last: dict[int, PodState] = {}
    if _ties_disks(observed):
        return []
    for pod in sorted(observed.pods, key=lambda pod: pod.generation):
        if _keeps_logs(pod) and pod.replica < observed.job.spec.replicas:
            last[pod.replica] = pod
    return list(last.values())


def _keeps_logs(pod: PodState) -> bool:
    """Whether it failed as a whole and its node still has what it said."""
    return bool(pod.failed) and pod.finished and pod.node_alive and not pod.terminating


def _ties_disks(observed: Observed) -> bool:
    """Whether a disk lives as long as the pod's object: kept, it would lie where the next one, with
    a disk of its own, finds no room or no quota.
    """
    spec = observed.job.spec
    local, volumes = spec.checkpoint.local, spec.pod_template["spec"].get("volumes") or ()
    own = any(volume.get("ephemeral") for volume in volumes)
    return own or (local is not None and local.volume == EPHEMERAL)


def _kept_no_more(observed: Observed, kept: tuple[PodState, ...], plan: Plan) -> tuple[Action, ...]:
    spec = observed.job.spec
    if not spec.suspend and not (plan.record.outcome and spec.cleanup_pod_policy == CLEAN_ALL):
        return ()
    return tuple(delete(pod, "its logs are kept no longer", graceful=True) for pod in kept)


def _noted(observed: Observed, record: JobRecord) -> JobRecord:
    """What can be seen of the recorded pods goes into the record, whatever is decided."""
    pods = {}
    for replica, known in record.pods.items():
        pod = observed.current(replica)
        if pod is None and replica >= observed.job.spec.replicas:
            continue  # the job has shrunk, and its pod is gone
        if pod is not None and pod.node:
            known = replace(known, node=pod.node)
        pods[replica] = known
    leader, safe = observed.leader, record.safe_end
    if leader is not None:  # its sidecar ends soon after the last trainer: this must outlive it
        safe = leader.phase == "Finished" and 0 <= leader.newest_step <= leader.durable_step
    return replace(record, pods=pods, safe_end=safe)


def _stray_deletions(observed: Observed, plan: Plan) -> tuple[Action, ...]:
    """Pods that the record does not name: replaced, and not deleted when the operator ended."""
    named = {(r, pod.generation) for r, pod in plan.record.pods.items()}
    mentioned = {
        (a.replica, a.generation) for a in plan.actions if isinstance(a, DeletePod) and not a.flush
    }
    why, stays = "it was replaced", _last_failed(observed)
    return tuple(
        delete(pod, why, graceful=pod.node_alive)
        for pod in observed.pods
        if (pod.replica, pod.generation) not in named | mentioned
        and may_delete(pod)
        and pod not in stays
    )


def _is_over(case: Case) -> Plan | None:
    observed, record = case.observed, case.record
    if not record.outcome:
        return None
    actions = _clean_up(observed, f"the job has ended: {record.outcome}")
    ttl = observed.job.spec.ttl_seconds_after_finished
    if ttl is not None and record.ended_at and case.now >= record.ended_at + ttl:
        why = f"spec.ttlSecondsAfterFinished: it ended {case.now - record.ended_at:.0f} s ago"
        actions = (*actions, DeleteJob(why=why))
    return Plan(
        record=record,
        actions=actions,
        reason=record.outcome_reason,
        message=record.outcome_message,
    )


def _is_suspended(case: Case) -> Plan | None:
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


def _leader_gave_up(case: Case) -> Plan | None:
    observed = case.observed
    leader = observed.leader
    if leader is None or leader.phase != "Failed" or _all_completed(observed):
        return None
    if leader.code == STOOD_DOWN:
        return None  # that is mended: see _is_outranked
    why = leader.message or "the leader gave no reason; look into the sidecar's log of replica 0"
    reason = names.REASON_LEADER_GAVE_UP
    if leader.code == REMOTE_AWAY:
        reason = REMOTE_REASONS.get(leader.remote_code, reason)
    return _end(case, succeeded=False, reason=reason, message=why)


def _is_outranked(case: Case) -> Plan | None:
    """The leader saw a greater generation than its pods', which are the current ones all the same:
    a clock went back, or the run was somebody else's. One pod gets a number above that.

    Only where nobody else lives by that run (the leader's claim has asked the bucket for owners).
    """
    observed, record, leader = case.observed, case.record, case.observed.leader
    if leader is None or leader.phase != "Failed" or leader.code != STOOD_DOWN:
        return None
    above = generation_of(leader.outranked_by)
    if observed.run_users or record.generation > above:
        return None  # never outbid; or a pod with such a number is on its way
    replica = observed.job.spec.replicas - 1
    pod = observed.current(replica)
    if pod is None:
        return None
    why = f"a pod with a greater generation takes the run over: {leader.message}"
    plan = _create(
        replace(record, generation=above),
        [replica],
        names.REASON_OUTRANKED,
        why,
        {replica: pod.node} if pod.node_alive else {},
    )
    return replace(plan, actions=(delete(pod, why, graceful=pod.node_alive), *plan.actions))


def _dies_early(case: Case) -> Plan | None:
    observed = case.observed
    if observed.early_deaths < case.settings.early_deaths:
        return None
    words = observed.early_death_words or "a container of every start ends at once"
    message = f"{words} ({observed.early_deaths} times in a row)"
    if _NO_LIBRARY.search(words):
        message += "; put the library into the image: pip install 'backstay[trainer]'"
        return _end(case, succeeded=False, reason=names.REASON_LIBRARY_MISSING, message=message)
    return _end(case, succeeded=False, reason=names.REASON_EARLY_DEATHS, message=message)


def _has_completed(case: Case) -> Plan | None:
    """Succeeded only when the last checkpoint is durable, or after a stated deadline (invariant 6).

    Until then the pods stay: their sidecars go on bringing it out.
    """
    observed, record = case.observed, case.record
    if not _all_completed(observed):
        return None
    if observed.job.spec.checkpoint.remote is None:
        kept = "no remote tier is configured, so nothing is durable"
        return _succeed(case, names.REASON_ALL_COMPLETED, f"all replicas completed; {kept}")
    last_word = _kept(observed)
    if record.safe_end or (last_word is not None and last_word.safe):
        step = f", step {last_word.durable_step}," if last_word is not None else ""
        last = f"the last checkpoint{step} is durable"
        return _succeed(case, names.REASON_ALL_COMPLETED, f"all replicas completed; {last}")
    completed_at = max(p.trainer.ended.at for p in observed.currents if p.trainer.ended)
    limit = case.settings.flush_seconds
    if case.now < completed_at + limit and _may_become_durable(observed):
        message = f"all replicas completed; waiting up to {limit:g} s until the last is durable"
        flushing = _flush_pods(case)
        if flushing is not None:
            return replace(flushing, message=f"{message}: {flushing.message}")
        return Plan(record=record, reason=names.REASON_NOT_DURABLE, message=message)
    waited = max(0.0, case.now - completed_at)
    message = (
        f"all replicas completed, but {waited:.0f} s later the last checkpoint is not known to be "
        "durable"
    )
    return _succeed(case, names.REASON_NOT_DURABLE, message)


def _kept(observed: Observed) -> LastWord | None:
    """The leader's word while it lives, else what the sidecars said as they ended."""
    leader = observed.leader
    if leader is not None:
        return LastWord(newest_step=leader.newest_step, durable_step=leader.durable_step)
    return observed.last_word


def _may_become_durable(observed: Observed) -> bool:
    """While a sidecar lives, or its node's disk holds what a flush pod can bring out."""
    if not all(pod.finished for pod in observed.currents):
        return True
    return observed.job.spec.checkpoint.local is not None


def _flush_pods(case: Case) -> Plan | None:
    """Sidecars end soon after the last trainer; what is left then others bring out."""
    observed, record = case.observed, case.record
    pods = observed.currents
    if not all(pod.finished for pod in pods):
        return None
    there = {pod.replica for pod in observed.flush_pods}
    missing = [pod for pod in pods if pod.replica not in there and pod.node_alive]
    why = "the pods ended before their last checkpoint was known to be durable"
    generations = record.generations
    actions = tuple(
        CreateFlushPod(
            identity=pod_identity(pod.replica, generations, record.pods[pod.replica].replaces),
            node=pod.node,
            why=why,
        )
        for pod in missing
    )
    since = record.flush_since or case.now
    return Plan(
        record=replace(record, flush_since=since),
        actions=actions,
        reason=names.REASON_NOT_DURABLE,
        message=f"{len(pods)} flush pods bring it out",
    )


def _needs_first_pods(case: Case) -> Plan | None:
    observed, record = case.observed, case.record
    missing = [r for r in range(observed.job.spec.replicas) if r not in record.pods]
    if not missing:
        return None
    if record.pods:  # the job grew: newcomers are replaced pods of nobody, each with its own number
        return _create(record, missing, names.REASON_FIRST_PODS, "the job has grown")
    new = replace(record, pods={r: PodRecord(generation=record.generation) for r in missing})
    return _creations(new, missing, names.REASON_FIRST_PODS, "first pods of the job", {})


def _creation_unfinished(case: Case) -> Plan | None:
    observed, record = case.observed, case.record
    unfinished = [
        replica
        for replica, pod in sorted(record.pods.items())
        if not pod.created and observed.current(replica) is None
    ]
    if not unfinished:
        return None
    reason, why = names.REASON_CREATION_UNFINISHED, "an earlier creation was interrupted"
    if observed.troubles:  # it was refused: say so for as long as it is
        reason, why = observed.troubles[0].reason, observed.troubles[0].message
    near = {r: record.pods[r].node for r in unfinished if record.pods[r].node}
    return _creations(record, unfinished, reason, why, near)


def _has_lost_pods(case: Case) -> Plan | None:
    observed, record = case.observed, case.record
    lost = {r: why for r in sorted(record.pods) if (why := _why_lost(observed, r, case.now))}
    if not lost:
        return None
    deletions: list[Action] = []
    stays = _last_failed(observed)
    for replica in lost:
        pod = observed.current(replica)
        if pod is not None and pod not in stays:
            heeds = pod.node_alive and not _stuck(observed, pod, case.now)
            deletions.append(delete(pod, lost[replica], graceful=heeds))
    near = {r: node for r in lost if (node := _old_disk(observed, record, r))}
    reason = _reason_lost(observed, next(iter(lost)), case.now)
    plan = _create(record, list(lost), reason, "; ".join(lost.values()), near, lost)
    return replace(plan, actions=(*deletions, *plan.actions))


def _old_disk(observed: Observed, record: JobRecord, replica: int) -> str:
    """Node with the replica's disk, as far as it is known to live."""
    pod = observed.current(replica)
    if pod is not None:
        return pod.node if pod.node_alive else ""
    return record.pods[replica].node


def _why_lost(observed: Observed, replica: int, now: float) -> str:
    pod = observed.current(replica)
    if pod is None:
        return f"the pod of replica {replica} is gone"
    if not pod.node_alive:
        return f"node {pod.node} of replica {replica} is lost: {pod.node_why or 'no answer'}"
    if pod.failed:
        return f"the pod of replica {replica} failed: {pod.failed}"
    return _stuck(observed, pod, now)


def _stuck(observed: Observed, pod: PodState, now: float) -> str:
    return why_hung(observed, pod, now)


def _reason_lost(observed: Observed, replica: int, now: float) -> str:
    pod = observed.current(replica)
    if pod is None:
        return names.REASON_POD_GONE
    if _stuck(observed, pod, now):
        return names.REASON_HANG
    if not pod.node_alive:
        return names.REASON_NODE_LOST
    return names.REASON_EVICTED if pod.failed.startswith(_EVICTIONS) else names.REASON_POD_FAILED


def _failed_after_end(case: Case) -> Plan | None:
    """A replica that completed can't help a peer that failed later: it must run once more."""
    observed, record = case.observed, case.record
    completed = [p for p in observed.currents if p.trainer.completed]
    failed = [p for p in observed.currents if p.trainer.failed]
    if not completed or not failed:
        return None
    why = f"replica {failed[0].replica} failed after replica {completed[0].replica} had completed"
    deletions = tuple(delete(pod, why, graceful=True) for pod in completed)
    near = {pod.replica: pod.node for pod in completed}
    replicas = [pod.replica for pod in completed]
    plan = _create(record, replicas, names.REASON_PEER_FAILED_AFTER_END, why, near)
    return replace(plan, actions=(*deletions, *plan.actions))


def _is_draining(case: Case) -> Plan | None:
    """A node is being emptied: one common save, brought out, then its pods are deleted by us."""
    observed, record = case.observed, case.record
    leaving = [pod for pod in observed.currents if pod.drain and not pod.terminating]
    if not leaving:
        return None
    since, hold = record.drain_since or case.now, observed.job.spec.drain_hold_seconds
    record = replace(record, drain_since=since)
    nodes = ", ".join(sorted({f"{pod.node} ({pod.drain})" for pod in leaving}))
    flushed = observed.flushed
    done = flushed is not None and flushed.durable and flushed.asked_at >= since
    if not done and case.now - since < hold:
        said = flushed.message if flushed is not None and flushed.message else "saving"
        message = f"being emptied: {nodes}; {said}; held for at most {hold} s"
        actions: tuple[Action, ...] = (Flush(since=since, why=f"being emptied: {nodes}"),)
        return Plan(record=record, actions=actions, reason=names.REASON_DRAINING, message=message)
    if done and flushed is not None:
        reason, message = names.REASON_DRAINING, f"step {flushed.step} is safe; leaving {nodes}"
    else:
        message = f"not all was safe within {hold} s; leaving {nodes} nevertheless"
        reason = names.REASON_DRAIN_TOO_SLOW
    deletions = tuple(delete(pod, message, graceful=True) for pod in leaving)
    return Plan(record=record, actions=deletions, reason=reason, message=message)


_CHECKS: tuple[Check, ...] = (
    _is_over,
    _is_suspended,
    _leader_gave_up,
    _dies_early,
    _has_completed,
    is_outdated,
    goes_by_another_token,
    leader_has_not_heard_of_the_choice,
    _needs_first_pods,
    _creation_unfinished,
    _has_lost_pods,
    _is_outranked,
    _failed_after_end,
    _is_draining,
)


def _steady(case: Case) -> Plan:
    observed, record = case.observed, case.record
    pods = {
        replica: replace(pod, created=pod.created or observed.current(replica) is not None)
        for replica, pod in record.pods.items()
    }
    drained = not any(pod.drain for pod in observed.currents)
    record = replace(record, pods=pods, drain_since=0.0 if drained else record.drain_since)
    reason, message = how_it_stands(observed, case.now)
    return Plan(record=record, reason=reason, message=message)


# --- pieces of plans -------------------------------------------------------------------------


def _all_completed(observed: Observed) -> bool:
    pods = observed.currents
    return len(pods) == observed.job.spec.replicas and all(p.trainer.completed for p in pods)


def _delete_all(observed: Observed, why: str) -> tuple[Action, ...]:
    pods = tuple(
        delete(pod, why, graceful=pod.node_alive) for pod in observed.pods if may_delete(pod)
    )
    return (*pods, *_delete_flush_pods(observed, why))


def _delete_flush_pods(observed: Observed, why: str) -> tuple[Action, ...]:
    return tuple(
        DeletePod(
            replica=pod.replica,
            generation=pod.generation,
            graceful=pod.node_alive,
            why=why,
            flush=True,
        )
        for pod in observed.flush_pods
        if may_delete(pod)
    )


def _clean_up(observed: Observed, why: str) -> tuple[Action, ...]:
    """Which pods an end leaves behind is spec.cleanupPodPolicy's to say."""
    policy = observed.job.spec.cleanup_pod_policy
    if policy == CLEAN_ALL:
        return _delete_all(observed, why)
    ended = [
        pod for pod in observed.pods if pod.finished or pod.ends_itself or policy == CLEAN_NONE
    ]
    return tuple(
        action
        for action in _delete_all(observed, why)
        if isinstance(action, DeletePod)
        and (action.flush or all(_differs(action, pod) for pod in ended))
    )


def _differs(action: DeletePod, pod: PodState) -> bool:
    return (action.replica, action.generation) != (pod.replica, pod.generation)


def _succeed(case: Case, reason: str, message: str) -> Plan:
    return _end(case, succeeded=True, reason=reason, message=message)


def _end(case: Case, *, succeeded: bool, reason: str, message: str) -> Plan:
    observed, record = case.observed, case.record
    record = replace(
        record,
        ended_at=case.now,
        outcome=names.SUCCEEDED if succeeded else names.FAILED,
        outcome_reason=reason,
        outcome_message=message,
    )
    return Plan(
        record=record,
        actions=_clean_up(observed, "the job has ended"),
        reason=reason,
        message=message,
        outcome=Outcome(succeeded=succeeded, reason=reason, message=message),
    )


def _create(
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
        pod = PodRecord(
            generation=record.generation + 1,
            replaces=old.generation if old else 0,
            node=(near or {}).get(replica, ""),
        )
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
