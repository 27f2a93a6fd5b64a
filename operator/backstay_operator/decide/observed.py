"""What is known of a job at one moment, frozen. Made by who observes; read by `decide`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from backstay_operator.api.job import TrainingJob
from backstay_protocol.messages import LastWord


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a container ended last."""

    exit_code: int
    """128 + signal where a signal ended it."""
    at: float
    """Seconds since the epoch."""
    reason: str = ""
    """As the kubelet says: Completed, Error, OOMKilled, ..."""


@dataclass(frozen=True, kw_only=True)
class ContainerState:
    """One container of a pod."""

    name: str
    running: bool
    started_at: float = 0.0
    restarts: int = 0
    quick_ends: int = 0
    """Ends in a row after less than the calm time; decides the backoff."""
    ended: Ended | None = None
    """The last end; None: it never ended."""

    @property
    def completed(self) -> bool:
        """Ended for good, with success."""
        return not self.running and self.ended is not None and self.ended.exit_code == 0

    @property
    def failed(self) -> bool:
        """Not running after an end without success (a restart may be due)."""
        return not self.running and self.ended is not None and self.ended.exit_code != 0


@dataclass(frozen=True, kw_only=True)
class PodState:
    """One pod that exists."""

    replica: int
    generation: int
    node: str
    node_alive: bool = True
    node_why: str = ""
    """Why the node counts as lost."""
    trainer: ContainerState
    failed: str = ""
    """Not empty: the whole pod failed and won't come back by itself (evicted, ...): why."""
    # What follows only a cluster knows; the local runner leaves it as it is.
    terminating: bool = False
    """It has been told to end, by whomever."""
    finished: bool = False
    """Every container has ended for good, the sidecar too."""
    ends_itself: bool = False
    """Its trainer completed, so the kubelet ends the rest; deleted, its logs would be lost."""
    trouble: Trouble | None = None
    """Why it does not come up."""
    drain: str = ""
    """Key of the taint by which its node is being emptied."""
    domain: str = ""
    """Value of the topology key on its node."""
    spec_digest: str = ""
    """Of what it was made of; empty: not known."""
    choice: str | None = None
    """Token of the choice by hand when it was made, empty without one; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that keeps a job from going on, for a condition."""

    reason: str
    """CamelCase constant of api/names.py."""
    message: str


@dataclass(frozen=True, kw_only=True)
class PodRecord:
    """The current pod of one replica, as persisted before it was created."""

    generation: int
    replaces: int = 0
    created: bool = False
    """Whether it is known to have existed; if not, the same creation is finished first."""
    node: str = ""
    """Where it was seen last: its disk is there."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What is persisted of a job: in status, or in the local runner's status.json."""

    first_generation: int
    generation: int
    """The greatest that was handed out."""
    pods: dict[int, PodRecord] = field(default_factory=dict)
    """Replica -> its current pod."""
    choice: str = ""
    """The choice by hand that the spec named last; empty: none."""
    choice_number: int = 0
    """Grows with each change to another one (see choice.py)."""
    outcome: str = ""
    """Succeeded or Failed, once the job is over."""
    outcome_reason: str = ""
    outcome_message: str = ""
    ended_at: float = 0.0
    """When the outcome was decided; 0: it is not."""
    drain_since: float = 0.0
    """When the save before a drain was asked for first; 0: no drain is under way."""
    flush_since: float = 0.0
    """When flush pods were asked for; 0: never."""
    safe_end: bool = False
    """The leader said that all ranks have come to their end and the last checkpoint is durable."""

    @property
    def generations(self) -> dict[int, int]:
        """Replica -> generation of its current pod."""
        return {replica: pod.generation for replica, pod in self.pods.items()}

    def with_pod(self, replica: int, pod: PodRecord) -> JobRecord:
        """The same with another current pod."""
        return replace(self, pods={**self.pods, replica: pod})


@dataclass(frozen=True, kw_only=True)
class LeaderFacts:
    """What the leader's sidecar last said (GET /v1/job), as far as decisions need it."""

    phase: str
    message: str = ""
    attempt: int = 0
    step: int = 0
    newest_step: int = -1
    """Newest step that is complete in any tier; -1: none."""
    durable_step: int = -1
    tier_troubles: tuple[str, ...] = ()
    """Sentences of tiers that are not well."""
    remote_code: str = ""
    """Why the remote tier is not well: one of the protocol's TIER_ codes; empty: it is."""
    remote_trouble: str = ""
    """The sentence of it."""
    skipping: tuple[str, ...] = ()
    """Sentences of ranks that skip a good part of their saves."""
    last_steps: Mapping[int, float] = field(default_factory=dict)
    """Replica -> when a rank of its that trains made its last step, seconds since the epoch."""
    quiet_seconds: float = 0.0
    """How long nobody has made a step."""
    step_seconds: float = 0.0
    """Of a usual step; 0: not known."""
    heard: frozenset[int] = frozenset()
    """Replicas whose sidecar was heard just now."""
    spoken: frozenset[int] = frozenset()
    """Replicas of which a rank has spoken to its sidecar."""
    code: str = ""
    """Why the phase is Failed, for programs."""
    outranked_by: int = 0
    """The greater attempt, where the world stands down before one."""
    unheeded: tuple[int, ...] = ()
    """Replicas that did not heed an order to leave, furthest behind first."""
    unheeded_seconds: float = 0.0
    """How long ago all were told to leave."""


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """The last answer to POST /v1/flush."""

    asked_at: float
    """When the save was first asked for."""
    step: int
    durable: bool
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Everything."""

    job: TrainingJob
    record: JobRecord | None
    """None: the job was never seen before."""
    pods: tuple[PodState, ...] = ()
    leader: LeaderFacts | None = None
    """None: it does not answer (yet)."""
    early_deaths: int = 0
    """Starts in a row of one rank that ended before it joined, or of a sidecar before it was up."""
    early_death_words: str = ""
    """What ends, and its last words."""
    # What follows only a cluster knows.
    spec_digest: str = ""
    """Of the job as it is now; pods with another one are outdated."""
    troubles: tuple[Trouble, ...] = ()
    """What the API server refused when the last plan was carried out."""
    last_word: LastWord | None = None
    """What the sidecars said as they ended."""
    flushed: Flushed | None = None
    flush_pods: tuple[PodState, ...] = ()
    remote_trouble_since: float = 0.0
    """When the remote tier was seen in trouble first, seconds since the epoch; 0: it is well."""
    foreign_budgets: tuple[str, ...] = ()
    """Other PodDisruptionBudgets that select the job's pods."""
    token_refused: bool = False
    """The leader's pod goes by another token than the job's Secret."""
    run_users: tuple[str, ...] = ()
    """Other jobs that are not over and keep their checkpoints under the same run."""

    @property
    def currents(self) -> list[PodState]:
        """The current pods that exist, by replica."""
        replicas = range(self.job.spec.replicas)
        return [pod for r in replicas if (pod := self.current(r)) is not None]

    def current(self, replica: int) -> PodState | None:
        """The pod that the record names for a replica, if it exists."""
        if self.record is None or replica not in self.record.pods:
            return None
        generation = self.record.pods[replica].generation
        fits = (p for p in self.pods if (p.replica, p.generation) == (replica, generation))
        return next(fits, None)
