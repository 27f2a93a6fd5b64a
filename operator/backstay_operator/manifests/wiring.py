"""What a builder must know beyond the job itself: names, addresses, where the run's store is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backstay_operator.api.names import GROUP
from backstay_operator.settings import SidecarSettings
from backstay_protocol.topology import RestoreOptions

POD_INDEX_DIGITS = 5
RENDEZVOUS_PORT = 29400
MEMORY_MOUNT = "/backstay/memory"
LOCAL_MOUNT = "/backstay/local"
CONFIG_MOUNT = "/backstay/config"
CA_MOUNT = "/backstay/s3-ca"
CA_KEY = "ca.crt"  # in the Secret that remote.caSecret names
ACCESS_KEY = "accessKey"  # in the Secret that remote.credentialsSecret names, as the next two
SECRET_KEY = "secretKey"
SESSION_KEY = "sessionToken"
TOPOLOGY_FILE = "topology.json"
POD_FILE = "pod.json"
LABEL_ROLE = f"{GROUP}/role"
ROLE_REPLICA = "replica"
ROLE_FLUSH = "flush"
ANNOTATION_CHOICE = f"{GROUP}/restore-choice"  # token of spec.restore's choice when it was made
ANNOTATION_SPEC = f"{GROUP}/spec-digest"  # of what the pod was made of (cluster_pod.spec_digest)


def pod_name(job: str, replica: int, generation: int) -> str:
    """`<job>-<index>-<generation>`: fixed, so that a creation can be repeated."""
    return f"{job}-{replica}-{generation}"


def hostname(job: str, replica: int) -> str:
    """Stable over generations, padded: torchrun orders agents by it as a string."""
    return f"{job}-{replica:0{POD_INDEX_DIGITS}d}"


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """How the replicas of one job reach each other, by replica index."""

    hosts: Mapping[int, str]
    """Names or IPs, whose order as strings is the order of the replicas."""
    rendezvous_port: int = RENDEZVOUS_PORT
    rendezvous_id: str
    """The job's uid."""

    def __post_init__(self) -> None:
        in_order = [self.hosts[replica] for replica in sorted(self.hosts)]
        assert in_order == sorted(in_order), "torchrun would number the replicas in another order"

    @classmethod
    def in_cluster(cls, job: str, replicas: int, uid: str) -> Addresses:
        """DNS names under the job's headless Service."""
        hosts = {i: f"{hostname(job, i)}.{job}" for i in range(replicas)}
        return cls(hosts=hosts, rendezvous_id=uid)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Everything about a job that is decided outside its spec."""

    uid: str
    cluster: str = "local"
    addresses: Addresses
    first_generation: int
    restore: RestoreOptions | None = None
    """With the token of the choice by hand (decide.chosen); None: as in the spec."""
    remote_endpoint: str = ""
    """Of the embedded store, while it runs; else the spec's endpoint counts."""
    local_root: str = LOCAL_MOUNT
    """What the sidecars find their disks under."""
    s3_ca_file: str = ""
    """Authority of the object store, where it is a file of the machine and no Secret."""
    token_secret: str = ""
    """Secret with the job's `token`."""
    sidecar: SidecarSettings = field(default_factory=SidecarSettings)
    trainer_env: Mapping[str, str] = field(default_factory=dict)
    """More environment for the trainer; the user's own wins."""
