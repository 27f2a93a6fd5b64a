"""What an operator or runner is told once, at start. Frozen; reads no environment itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SidecarSettings:
    """The sidecar container of every pod."""

    image: str = ""
    command: tuple[str, ...] = ("python", "-m", "backstay_sidecar")
    cpu: str = "500m"
    memory: str = "512Mi"
    """Pull buffers and 256 MiB (docs/guarantees.md, 8)."""
    grace_seconds: int = 120
    """Termination grace of a pod: long enough for one common save and its flush."""
    pull_policy: str = ""
    """imagePullPolicy; empty: Kubernetes' default for the image's tag."""
    log_format: str = "json"
    """Of its log: json or text; as the operator's own."""


@dataclass(frozen=True, kw_only=True)
class RestartSettings:
    """How containers and pods come back (`decide`)."""

    first_backoff_seconds: float = 10.0
    """Wait before the second restart in a row (the first is at once); doubled for each further."""
    most_backoff_seconds: float = 300.0
    calm_seconds: float = 600.0
    """A container that ran so long is restarted at once again."""
    early_deaths: int = 6
    """Trainer processes in a row that end before their rank ever joined; then the job fails."""
    flush_seconds: float = 300.0
    """How long a job whose replicas completed waits for its last checkpoint to become durable."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_backoff_seconds <= self.most_backoff_seconds:
            raise ValueError("first_backoff_seconds must be from 0 to most_backoff_seconds")
        if self.early_deaths < 1:
            raise ValueError("early_deaths must be 1 or more")


DRAIN_TAINTS = (
    "node.kubernetes.io/unschedulable",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
)
"""Keys of taints by which nodes are emptied; any effect counts."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How nodes of a real cluster are judged. The local runner has none."""

    drain_taints: tuple[str, ...] = DRAIN_TAINTS
    node_lost_seconds: float = 60.0
    """A node that has not been Ready for so long is lost; a job's own number wins."""


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """All of them."""

    sidecar: SidecarSettings = field(default_factory=SidecarSettings)
    restarts: RestartSettings = field(default_factory=RestartSettings)
