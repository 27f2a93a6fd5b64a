"""Drives the pure round of `backstay_protocol.rounds`: effects become calls, answers become events.

Used by the leader alone. All state that matters is the frozen Round; a crash of this process loses
nothing that the members don't tell again. Every call out has a bound, and an answer that comes
after its round is over is dropped.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from backstay_protocol import rounds
from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError, Unreachable
from backstay_protocol.faults import fault
from backstay_protocol.messages import (
    FAILED,
    GO,
    LOAD,
    WAIT,
    JoinReply,
    JoinRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.names import PROTOCOL_VERSION, works_with
from backstay_protocol.records import AttemptRecord
from backstay_protocol.round_events import MEMBER_AWAY, REJOINED
from backstay_protocol.rounds import Phase, Round
from backstay_protocol.topology import PodIdentity, Topology
from backstay_sidecar.restore.ports import Emit, MemberDoor, Peers
from backstay_sidecar.restore.remote_book import RemoteBook, trouble_code
from backstay_sidecar.restore.signals import Changes, Tasks

R = TypeVar("R")
TICK_SECONDS = 0.25
MAX_WAIT_SECONDS = 30.0
PROMISE_SECONDS = 120.0
"""A promise seals the member's slots, a pass over all of them."""
STORE_SECONDS = 15.0
REJOIN_SECONDS = 0.5
"""A launcher that restarts one process restarts all: the others are on their way too."""
CLAIM_SECONDS = 20.0
"""A world in line goes on without its claim when the store hangs for so long."""
LIST_SECONDS = 120.0
"""A long listing takes a while; the store's client bounds each call of it."""


Work = Callable[[], Coroutine[Any, Any, rounds.Event]]


class Begun(NamedTuple):
    """The attempt that has its go-ahead, as the round left it."""

    record: AttemptRecord
    summary: rounds.Summary
    joined_seconds_ago: float
    """Since the last rank had joined."""


