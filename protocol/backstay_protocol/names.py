"""Every name that two parts must agree on: environment, ports, URL paths, exit codes."""

from __future__ import annotations

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1  # what may change with it, and what else to do then: docs/compatibility.md
PROTOCOL_VERSION = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"

# --- environment: set by the operator or the local runner, read once at start -----------------
ENV_SWITCH = "BACKSTAY"  # "off": the library does nothing
ENV_POD_IP = "BACKSTAY_POD_IP"  # the address that peers are told; without it the topology's
ENV_NODE = "BACKSTAY_NODE"  # where the pod runs
ENV_VOLUME = "BACKSTAY_VOLUME"  # the memory volume; its presence is the Backstay environment
ENV_REPLICA = "BACKSTAY_REPLICA"  # index of this pod's replica
ENV_TOPOLOGY = "BACKSTAY_TOPOLOGY"  # sidecar: path of the topology file
ENV_POD = "BACKSTAY_POD"  # sidecar: path of this pod's identity file
ENV_TOKEN = "BACKSTAY_TOKEN"  # bearer token of the job
ENV_S3_ACCESS_KEY = "BACKSTAY_S3_ACCESS_KEY"
ENV_S3_SECRET_KEY = "BACKSTAY_S3_SECRET_KEY"
ENV_S3_SESSION_TOKEN = "BACKSTAY_S3_SESSION_TOKEN"
ENV_S3_AMBIENT = "BACKSTAY_S3_AMBIENT"  # "1": no keys; the place gives them where the sidecar runs
ENV_S3_CA_FILE = "BACKSTAY_S3_CA_FILE"  # whom to trust beside the public authorities, PEM
ENV_LOG_FORMAT = "BACKSTAY_LOG_FORMAT"  # sidecar: "json" (one object a line) or "text"
ENV_FAULTS = "BACKSTAY_FAULTS"  # fault points, see faults.py
ENV_EXIT_WITH_PARENT = "BACKSTAY_EXIT_WITH_PARENT"  # "1": a rank leaves when its parent is gone

# --- ports --------------------------------------------------------------------------------------
PORT_API = 7070  # peers, operator, people; bearer token
PORT_HEALTH = 7071  # kubelet and Prometheus; no token
SOCKET_NAME = "agent.sock"  # trainer, in the memory volume

# --- URL paths, the same constant at both ends -------------------------------------------------
URL_CAPTURES = "/v1/captures"
URL_RESTORE = "/v1/restore"
URL_CONFIRM = "/v1/restore/confirm"
URL_RESTORE_PREVIEW = "/v1/restore/preview"
URL_STATUS = "/v1/status"
URL_CHECKPOINTS = "/v1/checkpoints"
URL_CHECKPOINT = "/v1/checkpoints/{checkpoint}"
URL_SHARD = "/v1/checkpoints/{checkpoint}/shards/{rank}"
URL_SHARD_MANIFEST = "/v1/checkpoints/{checkpoint}/shards/{rank}/manifest"
URL_PIN = "/v1/checkpoints/{checkpoint}/pin"
URL_PERSIST = "/v1/checkpoints/{checkpoint}/persist"
URL_EVENTS = "/v1/events"
URL_REPLICAS = "/v1/replicas"
URL_POLICY = "/v1/policy"
URL_PLACEMENT = "/v1/placement"
URL_JOB = "/v1/job"
URL_FLUSH = "/v1/flush"
URL_JOIN = "/v1/leader/join"
URL_VERDICT = "/v1/leader/verdict"
URL_PROGRESS = "/v1/leader/progress"
URL_PROMISE = "/v1/round/promise"
URL_STORE = "/v1/round/store"
URL_HEALTHZ = "/healthz"
URL_READYZ = "/readyz"
URL_PRESTOP = "/prestop"
URL_METRICS = "/metrics"
HEADER_PROTOCOL = "Backstay-Protocol"

# --- tiers ---------------------------------------------------------------------------------------
MEMORY = "memory"
LOCAL = "local"
NEIGHBOR = "neighbor"
REMOTE = "remote"
TIERS = (MEMORY, LOCAL, NEIGHBOR, REMOTE)  # nearest first

# --- exit codes of the library's own exits -------------------------------------------------------
EXIT_LEAVE = 76  # told to leave by the leader
EXIT_ORPHAN = 77  # the parent is gone

# --- names inside a shard file -------------------------------------------------------------------
RESERVED = "__backstay__."
PLAN_LOCAL = "local"

DEFAULT_CHUNK_BYTES = 8 << 20
DEFAULT_SLOTS = 2
PROGRESS_SECONDS = 2.0
CONTROL_BYTES = 4096


def rank_name(rank: int, name: str) -> str:
    """Name in the shard file of a tensor that one rank keeps for itself."""
    return f"{RESERVED}rank.{rank}.{name}"


def objects_name(rank: int) -> str:
    """Name of the U8 tensor that carries one rank's typed JSON; last in its file."""
    return f"{RESERVED}objects.{rank}"


def works_with(version: str) -> bool:
    """Whether a running part of that version can be talked to: neighbouring minors of one major."""
    minor = _minor_of(version)
    return minor is not None and abs(minor - PROTOCOL_MINOR) <= 1


def can_read(version: str) -> bool:
    """Whether what was kept by that version can be read: every older minor, and the next one."""
    minor = _minor_of(version)
    return minor is not None and minor <= PROTOCOL_MINOR + 1


def knows(version: str, minor: int) -> bool:
    """Whether a part of that version knows what a minor of this major brought."""
    found = _minor_of(version)
    return found is not None and found >= minor


def _minor_of(version: str) -> int | None:
    """None: another major, or not a version."""
    try:
        major, minor = (int(part) for part in version.split("."))
    except ValueError:
        return None
    return minor if major == PROTOCOL_MAJOR else None
