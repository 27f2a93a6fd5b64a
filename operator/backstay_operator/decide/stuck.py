"""Whether a trainer hangs so that only its pod's end can help. Pure.

In a world that is gone: when a node vanishes, connections to it stay open for a quarter of an hour.
An agent of torchrun that waits on such a one neither starts its ranks again nor heeds a signal: no
rank of it calls restore(), the leader sees nobody wait, and the kubelet sees a container that runs.

In a world that hangs, after the leader has told one replica to leave, then another one, then all: a
process that does not even hear that is ended by its agent when the world begins again, and where it
is the container's own process, or the agent is stuck as well, by nobody but us. The pod's memory
volume goes with it, so this comes last; what was saved has long been brought out by then.
"""

from __future__ import annotations

from backstay_operator.api.job import NONE, STATIC
from backstay_operator.decide.observed import LeaderFacts, Observed, PodState

STUCK_SECONDS = 60.0
AGENT_SECONDS = 180.0
"""How long after the order for all an agent of torchrun may take to bring its ranks back: those
that it ended itself never heard the order, and look like ranks that hang until they are up."""


def why_hung(observed: Observed, pod: PodState, now: float) -> str:
    """Why the pod must be replaced though it runs; empty: it need not be."""
    stuck = why_stuck(pod, observed.current(0), observed.leader, now)
    return stuck or why_unheeded(observed, pod, now)


def why_unheeded(observed: Observed, pod: PodState, now: float) -> str:
    """Why a replica that all ways of leaving have not moved must be replaced.

    With torchrun one at a time, furthest behind first: the end of one agent lets the others go.
    """
    leader = observed.leader
    if leader is None or pod.replica not in leader.unheeded:
        return ""
    told_at = now - leader.unheeded_seconds
    if not _hangs_since(pod, told_at):
        return ""
    text = (
        f"replica {pod.replica} hangs: all were told to leave {leader.unheeded_seconds:.0f} s ago, "
        "and its ranks have not"
    )
    if observed.job.spec.launcher in (STATIC, NONE):
        return text
    hanging = [r for r in leader.unheeded if _hangs_since(observed.current(r), told_at)]
    anew = [p for p in observed.currents if p.trainer.started_at > told_at or not p.trainer.running]
    if any(now - p.trainer.started_at < AGENT_SECONDS or not p.trainer.running for p in anew):
        return ""  # one is on its way already
    late = leader.unheeded_seconds >= AGENT_SECONDS
    return text if late and hanging[0] == pod.replica else ""


def _hangs_since(pod: PodState | None, told_at: float) -> bool:
    """Whether its trainer is older than the order: one that left was started again."""
    return pod is not None and pod.trainer.running and pod.trainer.started_at <= told_at


def why_stuck(
    pod: PodState, leader_pod: PodState | None, leader: LeaderFacts | None, now: float
) -> str:
    """Why the replica must be replaced though it runs; empty: it need not be.

    Its last step is older than the leader's trainer, which has waited long enough for it.
    """
    if leader is None or leader.phase != "Joining" or leader_pod is None:
        return ""
    step_at = leader.last_steps.get(pod.replica, 0.0)
    began, anew = pod.trainer, leader_pod.trainer
    if not step_at or not began.running or began.started_at > step_at:
        return ""
    if not anew.running or anew.started_at < step_at:
        return ""
    waited = min(now - anew.started_at, now - step_at)
    if waited < STUCK_SECONDS:
        return ""
    return (
        f"replica {pod.replica} hangs in a world that is gone: its last step was "
        f"{now - step_at:.0f} s ago, and it has not come to the new world for {waited:.0f} s"
    )
