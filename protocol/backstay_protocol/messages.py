"""Every request and reply, as frozen dataclasses. One module, imported by both ends.

FastAPI takes them as body models; clients use `codec`. Each class says who sends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backstay_protocol.ids import CheckpointId
from backstay_protocol.names import PROTOCOL_VERSION
from backstay_protocol.records import AttemptRecord

# --- one shape of error --------------------------------------------------------------------------


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


# --- what is where -------------------------------------------------------------------------------


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


# --- trainer and its own sidecar (unix socket) ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaptureNotice:
    """POST /v1/captures: a slot was published, or (`published` false) a save was skipped."""

    rank: int
    slot: int
    step: int
    attempt: int
    published: bool = True
    why: str = ""
    stall_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CaptureReply:
    """The notice was heard."""

    ok: bool = True


@dataclass(frozen=True, kw_only=True)
class RestoreRequest:
    """POST /v1/restore: a rank joins. Repeated, same nonce, until the status is not `wait`."""

    rank: int
    local_rank: int
    world_size: int
    nonce: str
    """Of this process: the same one re-attaches, a new one restarts the round."""
    pid: int
    last_step: int = -1
    """Last step in the control block that an earlier process left in the volume; -1: none."""
    last_attempt: int = 0
    wait_seconds: float = 20.0
    """How long the sidecar may hold the request before it answers `wait`."""
    protocol: str = PROTOCOL_VERSION


WAIT = "wait"
LOAD = "load"
GO = "go"
AGAIN = "again"
FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one shard can be read, resolved for one reader by its own sidecar."""

    tier: str
    holder: int
    """Replica that serves it; -1: remote."""
    path: str = ""
    """A file that the reader can open; for a slot see `slot`."""
    slot: int = -1
    """>= 0: `path` is this slot of `slot_rank`; hold it with slots.reading()."""
    slot_rank: int = -1
    manifest_path: str = ""
    url: str = ""
    """Ranged GETs of the bytes (used when `path` is empty or can't be opened)."""
    manifest_url: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShardSources:
    """One shard of the base and its sources, nearest first."""

    rank: int
    size: int
    chunk_size: int
    fingerprint: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a world shall load. Made by the leader, resolved by each sidecar for its ranks."""

    round: str
    serial: int
    """Grows each time the leader decides again within a round."""
    attempt: int
    base: CheckpointId | None
    """None: start from nothing, at step 0, optimizer untouched."""
    saved_world_size: int = 0
    plan: str = ""
    chain: tuple[tuple[int, int], ...] = ()
    """Chain of `attempt`: goes into each manifest that it writes."""
    shards: tuple[ShardSources, ...] = ()
    reason: str = ""
    """Why this one, in a sentence."""
    skipped_bad: tuple[str, ...] = ()
    """Copies that were struck out on the way, in sentences."""


@dataclass(frozen=True, kw_only=True)
class RestoreReply:
    """Answer to RestoreRequest."""

    status: str
    """wait | load | failed."""
    message: str = ""
    decision: Decision | None = None
    run: str = ""
    replica: int = 0
    tiers: tuple[str, ...] = ()
    """Names of the configured tiers, nearest first."""
    slots: int = 2


@dataclass(frozen=True, kw_only=True)
class BadSource:
    """A source that did not serve one reader."""

    shard_rank: int
    tier: str
    holder: int
    proven: bool
    """True: wrong digest or gone, struck out for everyone. False: out of this reader's reach."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class ConfirmRequest:
    """POST /v1/restore/confirm: how a rank's load went. Repeated while the status is `wait`."""

    rank: int
    nonce: str
    round: str
    serial: int
    ok: bool
    bad: tuple[BadSource, ...] = ()
    error: str = ""
    """Not ok and no bad source: what can't be restored here (another structure, per-rank state)."""
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    wait_seconds: float = 20.0


@dataclass(frozen=True, kw_only=True)
class ConfirmReply:
    """wait | go (train) | again (POST /v1/restore again: another decision) | failed."""

    status: str
    message: str = ""
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    """With `go`: what all ranks together read from each tier."""
    bad: tuple[str, ...] = ()
    """With `go`: copies struck out in this round, in sentences."""
    lost_steps: int = -1
    """With `go`: steps trained by the last attempt and not in the base; -1: not known."""


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


