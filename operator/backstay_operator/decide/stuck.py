"""Whether a trainer hangs in a world that is gone, so that only its pod's end can help. Pure.

When a node vanishes, connections to it stay open for a quarter of an hour. An agent of torchrun
that waits on such a one neither starts its ranks again nor heeds a signal: no rank of it calls
restore(), the leader sees nobody wait, and the kubelet sees a container that runs.
"""

from __future__ import annotations

from backstay_operator.decide.observed import LeaderFacts, PodState

STUCK_SECONDS = 60.0


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
