"""A simulated cluster: what it consists of, and what can be asked of it (protocol_sim.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from backstay_protocol import commit, rounds
from backstay_protocol.history import Chain
from backstay_protocol.ids import CheckpointId, first_attempt_of
from backstay_protocol.messages import (
    Inventory,
    LeaderDecision,
    ShardCopy,
    VerdictRequest,
)
from backstay_protocol.names import MEMORY, REMOTE
from backstay_protocol.origins import OtherRun
from backstay_protocol.promises import merge
from backstay_protocol.records import AttemptRecord, AttemptState, Claim
from backstay_protocol.rounds import Effect, Round, RoundSettings
from backstay_protocol.topology import ManualChoice, PodIdentity, RestoreOptions, Retention

if TYPE_CHECKING:
    from support.protocol_judge import Judge

OWNER = "cluster/job"
KEEP_ONE = Retention(keep_last=1)
UNKNOWN = -2  # a world whose base is not chosen yet
FOREIGN = -10  # stands for the world of another run's checkpoint
OTHER = "team/base"
FRESH = -1


@dataclass(frozen=True)
class Shard:
    """What one rank of one world saved at one step: the truth and what its manifest says."""

    step: int
    attempt: int
    world: int
    rank: int
    world_size: int
    chain: Chain

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.step, self.attempt)

    @property
    def fingerprint(self) -> str:
        return f"{self.world}.{self.step}.{self.rank}"

    def copy(self, tier: str, holder: int) -> ShardCopy:
        return ShardCopy(
            checkpoint=self.checkpoint,
            rank=self.rank,
            tier=tier,
            holder=holder,
            world_size=self.world_size,
            plan="plan",
            size=8,
            chunk_size=8,
            fingerprint=self.fingerprint,
        )


@dataclass
class World:
    """One number taken by one round, and what became of it. The truth, for judging."""

    round: str
    attempt: int
    generation: int
    members: dict[int, int]  # replica -> pod
    size: int  # number of ranks
    base: tuple[int, int] | None = (0, UNKNOWN)  # (step, world); None: from nothing
    progress: dict[int, int] = field(default_factory=dict)  # rank -> newest captured step
    order: int = 0  # when all ranks had gone ahead; 0: never
    knew_intents: frozenset[CheckpointId] = frozenset()
    token: str = ""  # of the choice by hand that its record carries
    by_hand: bool = False  # base None, because a person asked for it


@dataclass
class Disk:
    """A node's disk, as one replica's folder on it."""

    ok: bool = True
    state: AttemptState | None = None
    record_world: int = -1
    shards: dict[tuple[str, CheckpointId, int], Shard] = field(default_factory=dict)


@dataclass
class Leader:
    """What a sidecar of replica 0 keeps in memory; a crash empties it."""

    round: Round | None = None
    last: Round | None = None
    deletion: commit.Deletion | None = None
    deleter: int = -1  # the truth: world that the deletion is made for
    committing: CheckpointId | None = None
    late_claim: int = 0


@dataclass
class Pod:
    """One pod: its sidecar, its trainer's ranks, its memory volume."""

    number: int
    identity: PodIdentity
    disk: int
    replicas: int  # of the job that it was created for
    alive: bool = True
    ghost: bool = False  # replaced by the operator, may still run
    cut: bool = False  # reaches only other cut pods, and the remote tier
    nonce: int = 0
    memory_state: AttemptState | None = None
    memory_world: int = -1
    slots: dict[int, list[Shard]] = field(default_factory=dict)
    joined: tuple[int, str] | None = None  # (leader's pod, round)
    loaded: tuple[LeaderDecision, VerdictRequest] | None = None
    run: int = -1  # world that its ranks train in
    chain: Chain = ()
    leader: Leader = field(default_factory=Leader)
    uploading: Shard | None = None
    told: tuple[int, tuple[CheckpointId, ...]] | None = None

    @property
    def replica(self) -> int:
        return self.identity.replica

    @property
    def name(self) -> str:
        return f"{self.replica}.{self.identity.generation}{'(old)' if self.ghost else ''}"


