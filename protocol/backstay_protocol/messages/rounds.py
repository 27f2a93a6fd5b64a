"""A sidecar and the leader while an attempt begins: join, promise, store, verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages.common import Inventory
from backstay_protocol.messages.trainer import BadSource
from backstay_protocol.names import PROTOCOL_VERSION
from backstay_protocol.records import AttemptRecord


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
    base_run: str = ""
    """`<namespace>/<run name>` of the other run that `base` belongs to; empty: the job's own. A
    member that does not know this field looks for `base` in its own run, and can't find it."""


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
