"""What happens to a restore round, and what it wants done: the vocabulary of rounds.py.

The leader turns replies and timers into events, and carries out effects. Every effect may be
carried out more than once and in any order with others; every event may come late, twice or never.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.explain import Explanation
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    Inventory,
    JoinRequest,
    LeaderDecision,
    PromiseReply,
    PromiseRequest,
    StoreReply,
    StoreRequest,
    VerdictRequest,
)
from backstay_protocol.origins import OtherRun
from backstay_protocol.records import AttemptRecord, Claim

# --- events: what the leader saw -----------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """The clock. Send it at least twice a second while a round is open; time-outs live on it."""

    now: float
    """Monotonic seconds."""


@dataclass(frozen=True)
class Joined:
    """A sidecar told which of its ranks wait in restore(). Repeats are harmless."""

    request: JoinRequest


@dataclass(frozen=True)
class PromiseAnswered:
    """A member answered AskPromise. `attempt`: the number that it was asked for."""

    replica: int
    attempt: int
    reply: PromiseReply


@dataclass(frozen=True)
class PromiseUnreachable:
    """A member did not answer AskPromise."""

    replica: int
    attempt: int
    why: str


@dataclass(frozen=True)
class ClaimMade:
    """Our claim was created."""

    attempt: int


@dataclass(frozen=True)
class ClaimTaken:
    """The claim's key exists. `round`, `owner`: what the claim there says ("" if unreadable)."""

    attempt: int
    round: str = ""
    owner: str = ""
    greatest: int = 0
    """Greatest claim there is, if the leader had a look; saves trying each number in turn."""


@dataclass(frozen=True)
class ClaimUnreachable:
    """The remote tier did not answer MakeClaim (the claim may or may not stand)."""

    attempt: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RemoteView:
    """What one listing of the remote tier showed; taken after the claim."""

    claims: tuple[int, ...] = ()
    """Attempt numbers of all claims."""
    bases: tuple[AttemptRecord, ...] = ()
    inventory: Inventory = field(default_factory=Inventory)
    """Every shard that has its manifest there (tier `remote`, holder -1), committed or not."""
    commits: frozenset[CheckpointId] = frozenset()
    intents: frozenset[CheckpointId] = frozenset()
    others: tuple[OtherRun, ...] = ()
    """The other runs that were asked for."""


@dataclass(frozen=True)
class RemoteListed:
    """The whole remote tier of this run was listed."""

    attempt: int
    view: RemoteView


@dataclass(frozen=True)
class ListingFailed:
    """The listing after the claim failed, or was not whole."""

    attempt: int
    why: str


@dataclass(frozen=True)
class VerdictGiven:
    """A sidecar whose ranks have all confirmed told how their loads went."""

    request: VerdictRequest


@dataclass(frozen=True)
class BaseWritten:
    """The base record stands in the remote tier (created now or by an earlier try)."""

    attempt: int


@dataclass(frozen=True)
class BaseUnreachable:
    """The remote tier did not answer WriteBase."""

    attempt: int
    why: str


@dataclass(frozen=True)
class StoreAnswered:
    """A member answered AskStore. `ran`: which of the two stores it was asked for."""

    replica: int
    attempt: int
    ran: bool
    reply: StoreReply


@dataclass(frozen=True)
class StoreUnreachable:
    """A member did not answer AskStore."""

    replica: int
    attempt: int
    ran: bool
    why: str


Event = (
    Tick
    | Joined
    | PromiseAnswered
    | PromiseUnreachable
    | ClaimMade
    | ClaimTaken
    | ClaimUnreachable
    | RemoteListed
    | ListingFailed
    | VerdictGiven
    | BaseWritten
    | BaseUnreachable
    | StoreAnswered
    | StoreUnreachable
)

# --- effects: what the leader shall do ------------------------------------------------------------


@dataclass(frozen=True)
class AskPromise:
    """POST /v1/round/promise to one member -> PromiseAnswered or PromiseUnreachable."""

    replica: int
    request: PromiseRequest


@dataclass(frozen=True)
class MakeClaim:
    """Create the claim, conditionally -> ClaimMade, ClaimTaken or ClaimUnreachable."""

    claim: Claim
    """`created` is 0: the leader fills in the time."""


@dataclass(frozen=True)
class ListRemote:
    """List claims, bases, commits, shards, intents -> RemoteListed or ListingFailed."""

    attempt: int
    runs: tuple[str, ...] = ()
    """Other runs to be listed as well, only to read."""


@dataclass(frozen=True)
class Announce:
    """Answer every waiting join with `load` and this decision (and older serials with `again`)."""

    decision: LeaderDecision


@dataclass(frozen=True)
class WriteBase:
    """Create the base record, conditionally -> BaseWritten or BaseUnreachable."""

    record: AttemptRecord


@dataclass(frozen=True)
class AskStore:
    """POST /v1/round/store to one member -> StoreAnswered or StoreUnreachable."""

    replica: int
    request: StoreRequest


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a restore did, for people."""

    reason: str
    bytes_by_tier: dict[str, int]
    lost_steps: int
    """Steps trained by the last attempt and not in the base; -1: not known."""
    bad: tuple[str, ...]
    """Copies struck out, in sentences."""
    seconds: float
    claimed: bool
    base_recorded: bool
    """False: the base record must be written before the attempt's first upload."""
    explanation: Explanation = field(default_factory=Explanation)


@dataclass(frozen=True)
class Begin:
    """All have stored the go-ahead: answer the verdicts with `go`. The round is over."""

    record: AttemptRecord
    summary: Summary


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The round is over without an attempt. `retry`: open another one after `after_seconds`.

    With retry the waiting joins keep waiting and the loads in flight are answered `again`; without
    it all are answered `failed` with `why`.
    """

    code: str
    why: str
    retry: bool
    after_seconds: float = 0.0


@dataclass(frozen=True)
class Waiting:
    """Nothing to do but to say why the ranks wait (shown to people)."""

    message: str


Effect = (
    AskPromise | MakeClaim | ListRemote | Announce | WriteBase | AskStore | Begin | GiveUp | Waiting
)

# --- reason codes of GiveUp -----------------------------------------------------------------------

MISFIT = "WorldMisfit"
BARRIER = "BarrierExpired"
REJOINED = "RankRejoined"
STOOD_DOWN = "NewerWorldExists"
NUMBER_TAKEN = "NumberTaken"
MEMBER_AWAY = "MemberUnreachable"
MEMBER_REFUSED = "MemberRefused"
REMOTE_AWAY = "RemoteAway"
LISTING_FAILED = "ListingFailed"
NOTHING_USABLE = "NothingToRestore"
CANT_LOAD = "CannotLoad"
SOURCES_AWAY = "SourcesUnreachable"
RESTARTS_SPENT = "RestartsSpent"
