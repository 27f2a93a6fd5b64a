"""The topology file: what a sidecar must know of its job. Written by operator, runner or people.

Two JSON files: the job's topology (the same for all pods) and the pod's identity. A bare launcher
gives the first to `backstay agent --topology FILE --replica N`; there are no generations then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from backstay_protocol import codec
from backstay_protocol.files import read_small
from backstay_protocol.names import DEFAULT_SLOTS, knows

DEFAULT_REGION = "us-east-1"
"""What stores that know no regions take."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a tier takes a checkpoint. At most one of the two is set; none: every captured one."""

    every_steps: int = 0
    every_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.every_seconds < 0:
            raise ValueError("everySteps and everySeconds can't be negative")
        if self.every_steps and self.every_seconds:
            raise ValueError("give everySteps or everySeconds, not both")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a tier keeps on the lineage, beside the base, the last durable and the pinned ones."""

    keep_last: int = 2
    keep_every: int = 0
    """Also every checkpoint whose step is a multiple of this; 0: none."""

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError("keepLast must be 1 or more, keepEvery 0 or more")


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """The pod's memory volume. Its schedule is the capture schedule: no other tier gets more."""

    schedule: Schedule = field(default_factory=Schedule)
    slots: int = DEFAULT_SLOTS

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 8:
            raise ValueError(f"memory.slots is {self.slots}; 1 to 8 are possible")


@dataclass(frozen=True, kw_only=True)
class LocalTier:
    """The node's disk."""

    root: str
    schedule: Schedule = field(default_factory=Schedule)
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, kw_only=True)
class NeighborTier:
    """Another replica's disk, over HTTP."""

    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True, kw_only=True)