@dataclass(frozen=True, kw_only=True)
class AgentStatus:
    """GET /v1/status: what one sidecar knows of itself and of its job."""

    run: str
    replica: int
    attempt: int = 0
    """Attempt that it follows; 0: none has begun."""
    generation: int = 0
    tiers: tuple[TierState, ...] = ()
    """The configured tiers, nearest first."""
    message: str = ""
    """What it is doing or waits for, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """One checkpoint in GET /v1/checkpoints and /v1/checkpoints/{id}."""

    checkpoint: CheckpointId
    world_size: int
    complete_in: tuple[str, ...]
    present_in: dict[str, int]
    """Tier -> number of shards there."""
    durable: bool
    pinned: bool
    on_lineage: bool
    size: int
    """Bytes of all shards known."""
    created: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointList:
    """GET /v1/checkpoints: newest first."""

    run: str
    attempt: int
    checkpoints: tuple[CheckpointStatus, ...]


# --- sidecar and leader --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankJoin:
    """One rank that asked its sidecar for a restore."""

    rank: int
    local_rank: int
    nonce: str
    world_size: int
    last_step: int = -1
    last_attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """POST /v1/leader/join, by each sidecar on every change of its joins; repeated while `wait`."""

    replica: int
    generation: int
    current: dict[int, int]
    replaces: int
    uid: str
    address: str
    ranks: tuple[RankJoin, ...]
    """Those that have joined so far."""
    wait_seconds: float = 10.0
    protocol: str = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True)
class CopySource:
    """One source by name; each sidecar resolves it for its own ranks."""

    tier: str
    holder: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One shard of the base: where all its copies are."""

    rank: int
    size: int
    chunk_size: int
    fingerprint: str
    sources: tuple[CopySource, ...]


@dataclass(frozen=True, kw_only=True)
class LeaderDecision:
    """The leader's decision, before each sidecar orders the sources by nearness to itself."""

    round: str
    serial: int
    attempt: int
    base: CheckpointId | None
    saved_world_size: int = 0
    plan: str = ""
    chain: tuple[tuple[int, int], ...] = ()
    shards: tuple[ShardPlan, ...] = ()
    reason: str = ""
    skipped_bad: tuple[str, ...] = ()
    nonces: dict[int, str] = field(default_factory=dict)
    """Rank -> nonce: the joins that this decision answers."""
    unreachable: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Reader replica -> "shard_rank/tier/holder" that it could not reach: put last for it."""


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """wait (message: who is missing) | load | failed."""

    status: str
    message: str = ""
    decision: LeaderDecision | None = None


@dataclass(frozen=True, kw_only=True)
class PromiseRequest:
    """POST /v1/round/promise, leader to each member."""

    round: str
    attempt: int
    members: dict[int, int]
    """Replica -> generation of the world's pods."""


@dataclass(frozen=True, kw_only=True)
class PromiseReply:
    """The promise is stored; only then record and inventory are reported."""

    granted: bool
    why: str = ""
    known: int = 0
    """Greatest attempt number known here (promise, record, manifests)."""
    record: AttemptRecord | None = None
    in_line: bool = False
    inventory: Inventory = field(default_factory=Inventory)


@dataclass(frozen=True, kw_only=True)
class StoreRequest:
    """POST /v1/round/store: keep this record; `record.ran` true is the go-ahead."""

    round: str
    record: AttemptRecord


@dataclass(frozen=True, kw_only=True)
class StoreReply:
    """Whether it was stored; why not."""

    stored: bool
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RankVerdict:
    """How the load of one rank went."""

    rank: int
    nonce: str
    ok: bool
    bad: tuple[BadSource, ...] = ()
    error: str = ""
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VerdictRequest:
    """POST /v1/leader/verdict, by a sidecar whose ranks all confirmed; repeated while `wait`."""

    replica: int
    round: str
    serial: int
    verdicts: tuple[RankVerdict, ...]
    wait_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class VerdictReply:
    """wait | go | again (join again) | failed."""

    status: str
    message: str = ""
    record: AttemptRecord | None = None
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    bad: tuple[str, ...] = ()
    lost_steps: int = -1


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


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica in GET /v1/job."""

    replica: int
    generation: int
    address: str
    seen_seconds_ago: float
    ranks: tuple[RankProgress, ...] = ()
    tiers: tuple[TierState, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RestoreView:
    """The last restore, in GET /v1/job and in the runner's account."""

    attempt: int
    base: CheckpointId | None
    finished: float
    seconds: float
    bytes_by_tier: dict[str, int]
    lost_steps: int
    bad: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """GET /v1/job at the leader: all that operator, runner and people need."""

    run: str
    attempt: int
    phase: str
    """Joining | Restoring | Training | Finished | Failed."""
    message: str
    step: int
    """Smallest step of all ranks."""
    replicas: tuple[ReplicaView, ...] = ()
    tiers: tuple[TierState, ...] = ()
    restores: tuple[RestoreView, ...] = ()
    """Newest last, at most 20."""
    newest_durable: CheckpointId | None = None
    newest_copy: CheckpointId | None = None
    """The newest on the lineage of which any shard is in sight, whole in a tier or not."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Policy:
    """PUT /v1/policy at the leader: schedules, in force from a step on."""

    every_steps: int = 0
    effective_from: int = 0


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """What a sidecar knows of the last checkpoint as it ends: its termination message."""

    newest_step: int
    """Newest step that is saved anywhere."""
    durable_step: int


@dataclass(frozen=True, kw_only=True)
class FlushReply:
    """POST /v1/flush: one common save was asked for; poll until `durable`."""

    step: int
    durable: bool
    message: str = ""