class RoundDriver:
    """One per leader."""

    def __init__(
        self,
        *,
        topology: Topology,
        pod: PodIdentity,
        own: MemberDoor,
        peers: Peers,
        book: RemoteBook | None,
        clock: Clock,
        emit: Emit,
        begun: Callable[[Begun], None],
        interval: Callable[[AttemptRecord], int] = lambda record: 0,
    ) -> None:
        """`begun` is told of each go-ahead, before anybody is answered `go`. `interval`: the
        capture interval that an attempt begins with, 0: as each topology says.
        """
        self._replica = pod.replica
        self._own = own
        self._peers = peers
        self._book = book
        self._clock = clock
        self._emit = emit
        self._begun = begun
        self._interval = interval
        self._intervals: dict[str, int] = {}
        """Of the round that is stored now: the same for all members."""
        self._settings = rounds.round_settings(topology)
        remote = topology.tiers.remote
        self._store_name = f"bucket {remote.bucket!r} at {remote.endpoint}" if remote else ""
        self._waiting: dict[int, JoinRequest] = {}
        """Newest join of each replica whose ranks wait for an attempt to begin."""
        self._round = self._new_round(None)
        self._reopen_at: float | None = None
        self._joined_at = 0.0
        """When all had joined, monotonic."""
        self._away = ("", "")
        self._changes = Changes()
        self._tasks = Tasks(emit)
        self._asked: set[str] = set()

    @property
    def round(self) -> Round:
        """As it stands."""
        return self._round

    @property
    def waiting(self) -> dict[int, JoinRequest]:
        """Replicas whose ranks are in restore."""
        return dict(self._waiting)

    @property
    def away(self) -> tuple[str, str]:
        """Why the round can't use the remote tier, and the TIER_ code of it; empty: it can."""
        return self._away

    async def run(self) -> None:
        """For as long as the sidecar lives: let time pass while somebody waits."""
        while True:
            if await self._changes.until(lambda: bool(self._waiting), MAX_WAIT_SECONDS):
                self._pass_time()
                await asyncio.sleep(TICK_SECONDS)

    async def close(self) -> None:
        """End every call that is out."""
        await self._tasks.close()

    # --- members ------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> JoinReply:
        """Held until there is an answer, or its time is up."""
        if not works_with(request.protocol):
            return JoinReply(
                status=FAILED,
                message=f"replica {request.replica} speaks protocol {request.protocol}, the leader "
                f"{PROTOCOL_VERSION}; give all pods one version of the sidecar image",
            )
        choice = self._settings.restore.choice
        if choice is not None and (why := choice.unknown_to(request.protocol)):
            return JoinReply(status=FAILED, message=f"replica {request.replica}'s sidecar: {why}")
        self._admit(request)
        await self._changes.until(
            lambda: rounds.answer_join(self._round, request).status != WAIT,
            min(request.wait_seconds, MAX_WAIT_SECONDS),
        )
        return rounds.answer_join(self._round, request)

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        """Held until all have told how their loads went, or its time is up."""
        if self._began_before(request):
            message = "the go-ahead was given before the leader's sidecar restarted"
            return VerdictReply(status=GO, message=message, record=self._own.record)
        self.feed(rounds.VerdictGiven(request))
        await self._changes.until(
            lambda: rounds.answer_verdict(self._round, request).status != WAIT,
            min(request.wait_seconds, MAX_WAIT_SECONDS),
        )
        return rounds.answer_verdict(self._round, request)

    def _began_before(self, request: VerdictRequest) -> bool:
        """An earlier process of this leader gave the go-ahead: all have stored it, this one too."""
        nothing_since = self._round.phase is Phase.GATHER and not self._waiting
        return nothing_since and self._own.ran(request.round)

    def _admit(self, request: JoinRequest) -> None:
        known = self._waiting.get(request.replica)
        if known is not None and request.generation < known.generation:
            return  # a replaced pod; answer_join tells it
        self._peers.moved(request.replica, request.address)
        if rounds.answer_join(self._round, request).status == LOAD:
            return  # the same processes ask again; BEGUN, they are let in again
        idle = self._round.phase is Phase.GATHER and not self._round.joins
        if idle or self._round.phase is Phase.BEGUN or self._failed_for_others(request):
            self._round, self._reopen_at = self._new_round(self._round), None
        self._waiting[request.replica] = request
        self.feed(rounds.Tick(self._clock.monotonic()))
        self.feed(rounds.Joined(request))
        self._changes.notify()

    def _failed_for_others(self, request: JoinRequest) -> bool:
        """The round failed for good, and these processes were not in it: they try anew."""
        give_up = self._round.give_up
        if give_up is None or give_up.retry:
            return False
        nonces = self._round.nonces
        return any(nonces.get(rank.rank) != rank.nonce for rank in request.ranks)

    # --- the machine --------------------------------------------------------------------------

    def feed(self, event: rounds.Event) -> None:
        """Take one event and start what it asks for."""
        before = self._round
        self._round, effects = rounds.advance(self._round, event, self._settings)
        for effect in effects:
            self._carry_out(effect)
        if before.phase is Phase.GATHER and self._round.phase is Phase.PROMISE:
            self._joined_at = self._clock.monotonic()
        if self._round.phase is not before.phase:
            self._emit(
                "round",
                round=self._round.name,
                phase=self._round.phase.value,
                attempt=self._round.attempt,
                message=self._round.message,
            )
            self._changes.notify()
        elif self._round.message != before.message or self._round.serial != before.serial:
            self._changes.notify()

    def _pass_time(self) -> None:
        now = self._clock.monotonic()
        if self._reopen_at is not None and now >= self._reopen_at:
            self._round, self._reopen_at = self._new_round(self._round), None
            for _, request in sorted(self._waiting.items()):
                self.feed(rounds.Joined(request))
        self.feed(rounds.Tick(now))

    def _new_round(self, previous: Round | None) -> Round:
        return rounds.begin(uuid.uuid4().hex, self._clock.monotonic(), previous)

    def _carry_out(self, effect: rounds.Effect) -> None:
        match effect:
            case rounds.AskPromise():
                self._start(f"promise {effect.replica}", partial(self._ask_promise, effect))
            case rounds.AskStore():
                record = self._with_interval(effect.request.round, effect.request.record)
                effect = replace(effect, request=replace(effect.request, record=record))
                ran = record.ran
                self._start(f"store {effect.replica} {ran}", partial(self._ask_store, effect))
            case rounds.MakeClaim():
                self._start("claim", partial(self._claim, effect))
            case rounds.ListRemote():
                self._start("list", partial(self._list, effect))
            case rounds.WriteBase():
                self._start("base", partial(self._write_base, effect))
            case rounds.Begin():
                self._begin(effect)
            case rounds.GiveUp():
                self._give_up(effect)
            case rounds.Announce() | rounds.Waiting():
                pass  # answers are read off the round itself

    def _with_interval(self, round_name: str, record: AttemptRecord) -> AttemptRecord:
        name = f"{round_name} {record.attempt}"
        if name not in self._intervals:
            self._intervals = {name: self._interval(record)}
        return replace(record, every_steps=self._intervals[name])

    def _begin(self, effect: rounds.Begin) -> None:
        fault("go.before")
        self._waiting.clear()
        self._away = ("", "")  # from here on the duties tell how it does
        ago = self._clock.monotonic() - self._joined_at
        record = self._with_interval(self._round.name, effect.record)
        self._begun(Begun(record, effect.summary, ago))

    def _give_up(self, effect: rounds.GiveUp) -> None:
        self._emit("round_given_up", code=effect.code, message=effect.why, retry=effect.retry)
        if not effect.retry:
            self._waiting.clear()
            return
        settle = REJOIN_SECONDS if effect.code == REJOINED else 0.0
        self._reopen_at = self._clock.monotonic() + max(effect.after_seconds, settle)
        for silent in self._round.silent if effect.code == MEMBER_AWAY else ():
            self._waiting.pop(
                silent, None
            )  # it joins again when it lives: until then it is missing

    def _start(self, what: str, work: Work) -> None:
        """One call of a kind at a time: asked again while it is out, it is the same question."""
        question = f"{self._round.name} {self._round.attempt} {what}"
        if question in self._asked:
            return
        self._asked.add(question)
        self._tasks.spawn(self._answer(self._round.name, question, work))

    async def _answer(self, name: str, question: str, work: Work) -> None:
        try:
            event = await work()
        finally:
            self._asked.discard(question)
        if self._round.name == name:
            self.feed(event)

    # --- calls out, each answers with one event -----------------------------------------------

    async def _ask_promise(self, effect: rounds.AskPromise) -> rounds.Event:
        replica, request = effect.replica, effect.request
        try:
            if replica == self._replica:
                reply = await self._own.promise(request)
            else:
                reply = await self._peers.promise(replica, request, PROMISE_SECONDS)
        except (BackstayError, OSError) as error:
            return rounds.PromiseUnreachable(replica, request.attempt, str(error))
        return rounds.PromiseAnswered(replica, request.attempt, reply)

    async def _ask_store(self, effect: rounds.AskStore) -> rounds.Event:
        replica, request = effect.replica, effect.request
        attempt, ran = request.record.attempt, request.record.ran
        try:
            if replica == self._replica:
                reply = await self._own.store(request)
            else:
                reply = await self._peers.store(replica, request, STORE_SECONDS)
        except (BackstayError, OSError) as error:
            return rounds.StoreUnreachable(replica, attempt, ran, str(error))
        return rounds.StoreAnswered(replica, attempt, ran, reply)

    async def _claim(self, effect: rounds.MakeClaim) -> rounds.Event:
        claim = replace(effect.claim, created=self._clock.time())
        try:
            standing = await self._remotely(lambda book: book.claim(claim), CLAIM_SECONDS)
        except (BackstayError, OSError) as error:
            return rounds.ClaimUnreachable(claim.attempt, str(error))
        if standing is not None and standing.round != claim.round:
            return rounds.ClaimTaken(claim.attempt, standing.round, standing.owner)
        fault("claim.after")
        return rounds.ClaimMade(claim.attempt)

    async def _list(self, effect: rounds.ListRemote) -> rounds.Event:
        try:
            view = await self._remotely(lambda book: book.view(effect.runs), LIST_SECONDS)
        except (BackstayError, OSError) as error:
            return rounds.ListingFailed(effect.attempt, str(error))
        return rounds.RemoteListed(effect.attempt, view)

    async def _write_base(self, effect: rounds.WriteBase) -> rounds.Event:
        attempt = effect.record.attempt
        try:
            standing = await self._remotely(
                lambda book: book.write_base(effect.record), CLAIM_SECONDS
            )
        except (BackstayError, OSError) as error:
            return rounds.BaseUnreachable(attempt, str(error))
        ours = effect.record
        if (standing.base, standing.origin) != (ours.base, ours.origin):
            other = standing.base or standing.origin
            return rounds.BaseUnreachable(
                attempt, f"another base, {other}, is recorded for attempt {attempt}"
            )
        fault("base.after")
        return rounds.BaseWritten(attempt)

    async def _remotely(self, work: Callable[[RemoteBook], R], seconds: float) -> R:
        if self._book is None:
            raise Unreachable("this sidecar was given no access to the remote tier")
        try:
            async with asyncio.timeout(seconds):
                found = await self._book.call(work)
        except TimeoutError as error:
            text = (
                f"{self._store_name}: no answer within {seconds:.0f} s; the store hangs, or "
                "something between drops packets"
            )
            self._away = (text, trouble_code(error))
            raise Unreachable(text) from error
        except (BackstayError, OSError) as error:
            self._away = (str(error), trouble_code(error))
            raise
        self._away = ("", "")
        return found
