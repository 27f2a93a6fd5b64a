"""The environment by which torchrun, or a program without a launcher, finds its world."""

from __future__ import annotations

from math import ceil

from backstay_operator.api.job import NONE, STATIC, TrainingJob
from backstay_operator.api.quantity import parse_quantity
from backstay_operator.manifests.wiring import Addresses
from backstay_protocol.names import ENV_EXIT_WITH_PARENT
from backstay_protocol.topology import PodIdentity

_MANY_RESTARTS = 1000  # the restore barrier holds budget and backoff, not torchrun
_SHUTDOWN_MARGIN_SECONDS = 30


def launcher_env(
    job: TrainingJob, pod: PodIdentity, addresses: Addresses, grace_seconds: int
) -> dict[str, str]:
    """Environment of the trainer container of one pod."""
    replica = pod.replica
    common = {"OMP_NUM_THREADS": str(_threads(job))}
    if job.spec.launcher == NONE:
        return common | _none(job, replica, addresses)
    shutdown = max(5, grace_seconds - _SHUTDOWN_MARGIN_SECONDS)
    common |= {
        "PET_NNODES": str(job.spec.replicas),
        "PET_NPROC_PER_NODE": str(job.spec.processes_per_replica),
        "PET_SHUTDOWN_TIMEOUT": str(shutdown),
        ENV_EXIT_WITH_PARENT: "1",
    }
    if job.spec.launcher == STATIC:
        return common | _static(replica, addresses)
    return common | _torchrun(job, pod, addresses)


def _torchrun(job: TrainingJob, pod: PodIdentity, addresses: Addresses) -> dict[str, str]:
    """c10d: one agent that rejoins restarts the processes of the whole world, no container."""
    barrier = ceil(job.spec.restore.barrier_seconds)
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": addresses.rendezvous_id,
        "PET_RDZV_ENDPOINT": f"{addresses.hosts[0]}:{addresses.rendezvous_port}",
        "PET_RDZV_CONF": f"is_host={int(pod.replica == 0)},keep_alive_interval=2,"
        f"keep_alive_max_attempt=3,join_timeout={barrier}",
        "PET_LOCAL_ADDR": _agent_name(pod, addresses),
        "PET_MAX_RESTARTS": str(_MANY_RESTARTS),
        "PET_MONITOR_INTERVAL": "0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _agent_name(pod: PodIdentity, addresses: Addresses) -> str:
    """What an agent is known by at the rendezvous, beside its pid, which is the same in all pods.

    With the generation in it a pod that was cut off and comes back is not taken for its successor:
    it would take that one out of the world, which then begins once more. Ranks follow the order of
    these names; only replica 0's must be an address.
    """
    host = addresses.hosts[pod.replica]
    return f"{host}-{pod.generation}" if pod.replica else host


def _static(replica: int, addresses: Addresses) -> dict[str, str]:
    """Static agents can't re-form a world: their workers end, and the containers restart."""
    return {
        "PET_NODE_RANK": str(replica),
        "PET_MASTER_ADDR": addresses.hosts[0],
        "PET_MASTER_PORT": str(addresses.rendezvous_port),
        "PET_MAX_RESTARTS": "0",
    }


def _none(job: TrainingJob, replica: int, addresses: Addresses) -> dict[str, str]:
    return {
        "RANK": str(replica),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": addresses.hosts[0],
        "MASTER_PORT": str(addresses.rendezvous_port),
    }


def _threads(job: TrainingJob) -> int:
    """Threads a process: the container's CPUs shared by its ranks; 1 where none are named."""
    resources = job.spec.trainer.get("resources") or {}
    for group in ("limits", "requests"):
        cpus = parse_quantity((resources.get(group) or {}).get("cpu"))
        if cpus is not None:
            return max(1, int(cpus) // job.spec.processes_per_replica)
    return 1
