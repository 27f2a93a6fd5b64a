"""TrainingJob `backstay.dev/v1alpha1`, as frozen values. `read.py` makes them of a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay_protocol.names import DEFAULT_SLOTS
from backstay_protocol.topology import DEFAULT_REGION, RestoreOptions, Retention, Schedule

TORCHRUN = "torchrun"
STATIC = "static"
NONE = "none"
LAUNCHERS = (TORCHRUN, STATIC, NONE)

HOST_PATH = "hostPath"
PVC = "pvc"
EPHEMERAL = "ephemeral"
VOLUME_NONE = "none"
VOLUMES = (HOST_PATH, PVC, EPHEMERAL, VOLUME_NONE)

CLEAN_RUNNING = "Running"
CLEAN_ALL = "All"
CLEAN_NONE = "None"
CLEANUP_POLICIES = (CLEAN_RUNNING, CLEAN_ALL, CLEAN_NONE)

DEFAULT_TOPOLOGY_KEY = "topology.kubernetes.io/zone"


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """`checkpoint.memory`: how often the state is captured, and the volume it is captured into."""

    schedule: Schedule
    slots: int = DEFAULT_SLOTS
    size_limit_bytes: int
    """Of one pod's memory volume: slots x state of its ranks, plus 10 %."""


@dataclass(frozen=True, kw_only=True)
class LocalSpec:
    """`checkpoint.local`: the node's disk."""

    schedule: Schedule = field(default_factory=Schedule)
    retention: Retention = field(default_factory=Retention)
    volume: str = HOST_PATH
    path: str = "/var/lib/backstay"
    """Folder on the node, for `hostPath`."""
    size: str = ""
    """Requested size, for `pvc` and `ephemeral`."""
    storage_class_name: str = ""


@dataclass(frozen=True, kw_only=True)
class NeighborSpec:
    """`checkpoint.neighbor`: copies on another replica's disk."""

    schedule: Schedule = field(default_factory=Schedule)
    topology_key: str = DEFAULT_TOPOLOGY_KEY
    """Node label; a copy goes to a node of another value where there is one."""
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class RemoteSpec:
    """`checkpoint.remote`: MinIO or another S3 store."""

    endpoint: str = ""
    """`http(s)://host[:port]`; empty when embedded."""
    embedded: bool = False
    """The local runner brings its own store; a cluster refuses this."""
    bucket: str
    prefix: str = ""
    region: str = DEFAULT_REGION
    schedule: Schedule = field(default_factory=Schedule)
    retention: Retention = field(default_factory=Retention)
    credentials_secret: str = ""
    """Secret with `accessKey`, `secretKey` and perhaps `sessionToken`."""
    workload_identity: bool = False
    """The pod's service account gives the rights; there are no keys."""
    ca_secret: str = ""
    """Secret with `ca.crt`, the authority that signed the endpoint's certificate."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """`spec.checkpoint`: the run and its tiers."""

    run_name: str
    memory: MemorySpec
    local: LocalSpec | None = None
    neighbor: NeighborSpec | None = None
    remote: RemoteSpec | None = None


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """`failurePolicy`: when failures end the job (beside `restore.maxRestarts`)."""

    early_deaths: int = 6
    """Starts in a row that end before their rank ever joined."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """`spec`."""

    replicas: int
    processes_per_replica: int = 1
    launcher: str = TORCHRUN
    pod_template: Mapping[str, Any]
    """A pod template; its container `trainer` is the user's program."""
    checkpoint: CheckpointSpec
    restore: RestoreOptions = field(default_factory=RestoreOptions)
    hang_seconds: float = 0.0
    suspend: bool = False
    queue_name: str = ""
    """Kueue's LocalQueue; empty: none."""
    drain_hold_seconds: int = 300
    """How long a drained node is held until all is saved elsewhere."""
    node_lost_seconds: int = 0
    """A node that is not ready for so long counts as lost; 0: the operator's setting."""
    final_save_seconds: int = 300
    """How long a job that completed waits for its last checkpoint to become durable."""
    cleanup_pod_policy: str = CLEAN_RUNNING
    """Which pods are deleted when the job has ended."""
    ttl_seconds_after_finished: int | None = None
    """The TrainingJob is deleted so long after its end; None: never."""
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The user's container."""
        containers = self.pod_template["spec"]["containers"]
        found: Mapping[str, Any] = next(c for c in containers if c["name"] == "trainer")
        return found


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One job."""

    name: str
    namespace: str = "default"
    spec: JobSpec

    @property
    def run(self) -> str:
        """`<namespace>/<run name>`: what its checkpoints are kept under."""
        return f"{self.namespace}/{self.spec.checkpoint.run_name}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.replicas * self.spec.processes_per_replica
