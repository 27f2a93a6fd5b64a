"""Whether a job's memory limits can hold what is kept in memory (docs/guarantees.md, 8). Pure.

Pages of a memory volume are charged to the container that touches them first: the trainer, which
populates all slots before it restores. Its limit must hold volume, /dev/shm and its processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backstay_operator.api.job import TrainingJob
from backstay_operator.api.quantity import as_quantity, format_bytes, parse_quantity

SHM_BYTES = 64 << 20  # /dev/shm where a template mounts none of its own
PROCESS_BYTES = 128 << 20  # of a Python process with torch loaded, at the very least
SIDECAR_BYTES = 256 << 20  # of a sidecar beside its pull buffers


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What one pod needs at least, beside what the user's tensors take."""

    volume_bytes: int
    """The memory volume: slots and 10 %."""
    shared_bytes: int
    """/dev/shm and other memory volumes that the trainer mounts."""
    process_bytes: int
    """The ranks' processes, without their tensors."""

    @property
    def trainer_bytes(self) -> int:
        """What the trainer's limit must hold at least."""
        return self.volume_bytes + self.shared_bytes + self.process_bytes


def memory_need(job: TrainingJob) -> MemoryNeed:
    """What a pod of this job needs at least."""
    template = job.spec.pod_template["spec"]
    mounts = job.spec.trainer.get("volumeMounts") or ()
    theirs = _memory_volumes(template)
    shared = sum(theirs.get(name, 0) for name in {str(mount.get("name")) for mount in mounts})
    if not any(mount.get("mountPath") == "/dev/shm" for mount in mounts):
        shared += SHM_BYTES
    return MemoryNeed(
        volume_bytes=job.spec.checkpoint.memory.size_limit_bytes,
        shared_bytes=shared,
        process_bytes=PROCESS_BYTES * job.spec.processes_per_replica,
    )


def memory_too_small(job: TrainingJob, sidecar_memory: str) -> str:
    """Why the limits can't hold the slots, with the number that is needed; empty if they can.

    `sidecar_memory`: the limit that the operator gives sidecars. A trainer without a limit is
    bounded by its node only; that is not refused here.
    """
    need = memory_need(job)
    parts = (
        f"memory volume {format_bytes(need.volume_bytes)}, /dev/shm and other memory volumes "
        f"{format_bytes(need.shared_bytes)}, {job.spec.processes_per_replica} process(es) "
        f"{format_bytes(need.process_bytes)} without their tensors"
    )
    pod = _limit(job.spec.pod_template["spec"])
    if pod is not None:
        sidecar = max(SIDECAR_BYTES, int(parse_quantity(sidecar_memory) or 0))
        return _compare("the pod's", pod, need.trainer_bytes + sidecar, f"{parts}, the sidecar")
    own = _limit(job.spec.trainer)
    return "" if own is None else _compare("the trainer's", own, need.trainer_bytes, parts)


def _compare(whose: str, limit: int, needed: int, parts: str) -> str:
    if limit >= needed:
        return ""
    return (
        f"{whose} memory limit is {format_bytes(limit)}; needed are at least "
        f"{format_bytes(needed)} ({parts}); raise resources.limits.memory to "
        f"{as_quantity(needed)} or more, or lower checkpoint.memory.sizeLimit or slots"
    )


def _limit(holder: Mapping[str, Any]) -> int | None:
    limits = (holder.get("resources") or {}).get("limits") or {}
    amount = parse_quantity(limits.get("memory"))
    return None if amount is None else int(amount)


def _memory_volumes(template: Mapping[str, Any]) -> dict[str, int]:
    """Name -> bytes of the template's own memory volumes; one without a limit counts as empty."""
    sizes = {}
    for volume in template.get("volumes") or ():
        folder = volume.get("emptyDir") or {}
        if folder.get("medium") == "Memory":
            sizes[str(volume.get("name"))] = int(parse_quantity(folder.get("sizeLimit")) or 0)
    return sizes
