"""A job of whose pods nothing is to be done: whether it trains, or what it waits for. Pure.

Asked last by `replicas.decide`. READY counts pods that run; that a job waits all the same, and for
what, is said here, in the reason that people see first.
"""

from __future__ import annotations

from backstay_operator.api import names
from backstay_operator.decide.conditions import REMOTE_REASONS
from backstay_operator.decide.observed import LeaderFacts, Observed, PodState, Trouble

QUIET_SECONDS = 15.0
QUIET_STEPS = 5.0
"""Nobody is called quiet before both have passed: so many seconds, and so many usual steps."""
LIBRARY_SECONDS = 120.0
"""A trainer that has run for so long and never spoke to its sidecar may not have the library."""
_NAMED = 8

Said = tuple[str, str]
"""(reason, message)."""


def how_it_stands(observed: Observed, now: float) -> Said:
    """Reason and message of a job for which nothing is to be done."""
    leader, trouble = observed.leader, first_trouble(observed)
    if leader is None:
        if trouble is not None:
            return trouble.reason, trouble.message
        return names.REASON_WAITING, _without_leader(observed)
    if leader.phase == "Training":
        return _in_training(observed, leader, trouble)
    if trouble is not None:
        return trouble.reason, trouble.message
    if leader.phase == "Restoring":
        reason = REMOTE_REASONS.get(leader.remote_code, names.REASON_RESTORING)
        return reason, leader.message or "the ranks restore"
    if leader.phase == "Finished":
        return names.REASON_FINISHING, leader.message or "all ranks have come to their end"
    if leader.phase == "Failed":
        return _outranked(observed, leader)
    return _in_joining(observed, leader, now)


def first_trouble(observed: Observed) -> Trouble | None:
    """The first thing that keeps pods from coming up; what was refused comes first."""
    if observed.troubles:
        return observed.troubles[0]
    return next((p.trouble for p in observed.currents if p.trouble is not None), None)


def _without_leader(observed: Observed) -> str:
    pods = _not_running(observed)
    if pods:
        return f"waiting for the pods of {_replicas(pods)} to run"
    return "pods run, but the leader (the sidecar of replica 0) does not answer"


def _in_training(observed: Observed, leader: LeaderFacts, trouble: Trouble | None) -> Said:
    down = [p for p in observed.currents if not p.trainer.running and not p.trainer.completed]
    if down:
        said = trouble.message if trouble is not None else "they start again"
        reason = trouble.reason if trouble is not None else names.REASON_WAITING_FOR_RANKS
        return reason, f"the trainers of {_replicas([p.replica for p in down])} are down: {said}"
    anew = [p.replica for p in observed.currents if _is_anew(p, leader)]
    if anew:
        text = f"the trainers of {_replicas(anew)} have started again and not called restore() yet"
        return names.REASON_WAITING_FOR_RANKS, text
    quiet, limit = leader.quiet_seconds, max(QUIET_SECONDS, QUIET_STEPS * leader.step_seconds)
    if quiet > limit:
        about = int(quiet // 10 * 10)
        usual = f" (usual: {leader.step_seconds:.3g} s)" if leader.step_seconds else ""
        text = (
            f"no rank has made a step for {about} s{usual}, the last was {leader.step}: they start "
            "again, do something else between steps, or hang (spec.hangSeconds)"
        )
        return names.REASON_NO_STEPS, text
    text = f"all replicas train, attempt {leader.attempt}, step {leader.step}"
    return names.REASON_ALL_TRAINING, text


def _is_anew(pod: PodState, leader: LeaderFacts) -> bool:
    """Whether its trainer is younger than the last step that is known of its ranks."""
    step_at = leader.last_steps.get(pod.replica, 0.0)
    return pod.trainer.running and 0.0 < step_at < pod.trainer.started_at


def _in_joining(observed: Observed, leader: LeaderFacts, now: float) -> Said:
    pods = _not_running(observed)
    if pods:
        return (
            names.REASON_WAITING,
            f"waiting for the pods of {_replicas(pods)} to run; {leader.message}",
        )
    mute = [
        pod.replica
        for pod in observed.currents
        if pod.trainer.running
        and now - pod.trainer.started_at >= LIBRARY_SECONDS
        and pod.replica in leader.heard - leader.spoken
    ]
    if mute:
        return names.REASON_LIBRARY_MISSING, library_missing(_replicas(mute))
    return (
        names.REASON_WAITING_FOR_RANKS,
        f"pods run, but their ranks do not train: {leader.message}",
    )


def library_missing(who: str) -> str:
    """`who`: replicas, in words."""
    return (
        f"the trainers of {who} have run for {LIBRARY_SECONDS:.0f} s or longer and not spoken to "
        "their sidecars: is the backstay library in their image (pip install 'backstay[trainer]'), "
        "and does the script come to Checkpointer.restore()?"
    )


def _outranked(observed: Observed, leader: LeaderFacts) -> Said:
    """The only failure of a leader that does not end a job (replicas.py)."""
    if observed.run_users:
        users = ", ".join(observed.run_users)
        text = (
            f"the run is in use by job {users} of this namespace: give this job another "
            "spec.checkpoint.runName, or delete the other one"
        )
        return names.REASON_RUN_OWNED_ELSEWHERE, text
    return names.REASON_OUTRANKED, f"a pod with a greater generation is coming: {leader.message}"


def _not_running(observed: Observed) -> list[int]:
    running = {p.replica for p in observed.currents if p.trainer.running or p.trainer.completed}
    return [r for r in range(observed.job.spec.replicas) if r not in running]


def _replicas(which: list[int]) -> str:
    named = ", ".join(str(replica) for replica in which[:_NAMED])
    more = f" and {len(which) - _NAMED} more" if len(which) > _NAMED else ""
    return f"{'replica' if len(which) == 1 else 'replicas'} {named}{more}"
