"""What people, tools and the operator hear of a job: by the leader, or by a sidecar as it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages.common import TierState
from backstay_protocol.messages.policy import Placement, Policy
from backstay_protocol.messages.progress import RankProgress


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
class Candidate:
    """One checkpoint that a restore saw: whether it was taken, and why or why not."""

    checkpoint: CheckpointId
    taken: bool
    why: str
    """A sentence for people."""
    run: str = ""
    """`<namespace>/<run name>` of another run that it belongs to; empty: the job's own."""
    tiers: tuple[str, ...] = ()
    """Where any shard of it is in sight, nearest first."""


BASE_OUTCOME = "base"  # a checkpoint of the job's own run
ORIGIN_OUTCOME = "origin"  # a checkpoint of another run
FRESH_OUTCOME = "fresh"  # from nothing, at step 0
REFUSE_OUTCOME = "refuse"  # something is there and none of it can be restored


@dataclass(frozen=True, kw_only=True)
class RestorePreview:
    """GET /v1/restore/preview at the leader: what a restore would take now. Begins nothing."""

    run: str
    attempt: int
    """The attempt that runs now; 0: none."""
    outcome: str
    """base | origin | fresh | refuse."""
    reason: str
    checkpoint: CheckpointId | None = None
    """With the outcomes base and origin."""
    checkpoint_run: str = ""
    """With the outcome origin: the run that the checkpoint belongs to."""
    candidates: tuple[Candidate, ...] = ()
    """Every checkpoint in sight, newest first, at most 50."""
    more_candidates: int = 0
    """So many older ones are left out."""


@dataclass(frozen=True, kw_only=True)
class RestoreView:
    """One restore: in GET /v1/job, the runner's account, and kept as `<attempt>.restore.json`."""

    attempt: int
    base: CheckpointId | None
    finished: float
    seconds: float
    bytes_by_tier: dict[str, int]
    lost_steps: int
    bad: tuple[str, ...] = ()
    reason: str = ""
    stopped: float = 0.0
    """When this leader saw the attempt before make its last step; 0: it led none before."""
    joined: float = 0.0
    """When the last rank had joined; 0: not known."""
    outcome: str = ""
    """base | origin | fresh; empty: by a leader that did not tell."""
    origin: str = ""
    """Where the contents come from if not from a checkpoint of this run, in words: another run's
    checkpoint, or a fresh start that a person asked for."""
    candidates: tuple[Candidate, ...] = ()
    """What was in sight, newest first, at most 50: what was taken, and why not the others."""
    more_candidates: int = 0
    step: int = 0
    """Where training went on, whosever checkpoint it was; read `began_at`."""

    @property
    def began_at(self) -> int:
        """The same, also of a leader that did not tell `step`."""
        return self.step or (self.base.step if self.base is not None else 0)


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
    code: str = ""
    """Why the phase is Failed, for programs (round_events)."""
    outranked_by: int = 0
    """With the code NewerWorldExists: the greater attempt."""
    quiet_seconds: float = 0.0
    """How long no rank of the attempt has made a step, by the leader's own clock."""
    step_seconds: float = 0.0
    """Of the fastest rank; 0: not known."""
    unheeded: tuple[int, ...] = ()
    """Replicas that an order to leave for all has not moved in time, furthest behind first."""
    unheeded_seconds: float = 0.0
    """How long ago all were told to leave."""
    policy: Policy | None = None
    """What was set last: by the topology, by the operator, by people; None: not known yet."""
    placement: Placement | None = None
    """What the leader was told of nodes; None: nothing."""
    neighbors: dict[int, int] = field(default_factory=dict)
    """Replica -> replica that keeps its copies."""
    same_node: tuple[int, ...] = ()
    """Replicas whose neighbour runs on the same node."""
    same_domain: tuple[int, ...] = ()
    """Replicas whose neighbour is in the same failure domain, as far as domains are known."""


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """What a sidecar knows of the last checkpoint as it ends: its termination message."""

    newest_step: int
    """Newest step that is saved anywhere; -1: none."""
    durable_step: int

    @property
    def safe(self) -> bool:
        """The newest is durable."""
        return self.durable_step >= self.newest_step


@dataclass(frozen=True, kw_only=True)
class FlushReply:
    """POST /v1/flush: one common save was asked for; poll until `durable`."""

    step: int
    durable: bool
    message: str = ""