class RemoteTier:
    """MinIO or another S3 store with conditional create."""

    endpoint: str
    """`http://host:port` or `https://host[:port]`."""
    bucket: str
    prefix: str = ""
    region: str = DEFAULT_REGION
    schedule: Schedule = field(default_factory=Schedule)
    retention: Retention = field(default_factory=Retention)
    concurrency: int = 4
    """Parts in flight per sidecar."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ValueError(
                f"remote.endpoint is {self.endpoint!r}; expected http(s)://host[:port]"
            )


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """The configured tiers. Every rule of the protocol asks only for tiers that are here."""

    memory: MemoryTier = field(default_factory=MemoryTier)
    local: LocalTier | None = None
    neighbor: NeighborTier | None = None
    remote: RemoteTier | None = None

    @property
    def outermost(self) -> str:
        """Name of the tier that is hardest to lose."""
        for name in ("remote", "neighbor", "local"):
            if getattr(self, name) is not None:
                return name
        return "memory"


@dataclass(frozen=True, kw_only=True)
class ManualChoice:
    """`restore` of the job: a person chose. Applies once per change of `token`.

    One of three: a checkpoint of the job's own run (`step`, `attempt`), another run's (`run` and
    what follows it), or none (`fresh`). With the last two `step` is -1, which no checkpoint has: a
    leader that does not know them refuses instead of taking what was not meant.
    """

    token: str
    step: int = -1
    attempt: int = 0
    """0: the one on the lineage."""
    run: str = ""
    """`<namespace>/<run name>` of another run in the same bucket and prefix."""
    run_step: int = -1
    """-1: the newest durable one on that run's lineage."""
    run_attempt: int = 0
    """0: the one on that run's lineage."""
    fresh: bool = False
    """Start from nothing, whatever there is."""

    def applied_by(self, choice: str) -> bool:
        """Whether a record that carries this choice has applied it.

        A token without a number (`@...`) is that of a job when it was made: a job that was deleted
        and is applied again does not ask anew for what its run has begun from, at any number.
        """
        return choice == self.token or choice.startswith(f"{self.token}@")

    def unknown_to(self, version: str) -> str:
        """Why a part of that version can't take part in it; empty: it can.

        An older one would look for another run's checkpoint in its own, and call its shards gone.
        """
        if not self.run or knows(version, 1):
            return ""
        return (
            f"beginning from another run ({self.run}) needs protocol 1.1, this one speaks "
            f"{version}: give it a newer Backstay first"
        )

    def __post_init__(self) -> None:
        if (self.step >= 0) + bool(self.run) + self.fresh > 1:
            raise ValueError("restore: give a step, another run, or fresh; not two of them")

    @staticmethod
    def asked(
        token: str, *, step: int = -1, attempt: int = 0, run: str = "", fresh: bool = False
    ) -> ManualChoice | None:
        """By the fields that a person sets: `step` and `attempt` are of `run`, where that is given.

        None: nothing is asked for.
        """
        if fresh:
            return ManualChoice(token=token, fresh=True)
        if run:
            return ManualChoice(token=token, run=run, run_step=step, run_attempt=attempt)
        return ManualChoice(token=token, step=step, attempt=attempt) if step >= 0 else None


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """How attempts begin."""

    barrier_seconds: float = 600.0
    """How long the leader waits for all ranks to join."""
    remote_wait_seconds: float = 120.0
    """How long a start waits for an unreachable remote tier before it fails naming the cause."""
    max_restarts: int = 100
    """Attempts in a row without a newer complete checkpoint before the job fails."""
    quarantine_after: int = 3
    choice: ManualChoice | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where one replica's sidecar listens (port 7070)."""

    replica: int
    address: str
    """`host:port`."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One job, as its sidecars see it."""

    namespace: str
    job: str
    run_name: str
    uid: str
    """The job's uid; with `cluster` it names the owner of claims."""
    cluster: str = "local"
    replicas: int
    processes_per_replica: int
    peers: tuple[Peer, ...]
    tiers: Tiers
    restore: RestoreOptions = field(default_factory=RestoreOptions)
    hang_seconds: float = 0.0
    """No progress of any rank for so long: one replica is told to leave. 0: never."""
    leave_together: bool = False
    """All are told: for launchers that don't restart the world when one replica's ranks end."""
    first_generation: int = 0
    """The job's first generation, for k.n; 0: a bare topology without generations."""

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.processes_per_replica < 1:
            raise ValueError("replicas and processesPerReplica must be 1 or more")
        if sorted(p.replica for p in self.peers) != list(range(self.replicas)):
            raise ValueError(f"peers must name each replica 0..{self.replicas - 1} once")

    @property
    def run(self) -> str:
        """`<namespace>/<run name>`: the identity that checkpoints are kept under."""
        return f"{self.namespace}/{self.run_name}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.processes_per_replica

    @property
    def owner(self) -> str:
        """Who claims attempts."""
        return f"{self.cluster}/{self.uid}"

    def ranks_of(self, replica: int) -> range:
        """Global ranks of one replica."""
        first = replica * self.processes_per_replica
        return range(first, first + self.processes_per_replica)

    def address_of(self, replica: int) -> str:
        """`host:port` of one replica's sidecar."""
        return next(p.address for p in self.peers if p.replica == replica)


@dataclass(frozen=True, kw_only=True)
class PodIdentity:
    """What the operator or runner gives one pod at creation."""

    replica: int
    generation: int = 0
    """0: a bare topology without generations."""
    current: dict[int, int] = field(default_factory=dict)
    """Replica -> generation of the pod that was current when this one was created (itself too)."""
    replaces: int = 0
    """Generation of the pod that this one directly replaces; 0: none."""
    uid: str = ""


def read_topology(path: str) -> Topology:
    """Read a topology file. Raises OSError, or ProtocolError naming the field."""
    return codec.loads(Topology, read_small(path))


def read_pod(path: str) -> PodIdentity:
    """Read a pod's identity file. Raises OSError, or ProtocolError naming the field."""
    return codec.loads(PodIdentity, read_small(path))
