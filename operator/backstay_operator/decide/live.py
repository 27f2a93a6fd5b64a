"""What a leader that runs is to be told: schedules and retention of the manifest, and where its
pods run.

Pure; called by a pass, which sends it where the leader shows something else.
"""

from __future__ import annotations

from backstay_operator.api.job import CheckpointSpec
from backstay_operator.decide.observed import Observed
from backstay_operator.manifests import build_policy
from backstay_protocol.messages import Placement, Policy


def policy_change(checkpoint: CheckpointSpec, shown: Policy) -> Policy | None:
    """None: the leader goes by the manifest. Tiers that it does not have wait for new pods."""
    manifest = build_policy(checkpoint)
    tiers = {
        name: tier
        for name, tier in manifest.tiers.items()
        if name in shown.tiers and shown.tiers[name] != tier
    }
    if not tiers:
        return None
    return Policy(every_steps=manifest.every_steps, tiers=tiers)


def placement_of(observed: Observed) -> Placement | None:
    """None: neighbours don't ask for it, or not every pod has its node yet."""
    pods = observed.currents
    if observed.job.spec.checkpoint.neighbor is None or not any(pod.domain for pod in pods):
        return None
    if len(pods) < observed.job.spec.replicas or not all(pod.node for pod in pods):
        return None
    return Placement(
        nodes={pod.replica: pod.node for pod in pods},
        domains={pod.replica: pod.domain for pod in pods if pod.domain},
    )
