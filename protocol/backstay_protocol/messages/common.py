"""What several parts say: the one shape of error, copies of shards, how a tier does.

Imported through the package, by both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.ids import CheckpointId


@dataclass(frozen=True, kw_only=True)
class ErrorBody:
    """What went wrong, for programs (`code`, CamelCase) and people (`message`, `hint`)."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """The only shape of an error on the wire."""

    error: ErrorBody


@dataclass(frozen=True, kw_only=True)
class ShardCopy:
    """One verified (sealed) copy of one shard. Reported by the sidecar that can serve it."""

    checkpoint: CheckpointId
    rank: int
    tier: str
    holder: int
    """Replica whose sidecar serves it; -1 in the remote tier."""
    world_size: int
    plan: str
    size: int
    chunk_size: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All copies that one sidecar (or the remote tier) holds."""

    copies: tuple[ShardCopy, ...] = ()
    chains: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Attempt -> its chain, as the manifests carry it."""


TIER_REFUSES = "refuses"  # the store answers and says no: a person must mend it
TIER_AWAY = "away"  # the store can't be reached, or fails: it may pass by itself
TIER_OWNED = "owned"  # another job that lives keeps its checkpoints under the same run


@dataclass(frozen=True, kw_only=True)
class TierState:
    """How one tier does, as seen by one sidecar."""

    tier: str
    ok: bool = True
    message: str = ""
    newest: CheckpointId | None = None
    """Newest complete one, by the leader's word."""
    newest_time: float = 0.0
    backlog: int = 0
    """Shards that wait to be moved there."""
    full: bool = False
    """A disk says that it has no room for what waits."""
    code: str = ""
    """Why it is not well, for programs: one of the TIER_ codes, or empty."""
