"""A sidecar and the neighbour that keeps copies of its shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backstay_protocol.ids import CheckpointId


@dataclass(frozen=True, kw_only=True)
class ReplicaOffer:
    """POST /v1/replicas: please keep a copy of this shard. Repeated until it is `complete`."""

    checkpoint: CheckpointId
    rank: int
    owner: int
    """Replica that offers, and serves the bytes."""
    address: str
    """`host:port` of its sidecar."""
    attempt: int
    """Attempt under which the offer is made."""
    manifest: dict[str, Any]
    """The sealed manifest."""


@dataclass(frozen=True, kw_only=True)
class ReplicaReply:
    """complete | pulling | refused (why)."""

    status: str
    why: str = ""
