"""Drives the pure round of `backstay_protocol.rounds`: effects become calls, answers become events.

Used by the leader alone. All state that matters is the frozen Round; a crash of this process loses
nothing that the members don't tell again. Every call out has a bound, and an answer that comes after
its round is over is dropped.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from backstay_protocol import rounds
from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError
from backstay_protocol.faults import fault
from backstay_protocol.messages import (
    FAILED,
    WAIT,
    JoinReply,
    JoinRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.names import PROTOCOL_VERSION, works_with
from backstay_protocol.records import AttemptRecord
from backstay_protocol.rounds import Phase, Round
from backstay_protocol.topology import PodIdentity, Topology

from backstay_sidecar.restore.ports import Emit, MemberDoor, Peers
from backstay_sidecar.restore.remote_book import RemoteBook
from backstay_sidecar.restore.signals import Changes, Tasks

R = TypeVar("R")
TICK_SECONDS = 0.25
MAX_WAIT_SECONDS = 30.0
PROMISE_SECONDS = 120.0
"""A promise seals the member's slots, a pass over all of them."""
STORE_SECONDS = 15.0
REMOTE_SECONDS = 60.0
"""The store's client gives up long before; this bounds a hung thread."""


@dataclass(frozen=True)
class Begun:
    """The attempt that has its go-ahead, as the round left it."""

    record: AttemptRecord
    summary: rounds.Summary | None
    """None: begun by an earlier process of this leader."""


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
    ) -> None:
        """`begun` is told of each go-ahead, before anybody is answered `go`."""
        self._replica = pod.replica
        self._own = own
        self._peers = peers
        self._book = book
        self._clock = clock
        self._emit = emit
        self._begun = begun
        self._settings = rounds.round_settings(topology)
        self._round = self._open(None)
        self._changes = Changes()
        self._tasks = Tasks(emit)
        self._asked: set[str] = set()
        self._reopen_at: float | None = None

    @property
    def round(self) -> Round:
        """As it stands."""
        return self._round

    @property
    def open(self) -> bool:
        """Whether ranks wait for an attempt to begin."""
        return bool(self._round.joins) and self._round.phase is not Phase.BEGUN

    async def run(self) -> None:
        """For as long as the sidecar lives: let time pass."""
        while True:
            if self.open:
                self._pass_time()
                await asyncio.sleep(TICK_SECONDS)
            else:
                await self._changes.until(lambda: self.open, MAX_WAIT_SECONDS)

    def _pass_time(self) -> None:
        now = self._clock.monotonic()
        if self._reopen_at is not None and now >= self._reopen_at:
            self._round = self._open(self._round)
            self._changes.notify()
        self.feed(rounds.Tick(now))

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
        self._peers.moved(request.replica, request.address)
        if rounds.answers_anew(self._round, request):
            self._round = self._open(None)
            self._reopen_at = None
        self.feed(rounds.Joined(request))
        await self._changes.until(
            lambda: rounds.answer_join(self._round, request).status != WAIT,
            min(request.wait_seconds, MAX_WAIT_SECONDS),
        )
        return rounds.answer_join(self._round, request)

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        """Held until all have told how their loads went, or its time is up."""
        self.feed(rounds.VerdictGiven(request))
        await self._changes.until(
            lambda: rounds.answer_verdict(self._round, request).status != WAIT,
            min(request.wait_seconds, MAX_WAIT_SECONDS),
        )
        return rounds.answer_verdict(self._round, request)

    # --- the machine --------------------------------------------------------------------------

    def feed(self, event: rounds.Event) -> None:
        """Take one event and start what it asks for."""
        before = self._round
        self._round, effects = rounds.advance(self._round, event, self._settings)
        for effect in effects:
            self._carry_out(effect)
        if self._round.phase is not before.phase:
            self._emit(
                "round",
                round=self._round.name,
                phase=self._round.phase.value,
                attempt=self._round.attempt,
                message=self._round.message,
            )
        if self._round is not before:
            self._changes.notify()

    def _open(self, previous: Round | None) -> Round:
        self._reopen_at = None
        return rounds.begin(uuid.uuid4().hex, self._clock.monotonic(), previous)

    def _carry_out(self, effect: rounds.Effect) -> None:
        match effect:
            case rounds.AskPromise():
                self._start(f"promise {effect.replica}", self._ask_promise(effect))
            case rounds.AskStore():
                ran = effect.request.record.ran
                self._start(f"store {effect.replica} {ran}", self._ask_store(effect))
            case rounds.MakeClaim():
                self._start("claim", self._claim(effect))
            case rounds.ListRemote():
                self._start("list", self._list(effect))
            case rounds.WriteBase():
                self._start("base", self._write_base(effect))
            case rounds.Begin():
                fault("go.before")
                self._begun(Begun(effect.record, effect.summary))
            case rounds.GiveUp():
                self._give_up(effect)
            case rounds.Announce() | rounds.Waiting():
                pass  # answers are read off the round itself

    def _give_up(self, effect: rounds.GiveUp) -> None:
        self._emit("round_given_up", code=effect.code, message=effect.why, retry=effect.retry)
        if effect.retry:
            self._reopen_at = self._clock.monotonic() + effect.after_seconds

    def _start(self, what: str, work: Coroutine[Any, Any, rounds.Event]) -> None:
        """One call of a kind at a time: asked again while it is out, it is the same question."""
        question = f"{self._round.name} {self._round.attempt} {what}"
        if question in self._asked:
            work.close()
            return
        self._asked.add(question)
        self._tasks.spawn(self._answer(self._round.name, question, work))

    async def _answer(
        self, name: str, question: str, work: Coroutine[Any, Any, rounds.Event]
    ) -> None:
        try:
            event = await work
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
            standing = await self._remotely(lambda book: book.claim(claim))
        except (BackstayError, OSError, TimeoutError) as error:
            return rounds.ClaimUnreachable(claim.attempt, _words(error))
        if standing is not None and standing.round != claim.round:
            return rounds.ClaimTaken(claim.attempt, standing.round, standing.owner)
        fault("claim.after")
        return rounds.ClaimMade(claim.attempt)

    async def _list(self, effect: rounds.ListRemote) -> rounds.Event:
        try:
            view = await self._remotely(lambda book: book.view())
        except (BackstayError, OSError, TimeoutError) as error:
            return rounds.ListingFailed(effect.attempt, _words(error))
        return rounds.RemoteListed(effect.attempt, view)

    async def _write_base(self, effect: rounds.WriteBase) -> rounds.Event:
        attempt = effect.record.attempt
        try:
            standing = await self._remotely(lambda book: book.write_base(effect.record))
        except (BackstayError, OSError, TimeoutError) as error:
            return rounds.BaseUnreachable(attempt, _words(error))
        if standing.base != effect.record.base:
            return rounds.BaseUnreachable(
                attempt, f"another base, {standing.base}, is recorded for attempt {attempt}"
            )
        fault("base.after")
        return rounds.BaseWritten(attempt)

    async def _remotely(self, work: Callable[[RemoteBook], R]) -> R:
        assert self._book is not None
        async with asyncio.timeout(REMOTE_SECONDS):
            return await self._book.call(work)


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"the remote tier did not answer within {REMOTE_SECONDS:.0f} s"
    return str(error)
