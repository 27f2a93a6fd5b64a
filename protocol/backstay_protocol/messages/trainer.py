"""A rank and its own sidecar, over the unix socket of the memory volume: captures and restore."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.ids import CheckpointId
from backstay_protocol.names import PROTOCOL_VERSION


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
    """What to load; None: start from nothing, at step 0, optimizer untouched."""
    saved_world_size: int = 0
    plan: str = ""
    chain: tuple[tuple[int, int], ...] = ()
    """Chain of `attempt`: goes into each manifest that it writes."""
    shards: tuple[ShardSources, ...] = ()
    reason: str = ""
    """Why this one, in a sentence."""
    skipped_bad: tuple[str, ...] = ()
    """Copies that were struck out on the way, in sentences."""
    base_run: str = ""
    """`<namespace>/<run name>` of the other run that `base` belongs to; empty: the job's own."""


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
