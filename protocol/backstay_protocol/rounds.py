"""A restore round as a pure state machine: how an attempt begins. Driven by the sidecar's leader.

`begin` opens a round, `advance` takes one event and answers the new round and what to do now. The
leader carries effects out one message at a time and may crash between any two of them; nothing here
is kept that the next round can't find again. Rules that it carries (PROTOCOL.md): fence, promise,
claimnobase, claimed, standdown, known, current, together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from backstay_protocol.choice import Base, Fresh, Strike
from backstay_protocol.messages import (
    JoinReply,
    JoinRequest,
    LeaderDecision,
    PromiseReply,
    RankVerdict,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.promises import current_attempt, heeds, in_line, merge, promise, store
from backstay_protocol.records import AttemptRecord
from backstay_protocol.round_events import (
    Announce,
    AskPromise,
    AskStore,
    BaseUnreachable,
    BaseWritten,
    Begin,
    ClaimMade,
    ClaimTaken,
    ClaimUnreachable,
    Effect,
    Event,
    GiveUp,
    Joined,
    ListingFailed,
    ListRemote,
    MakeClaim,
    PromiseAnswered,
    PromiseUnreachable,
    RemoteListed,
    RemoteView,
    StoreAnswered,
    StoreUnreachable,
    Summary,
    Tick,
    VerdictGiven,
    Waiting,
    WriteBase,
)
from backstay_protocol.topology import RestoreOptions, Topology

__all__ = [
    "Announce",
    "AskPromise",
    "AskStore",
    "BaseUnreachable",
    "BaseWritten",
    "Begin",
    "ClaimMade",
    "ClaimTaken",
    "ClaimUnreachable",
    "Effect",
    "Event",
    "GiveUp",
    "Joined",
    "ListRemote",
    "ListingFailed",
    "MakeClaim",
    "Phase",
    "PromiseAnswered",
    "PromiseUnreachable",
    "RemoteListed",
    "RemoteView",
    "Round",
    "RoundSettings",
    "StoreAnswered",
    "StoreUnreachable",
    "Summary",
    "Tick",
    "VerdictGiven",
    "Waiting",
    "WriteBase",
    "advance",
    "answer_join",
    "answer_verdict",
    "begin",
    "current_attempt",
    "heeds",
    "in_line",
    "merge",
    "promise",
    "round_settings",
    "store",
]


class Phase(Enum):
    """Where a round stands."""

    GATHER = "gather"
    """Ranks join; nothing was asked of anybody yet."""
    PROMISE = "promise"
    CLAIM = "claim"
    LIST = "list"
    HOLD = "hold"
    """Decided; the back-off of a crash loop runs."""
    LOAD = "load"
    BASE = "base"
    STORE = "store"
    GO = "go"
    BEGUN = "begun"
    """Over: the attempt has its go-ahead."""
    ENDED = "ended"
    """Over: given up."""


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """What a round must know of the job; see `round_settings`."""

    replicas: int
    processes_per_replica: int
    remote_configured: bool
    owner: str
    restore: RestoreOptions = field(default_factory=RestoreOptions)
    ask_again_seconds: float = 1.0
    """A member or store that did not answer is asked again after so long."""
    member_patience_seconds: float = 30.0
    """A member that did not answer for so long ends the round."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.processes_per_replica


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round. Frozen: `advance` returns the next one. Only `name`, `phase`, `attempt`, `message`,
    `decision`, `record`, `summary` and `give_up` are for readers outside this module."""

    name: str
    """Nonce of the round; another one for every round, of any leader, ever."""
    started: float
    now: float
    phase: Phase = Phase.GATHER
    message: str = ""
    """Why the ranks wait, for people."""
    attempt: int = 0
    """The number that is being taken; 0 while joins are gathered."""
    joins: Mapping[int, JoinRequest] = field(default_factory=dict)
    promises: Mapping[int, PromiseReply] = field(default_factory=dict)
    claimed: bool = False
    remote: RemoteView | None = None
    remote_away_since: float | None = None
    struck: Mapping[Strike, str] = field(default_factory=dict)
    """Copy -> what was found wrong with it."""
    unreachable: Mapping[int, frozenset[str]] = field(default_factory=dict)
    choice: Base | Fresh | None = None
    serial: int = 0
    decision: LeaderDecision | None = None
    verdicts: Mapping[int, tuple[RankVerdict, ...]] = field(default_factory=dict)
    stored: frozenset[int] = frozenset()
    waiting_for: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Replica -> (silent since, ask again at)."""
    ask_remote_at: float | None = None
    record: AttemptRecord | None = None
    base_recorded: bool = False
    summary: Summary | None = None
    give_up: GiveUp | None = None


def round_settings(topology: Topology) -> RoundSettings:
    """The settings of a topology."""
    raise NotImplementedError


def begin(name: str, now: float, previous: Round | None = None) -> Round:
    """Open a round. `previous`: the one that was given up; its joins and strikes are kept."""
    raise NotImplementedError


def advance(
    current: Round, event: Event, settings: RoundSettings
) -> tuple[Round, tuple[Effect, ...]]:
    """Take one event. What does not belong to the round as it stands changes nothing."""
    raise NotImplementedError


def answer_join(current: Round, request: JoinRequest) -> JoinReply:
    """What to answer a waiting join at this moment: wait, load, or failed."""
    raise NotImplementedError


def answer_verdict(current: Round, request: VerdictRequest) -> VerdictReply:
    """What to answer a waiting verdict at this moment: wait, go, again, or failed."""
    raise NotImplementedError
