"""Telling a copy that made room for a newer checkpoint from one that is lost. Pure.

A job that trains goes on saving while a checkpoint is read: what was listed may be gone a moment
later, and rightly so. Used by `verify` and `pull` with what the catalog says when asked again.
"""

from __future__ import annotations

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CheckpointList, CheckpointStatus


def replaced_by(
    checkpoint: CheckpointId, now: CheckpointList, tier: str = ""
) -> CheckpointId | None:
    """The newest checkpoint on the lineage that took its place in a tier (empty: in all of them).

    None: it was not replaced. Then what is missing of it there is lost: it is still listed as
    whole, or nothing newer is.
    """
    current = next((c for c in now.checkpoints if c.checkpoint == checkpoint), None)
    if current is not None and _whole(current, tier):
        return None
    newer = [c.checkpoint for c in now.checkpoints if c.on_lineage and _whole(c, tier)]
    return max((c for c in newer if c > checkpoint), default=None)


def _whole(status: CheckpointStatus, tier: str) -> bool:
    return tier in status.complete_in if tier else bool(status.complete_in)
