"""A sidecar and the leader while ranks train: what each reports, and the leader's word."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages.common import Inventory, ShardCopy, TierState
from backstay_protocol.messages.policy import Policies
from backstay_protocol.records import AttemptRecord


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """One rank's control block, as its sidecar reads it."""

    rank: int
    step: int
    step_time: float
    published_step: int
    attempt: int
    state: int
    replan_wanted: bool = False
    saves: int = 0
    skipped: int = 0
    stall_seconds: float = 0.0
    every_steps: int = 0
    """Interval in its control block: a leader that takes over goes on with it."""
    every_from: int = 0
    leaving: bool = False
    """It obeys an order to leave just now."""


@dataclass(frozen=True, kw_only=True)
class ProgressRequest:
    """POST /v1/leader/progress, by every sidecar each 2 s and on change."""

    replica: int
    generation: int
    attempt: int
    ranks: tuple[RankProgress, ...] = ()
    published: dict[int, tuple[CheckpointId, ...]] = field(default_factory=dict)
    """Rank -> checkpoints in its slots, sealed or not (memory tier: published)."""
    inventory: Inventory = field(default_factory=Inventory)
    uploaded: tuple[ShardCopy, ...] = ()
    """Shards (tier remote) that this sidecar has put, manifest included."""
    tiers: tuple[TierState, ...] = ()
    unwanted: tuple[CheckpointId, ...] = ()
    """What this sidecar remembers that people deleted: a new leader hears of it so."""
    node: str = ""
    """Where the pod runs; empty: not known, then its address stands for it."""
    seen_version: int = 0
    """Version of the last reply; the leader may hold the request until it has a newer one."""
    wait_seconds: float = 0.0
    policies: Policies = field(default_factory=Policies)
    """What it was told to go by: a new leader hears of it so."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What sidecars write into the control blocks of their ranks; 0: nothing.

    `save_at_step` is negative for a forced save at that step. `leave_replica` -1: all replicas.
    """

    save_at_step: int = 0
    replan_at_step: int = 0
    leave_attempt: int = 0
    leave_replica: int = -1
    every_steps: int = 0
    every_from: int = 0


@dataclass(frozen=True, kw_only=True)
class ProgressReply:
    """The leader's word. It counts only under the attempt that the receiver has promised."""

    attempt: int
    version: int = 0
    """Grows with every change of what this reply says."""
    record: AttemptRecord | None = None
    complete: dict[str, tuple[CheckpointId, ...]] = field(default_factory=dict)
    """Tier -> checkpoints on the lineage that are complete there, newest first."""
    durable: tuple[CheckpointId, ...] = ()
    pinned: tuple[CheckpointId, ...] = ()
    complete_step: int = 0
    """Newest step that all ranks have published in memory."""
    orders: Orders = field(default_factory=Orders)
    persist: dict[str, tuple[CheckpointId, ...]] = field(default_factory=dict)
    """Tier -> checkpoints chosen for it where its schedule is by seconds, or a person asked."""
    thin: tuple[CheckpointId, ...] = ()
    """Leave local and neighbor now, or are not to be brought there from a slot any more."""
    unwanted: tuple[CheckpointId, ...] = ()
    """People deleted them: they leave every tier, slots included, and are not brought back."""
    neighbors: dict[int, int] = field(default_factory=dict)
    """Replica -> replica that keeps its copies."""
    addresses: dict[int, str] = field(default_factory=dict)
    """Replica -> live `host:port` of its sidecar."""
    message: str = ""
    policies: Policies = field(default_factory=Policies)
    """Schedules and retention that stand; empty: nothing is said, what was told before stands."""
