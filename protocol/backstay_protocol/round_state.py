"""The state of one restore round. Values only; rounds.py changes them, answers read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from backstay_protocol.choice import Chosen, Strike
from backstay_protocol.explain import Explanation
from backstay_protocol.messages import JoinRequest, LeaderDecision, PromiseReply, RankVerdict
from backstay_protocol.origins import OriginStrike
from backstay_protocol.records import AttemptRecord
from backstay_protocol.round_events import GiveUp, RemoteView, Summary
from backstay_protocol.topology import RestoreOptions, Topology


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

    def ranks_of(self, replica: int) -> range:
        """Global ranks of one replica."""
        first = replica * self.processes_per_replica
        return range(first, first + self.processes_per_replica)


def round_settings(topology: Topology) -> RoundSettings:
    """The settings of a topology."""
    return RoundSettings(
        replicas=topology.replicas,
        processes_per_replica=topology.processes_per_replica,
        remote_configured=topology.tiers.remote is not None,
        owner=topology.owner,
        restore=topology.restore,
    )


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round. Frozen: `advance` returns the next one.

    For readers outside rounds.py: `name`, `phase`, `attempt`, `message`, `decision`, `choice`,
    `record`, `summary`, `give_up`, `joins`, `nonces`, `known`, `remote`, `claimed`, `struck`.
    """

    name: str
    """Nonce of the round; another one for every round, of any leader, ever."""
    started: float
    """When the ranks began to wait, over all rounds of this restore."""
    gathering_since: float
    now: float
    phase: Phase = Phase.GATHER
    message: str = ""
    """Why the ranks wait, for people."""
    known: int = 0
    """Greatest attempt number seen anywhere so far."""
    attempt: int = 0
    """The number that is being taken; 0 while joins are gathered."""
    joins: Mapping[int, JoinRequest] = field(default_factory=dict)
    promises: Mapping[int, PromiseReply] = field(default_factory=dict)
    silent: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Member that did not answer -> (since when, when to ask again)."""
    claimed: bool = False
    remote: RemoteView | None = None
    remote_away_since: float | None = None
    ask_remote_at: float | None = None
    struck: Mapping[Strike, str] = field(default_factory=dict)
    """Copy that was proven bad -> the sentence that says so."""
    struck_origins: Mapping[OriginStrike, str] = field(default_factory=dict)
    """The same of shards of another run."""
    unreachable: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Reader replica -> "shard_rank/tier/holder" that it could not reach."""
    choice: Chosen | None = None
    explanation: Explanation = field(default_factory=Explanation)
    """Why `choice`, and why not the others."""
    hold_until: float = 0.0
    serial: int = 0
    decision: LeaderDecision | None = None
    """What the ranks load; None while there is none, or none any more."""
    announced: float = 0.0
    verdicts: Mapping[int, tuple[RankVerdict, ...]] = field(default_factory=dict)
    record: AttemptRecord | None = None
    base_recorded: bool = False
    stored: frozenset[int] = frozenset()
    summary: Summary | None = None
    give_up: GiveUp | None = None

    @property
    def over(self) -> bool:
        """Whether nothing can change any more."""
        return self.phase in (Phase.BEGUN, Phase.ENDED)

    @property
    def members(self) -> dict[int, int]:
        """Replica -> generation of the pods that have joined."""
        return {replica: join.generation for replica, join in self.joins.items()}

    @property
    def generation(self) -> int:
        """The world's: its newest pod's."""
        return max(self.members.values(), default=0)

    @property
    def nonces(self) -> dict[int, str]:
        """Rank -> nonce of the process that joined."""
        return {rank.rank: rank.nonce for join in self.joins.values() for rank in join.ranks}
