"""The job's topology and a pod's identity, as the sidecars read them."""

from __future__ import annotations

from collections.abc import Mapping

from backstay_operator.api.job import NONE, STATIC, CheckpointSpec, TrainingJob
from backstay_operator.errors import Unbuildable
from backstay_operator.manifests.wiring import Wiring
from backstay_protocol.messages import Policy, TierPolicy
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, PORT_API, REMOTE
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    NeighborTier,
    Peer,
    PodIdentity,
    RemoteTier,
    Tiers,
    Topology,
)


def build_topology(job: TrainingJob, wiring: Wiring) -> Topology:
    """Raises Unbuildable if the job wants an embedded store and there is none."""
    spec = job.spec
    return Topology(
        namespace=job.namespace,
        job=job.name,
        run_name=spec.checkpoint.run_name,
        uid=wiring.uid,
        cluster=wiring.cluster,
        replicas=spec.replicas,
        processes_per_replica=spec.processes_per_replica,
        peers=tuple(
            Peer(replica=i, address=f"{wiring.addresses.hosts[i]}:{PORT_API}")
            for i in range(spec.replicas)
        ),
        tiers=_tiers(spec.checkpoint, wiring),
        restore=wiring.restore or spec.restore,
        hang_seconds=spec.hang_seconds,
        leave_together=spec.launcher in (STATIC, NONE),
        first_generation=wiring.first_generation,
    )


def _tiers(checkpoint: CheckpointSpec, wiring: Wiring) -> Tiers:
    local, neighbor = checkpoint.local, checkpoint.neighbor
    return Tiers(
        memory=MemoryTier(schedule=checkpoint.memory.schedule, slots=checkpoint.memory.slots),
        local=LocalTier(root=wiring.local_root, schedule=local.schedule, retention=local.retention)
        if local
        else None,
        neighbor=NeighborTier(schedule=neighbor.schedule) if neighbor else None,
        remote=_remote(checkpoint, wiring),
    )


def build_policy(checkpoint: CheckpointSpec) -> Policy:
    """Schedules and retention as the manifest has them now, for a leader that runs."""
    memory, local, neighbor, remote = (
        checkpoint.memory,
        checkpoint.local,
        checkpoint.neighbor,
        checkpoint.remote,
    )
    tiers = {MEMORY: TierPolicy(schedule=memory.schedule)}
    if local is not None:
        tiers[LOCAL] = TierPolicy(schedule=local.schedule, retention=local.retention)
    if neighbor is not None:
        tiers[NEIGHBOR] = TierPolicy(schedule=neighbor.schedule)
    if remote is not None:
        tiers[REMOTE] = TierPolicy(schedule=remote.schedule, retention=remote.retention)
    return Policy(every_steps=memory.schedule.every_steps, tiers=tiers)


def _remote(checkpoint: CheckpointSpec, wiring: Wiring) -> RemoteTier | None:
    remote = checkpoint.remote
    if remote is None:
        return None
    endpoint = wiring.remote_endpoint or remote.endpoint
    if not endpoint:
        raise Unbuildable(
            "spec.checkpoint.remote.embedded: only `backstay local run` brings a store of its own; "
            "name one with `endpoint: https://...` and remove embedded"
        )
    return RemoteTier(
        endpoint=endpoint,
        bucket=remote.bucket,
        prefix=remote.prefix,
        region=remote.region,
        schedule=remote.schedule,
        retention=remote.retention,
    )


def pod_identity(
    replica: int, generations: Mapping[int, int], replaces: int, uid: str = ""
) -> PodIdentity:
    """Identity of the pod that is current for `replica` in `generations` (all replicas)."""
    return PodIdentity(
        replica=replica,
        generation=generations[replica],
        current=dict(generations),
        replaces=replaces,
        uid=uid,
    )
