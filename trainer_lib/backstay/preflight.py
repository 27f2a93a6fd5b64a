"""What people should know before the first save: room, a safe place, and whether it is reachable.

Called by checkpointer.py after the restore, before training. It only warns: a job that can't save
well still trains (docs/guarantees.md, 5). `warnings` is pure; `observe` looks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from backstay.client import SidecarClient
from backstay.plan import estimated_bytes
from backstay.structure import Kind, Structure
from backstay_protocol.errors import BackstayError
from backstay_protocol.messages import RestoreReply, TierState
from backstay_protocol.names import REMOTE

SPARE = 1.1  # volume size = slots + 10 %
STATE_TENSORS = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Rprop": 2, "Lion": 1, "Muon": 1}
USUAL_STATE_TENSORS = 2  # per parameter, of Adam and its relatives


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What there is, at one moment."""

    volume: str
    volume_bytes: int
    """Size of the memory volume; 0: not known."""
    state_bytes: int
    """About one shard of this rank, optimizer state included."""
    num_slots: int
    num_local_ranks: int
    """Ranks that share the volume."""
    tiers: tuple[str, ...]
    """Configured tiers, nearest first."""
    states: tuple[TierState, ...]
    """How they do, as the sidecar says."""


def observe(
    client: SidecarClient,
    volume: str,
    structure: Structure,
    reply: RestoreReply,
    num_local_ranks: int,
) -> Observed:
    """Look at volume, state and tiers. Never raises."""
    try:
        states = client.status().tiers
    except BackstayError:
        states = ()
    try:
        room = os.statvfs(volume)
        volume_bytes = room.f_blocks * room.f_frsize
    except OSError:
        volume_bytes = 0
    return Observed(
        volume=volume,
        volume_bytes=volume_bytes,
        state_bytes=estimated_bytes(structure) + state_to_come(structure),
        num_slots=reply.slots,
        num_local_ranks=num_local_ranks,
        tiers=reply.tiers,
        states=states,
    )


def warnings(seen: Observed, *, of_the_job: bool = True) -> list[str]:
    """Sentences for people, the worst first.

    `of_the_job`: also what is the same for every pod of the job, and is to be said by one of them.
    """
    found = []
    needed = int(seen.num_slots * seen.num_local_ranks * seen.state_bytes * SPARE)
    if 0 < seen.volume_bytes < needed:
        found.append(
            f"the memory volume {seen.volume} holds {_size(seen.volume_bytes)}, but "
            f"{seen.num_slots} slots for {seen.num_local_ranks} ranks need about "
            f"{_size(needed)}: saves will be skipped. Set spec.checkpoint.memory.sizeLimit to "
            "that, or memory.slots to 1"
        )
    if of_the_job and REMOTE not in seen.tiers:
        found.append(
            f"no remote tier is configured (only {', '.join(seen.tiers)}): nothing is durable, and "
            "a job that loses all its nodes starts from nothing. Set spec.checkpoint.remote"
        )
    for state in seen.states:
        if not state.ok:
            found.append(f"the {state.tier} tier is in trouble: {state.message}")
    return found


def state_to_come(structure: Structure) -> int:
    """About the bytes of optimizer state that the first steps will make for this rank to save."""
    total = 0
    for tensor in structure.tensors:
        if tensor.kind is not Kind.PARAMETER or not tensor.source.requires_grad:
            continue
        for optimizer in tensor.optimizers:
            if not optimizer.state.get(tensor.source):
                count = STATE_TENSORS.get(type(optimizer).__name__, USUAL_STATE_TENSORS)
                total += count * tensor.local.nbytes // max(1, len(tensor.group))
    return total


def _size(count: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