@dataclass
class Remote:
    """The object store. Every key is created once; a listing is atomic."""

    up: bool = True
    claims: dict[int, Claim] = field(default_factory=dict)
    bases: dict[int, AttemptRecord] = field(default_factory=dict)
    base_worlds: dict[int, int] = field(default_factory=dict)
    shards: dict[tuple[CheckpointId, int], Shard] = field(default_factory=dict)
    commits: set[CheckpointId] = field(default_factory=set)
    intents: set[CheckpointId] = field(default_factory=set)
    corrupt: set[tuple[CheckpointId, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Message:
    """An effect on its way. It outlives the leader that sent it."""

    leader: int
    round: str
    effect: Effect


Action = tuple[str, str, Callable[[], None]]  # (kind, what happens, do it)


def another_run(*steps: int) -> OtherRun:
    """A run of two ranks whose attempt has the number of this run's first one."""
    attempt = first_attempt_of(1)
    shards = [Shard(s, attempt, FOREIGN, rank, 2, ()) for s in steps for rank in range(2)]
    return OtherRun(
        run=OTHER,
        bases=(AttemptRecord(attempt=attempt, base=None),),
        copies=tuple(shard.copy(REMOTE, -1) for shard in shards),
        chains={attempt: ()},
        commits=frozenset(shard.checkpoint for shard in shards),
    )


class Cluster:
    """The state of the cluster, and small questions about it."""

    def __init__(
        self,
        replicas: int,
        per_replica: int = 1,
        *,
        has_remote: bool = True,
        quarantine_after: int = 3,
        max_steps: int = 4,
    ) -> None:
        self.settings = RoundSettings(
            replicas=replicas,
            processes_per_replica=per_replica,
            remote_configured=has_remote,
            owner=OWNER,
            restore=RestoreOptions(quarantine_after=quarantine_after, max_restarts=10**6),
        )
        self.max_steps = max_steps
        self.generation = 1
        self.now = 0.0
        self.names = itertools.count(1)
        self.disks = [Disk() for _ in range(replicas)]
        self.remote = Remote()
        self.worlds: list[World] = []
        self.by_round: dict[tuple[str, int], int] = {}
        self.round_pods: dict[str, dict[int, int]] = {}
        self.in_flight: list[Message] = []
        self.disk_full = False
        """Whether local disks say that they have no room (it only changes what may be thinned)."""
        self.lists_before_claim = False
        """Without the rule claimnobase: what is listed is what was there before the claim."""
        self.old_views: dict[str, rounds.RemoteView] = {}
        self.choice: ManualChoice | None = None
        """What the job's `restore` says now; a leader reads it when it opens a round."""
        self.choices: dict[str, ManualChoice | None] = {}
        self.wishes: list[ManualChoice] = []
        self.other = another_run(1, 2)
        self.judge: Judge | None = None
        self.log: list[str] = []
        first = dict.fromkeys(range(replicas), 1)
        self.pods = [
            Pod(i, PodIdentity(replica=i, generation=1, current=first), i, replicas)
            for i in range(replicas)
        ]

    # --- small questions -------------------------------------------------------------------------

    def reach(self, one: Pod, other: Pod) -> bool:
        return one.alive and other.alive and one.cut == other.cut

    def state(self, pod: Pod) -> AttemptState:
        disk = self.disks[pod.disk]
        return merge(disk.state if disk.ok else None, pod.memory_state)

    def record_world(self, pod: Pod) -> int:
        """The truth behind the record that the pod's sidecar reads."""
        disk = self.disks[pod.disk]
        on_disk = disk.state.record if disk.ok and disk.state else None
        record = self.state(pod).record
        return disk.record_world if record is not None and record == on_disk else pod.memory_world

    def write_state(self, pod: Pod, state: AttemptState, world: int, *, torn: bool) -> None:
        """Disk first, memory volume second; `torn`: the sidecar dies between the two."""
        changed = state.record != self.state(pod).record
        disk = self.disks[pod.disk]
        if disk.ok:
            disk.state = state
            disk.record_world = world if changed else disk.record_world
        if not torn:
            pod.memory_state = state
            pod.memory_world = world if changed else pod.memory_world

    def current_pods(self) -> list[Pod]:
        """By the operator's word: the newest pod of each replica."""
        newest = {pod.replica: pod for pod in self.pods if not pod.ghost}
        return [newest[replica] for replica in sorted(newest)]

    def settings_of(self, pod: Pod) -> RoundSettings:
        """What the pod's topology says; a pod of an older job has an older one."""
        current = pod.leader.round
        choice = self.choices.get(current.name) if current is not None else None
        restore = replace(self.settings.restore, choice=choice)
        return replace(self.settings, replicas=pod.replicas, restore=restore)

    def ranks(self, pod: Pod) -> range:
        return self.settings.ranks_of(pod.replica)

    def shards_at(self, pod: Pod) -> Iterator[tuple[str, Shard]]:
        for slots in pod.slots.values():
            for shard in slots:
                yield MEMORY, shard
        disk = self.disks[pod.disk]
        if disk.ok:
            for (area, _, _), shard in disk.shards.items():
                yield area, shard

    def inventory(self, pod: Pod) -> Inventory:
        found = list(self.shards_at(pod))
        return Inventory(
            copies=tuple(shard.copy(tier, pod.replica) for tier, shard in found),
            chains={shard.attempt: shard.chain for _, shard in found},
        )

    def remote_copies(self) -> tuple[ShardCopy, ...]:
        return tuple(shard.copy(REMOTE, -1) for shard in self.remote.shards.values())

    def remote_view(self, runs: tuple[str, ...] = ()) -> rounds.RemoteView:
        chains = {shard.attempt: shard.chain for shard in self.remote.shards.values()}
        return rounds.RemoteView(
            claims=tuple(self.remote.claims),
            bases=tuple(self.remote.bases.values()),
            inventory=Inventory(copies=self.remote_copies(), chains=chains),
            commits=frozenset(self.remote.commits),
            intents=frozenset(self.remote.intents),
            others=(self.other,) if OTHER in runs else (),
        )

    def world_of(self, current: Round) -> int:
        return self.by_round[current.name, current.attempt]
