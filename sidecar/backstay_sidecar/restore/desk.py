"""Who of this pod is in restore, what they load, how they left: the member's memory, no I/O.

Used by the member only. All of it is told again by the ranks and the leader after a restart. Every
change wakes those who wait on `changes` and, where it makes talk with the leader stale, raises
`version`.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay_protocol.messages import (
    AGAIN,
    FAILED,
    GO,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    LeaderDecision,
    RankJoin,
    RankVerdict,
    RestoreRequest,
    VerdictReply,
)
from backstay_sidecar.restore.signals import Changes

REMEMBERED_NONCES = 1000
REPLACED = "this process was replaced by a newer one of the same rank; it must end"


@dataclass
class Joined:
    """One rank that is in restore."""

    request: RestoreRequest
    heard: float
    """Monotonic seconds."""
    open: int = 0
    """Requests of it that are held just now."""
    verdict: RankVerdict | None = None
    """About the decision in force."""


@dataclass(frozen=True)
class Ended:
    """The last go-ahead, and to whom it was given."""

    round: str
    nonces: dict[int, str]
    reply: VerdictReply


class Desk:
    """One per member."""

    def __init__(self) -> None:
        """Nobody is here yet."""
        self.changes = Changes()
        self.joins: dict[int, Joined] = {}
        self.decision: LeaderDecision | None = None
        """What is being loaded."""
        self.resolved: Decision | None = None
        """The same, for the ranks of this pod."""
        self.loaded: LeaderDecision | None = None
        """The last one that got its go-ahead."""
        self.failure = ""
        self.message = "joining"
        self.version = 0
        self._ended: Ended | None = None
        self._replaced: list[str] = []

    # --- coming and going ---------------------------------------------------------------------

    def admit(self, request: RestoreRequest, now: float) -> tuple[Joined, bool]:
        """(rank, is it new): a known nonce re-attaches, a new one takes the rank over."""
        joined = self.joins.get(request.rank)
        if joined is not None and joined.request.nonce == request.nonce:
            joined.heard, joined.verdict = now, None
            return joined, False
        if joined is not None:
            self._forget(joined.request.nonce)
        gone = self._ended.nonces.get(request.rank) if self._ended else None
        if gone is not None and gone != request.nonce:
            self._forget(gone)
        if self.failure:  # the others were told to end: who lives still asks again
            self.joins.clear()
        self.joins[request.rank] = joined = Joined(request, now)
        self.drop_decision("a process joined")
        self.failure = ""
        self._changed()
        return joined, True

    def drop_silent(self, oldest: float) -> list[Joined]:
        """Ranks that no longer ask for their decision are dead: the leader shall name them."""
        if self.decision is not None:
            return []
        silent = [j for j in self.joins.values() if not j.open and j.heard < oldest]
        for joined in silent:
            del self.joins[joined.request.rank]
            self._changed()
        return silent

    def end(self, round_name: str, reply: VerdictReply) -> None:
        """The go-ahead: all who are here leave."""
        nonces = {rank: joined.request.nonce for rank, joined in self.joins.items()}
        if self._ended is not None and self._ended.round == round_name:
            nonces = {**self._ended.nonces, **nonces}
        self._ended = Ended(round_name, nonces, reply)
        self.joins.clear()
        self.loaded, self.decision, self.resolved = self.decision, None, None
        self._changed()

    def was_replaced(self, nonce: str) -> bool:
        """Whether a newer process of the same rank has taken its place."""
        return nonce in self._replaced

    def _forget(self, nonce: str) -> None:
        self._replaced.append(nonce)
        del self._replaced[:-REMEMBERED_NONCES]

    def _changed(self) -> None:
        self.version += 1
        self.changes.notify()

    # --- what the leader said -----------------------------------------------------------------

    def accept(self, decision: LeaderDecision) -> None:
        """From now on this is loaded."""
        self.decision, self.resolved = decision, None
        for joined in self.joins.values():
            joined.verdict = None
        self.changes.notify()

    def drop_decision(self, why: str) -> None:
        """What is loaded counts no more: ranks ask for another decision."""
        if self.decision is None:
            return
        self.decision = self.resolved = None
        self.message = why
        for joined in self.joins.values():
            joined.verdict = None
        self._changed()

    def fail(self, why: str) -> None:
        """All who are here are told to end."""
        self.failure = why or "the leader gave the restore up"
        self.changes.notify()

    def say(self, message: str) -> None:
        """Why they wait."""
        self.message = message
        self.changes.notify()

    # --- answers ------------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Whether ranks wait for a decision."""
        return bool(self.joins) and self.decision is None and not self.failure

    def loads(self, request: RestoreRequest) -> bool:
        """Whether the decision in force is for this process, and it has not confirmed yet."""
        joined = self.joins.get(request.rank)
        if self.decision is None or joined is None or joined.verdict is not None:
            return False
        return self.decision.nonces.get(request.rank) == request.nonce

    def confirmed(self, request: ConfirmRequest, now: float) -> Joined:
        """A rank told how its load went."""
        joined = self.joins[request.rank]
        joined.heard = now
        joined.verdict = RankVerdict(
            rank=request.rank,
            nonce=request.nonce,
            ok=request.ok,
            bad=request.bad,
            error=request.error,
            bytes_by_tier=request.bytes_by_tier,
        )
        self.changes.notify()
        return joined

    def verdicts(self) -> tuple[RankVerdict, ...]:
        """Of all ranks that are here; empty while one is missing, or nothing is loaded."""
        if self.decision is None or self.failure:
            return ()
        given = [joined.verdict for _, joined in sorted(self.joins.items())]
        told = tuple(verdict for verdict in given if verdict is not None)
        return told if len(told) == len(given) else ()

    def went(self, request: ConfirmRequest) -> ConfirmReply | None:
        """The go-ahead, if this process was given it."""
        ended = self._ended
        if ended is None or ended.round != request.round:
            return None
        if ended.nonces.get(request.rank) != request.nonce:
            return None
        reply = ended.reply
        return ConfirmReply(
            status=GO,
            message=reply.message,
            bytes_by_tier=reply.bytes_by_tier,
            bad=reply.bad,
            lost_steps=reply.lost_steps,
        )

    def verdict_for(self, request: ConfirmRequest) -> ConfirmReply | None:
        """The answer to a confirm that has no go-ahead; None while it is open."""
        if self.failure:
            return ConfirmReply(status=FAILED, message=self.failure)
        joined, decision = self.joins.get(request.rank), self.decision
        if joined is None or joined.request.nonce != request.nonce or decision is None:
            return ConfirmReply(status=AGAIN, message="the round has begun anew")
        if (decision.round, decision.serial) != (request.round, request.serial):
            return ConfirmReply(status=AGAIN, message="the leader has decided again")
        return None

    def let_go(self, request: ConfirmRequest) -> None:
        """A rank that joined again for a round that it had its go-ahead for leaves restore."""
        joined = self.joins.get(request.rank)
        if joined is None or joined.request.nonce != request.nonce:
            return
        del self.joins[request.rank]
        if not self.joins:
            self.decision = self.resolved = None
        self._changed()

    def rank_joins(self) -> tuple[RankJoin, ...]:
        """As the leader is told of them."""
        return tuple(_rank_join(joined.request) for _, joined in sorted(self.joins.items()))


def _rank_join(request: RestoreRequest) -> RankJoin:
    return RankJoin(
        rank=request.rank,
        local_rank=request.local_rank,
        nonce=request.nonce,
        world_size=request.world_size,
        last_step=request.last_step,
        last_attempt=request.last_attempt,
    )
