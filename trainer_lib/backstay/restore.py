"""One rank's side of the collective restore: join, load what was decided, tell, begin.

Called by checkpointer.py before training. The loop here only carries the protocol; what loading
means is the `load` function that is passed in (load.py). Nothing is decided here: the leader
decides, and decides again for everyone when one source proves bad.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from backstay.client import LONG_POLL_MARGIN_SECONDS, SidecarClient
from backstay.errors import RestoreFailed, SidecarSilent
from backstay.settings import Settings
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.errors import ProtocolError, Refused, Unreachable
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    AGAIN,
    FAILED,
    GO,
    LOAD,
    WAIT,
    BadSource,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    RestoreReply,
    RestoreRequest,
)
from backstay_protocol.names import URL_CONFIRM, URL_RESTORE

T = TypeVar("T")

SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RestorePoint:
    """Where training begins. Returned by `Checkpointer.restore()`."""

    step: int
    """Steps that are done: the loop goes on with this one. 0 on a fresh start."""
    attempt: int = 0
    """Number of this (re)start of the world; 0 outside a Backstay environment."""
    fresh: bool = True
    """Nothing was loaded: no checkpoint exists, or Backstay is off."""
    checkpoint: CheckpointId | None = None
    """What was loaded."""
    run: str = ""
    """`<namespace>/<run name>` of another run that `checkpoint` belongs to; empty: this job's."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tier -> bytes that this rank read from it."""
    sources_of_all: dict[str, int] = field(default_factory=dict)
    """Tier -> bytes that all ranks together read from it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the script gave to `step()` or `save()` with the checkpoint."""
    lost_steps: int = -1
    """Steps that the last attempt trained beyond the checkpoint; -1: not known."""
    bad: tuple[str, ...] = ()
    """Copies that were found damaged and struck out on the way, in sentences."""
    reason: str = ""
    """Why this checkpoint, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """How one decision's load went on this rank."""

    bad: tuple[BadSource, ...] = ()
    error: Exception | None = None
    """What can't be restored here whatever the source: it ends the restore of all ranks."""
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every byte is in place and verified."""
        return not self.bad and self.error is None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Outcome of a restore: where to begin, and what the sidecar said about the job."""

    point: RestorePoint
    reply: RestoreReply
    decision: Decision


class Messages:
    """What people are told while they wait: the newest message, at most every ten seconds."""

    def __init__(self, say: Callable[[str], None], clock: Clock) -> None:
        """`say` prints or logs one line."""
        self._say = say
        self._clock = clock
        self._next = clock.monotonic() + SAY_EVERY_SECONDS / 5
        self._last = ""

    def __call__(self, message: str) -> None:
        """Show the message if the time has come and there is something to show."""
        now = self._clock.monotonic()
        if not message or now < self._next:
            return
        self._next = now + SAY_EVERY_SECONDS
        self._say(message)


class Round:
    """Joins and verdicts of one process."""

    def __init__(
        self,
        client: SidecarClient,
        settings: Settings,
        last_step: int,
        last_attempt: int,
        say: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`last_step`, `last_attempt`: what an earlier process left in the control block."""
        self._client = client
        self._settings = settings
        self._messages = Messages(say, clock)
        self._request = RestoreRequest(
            rank=settings.rank,
            local_rank=settings.local_rank,
            world_size=settings.world_size,
            nonce=uuid.uuid4().hex,
            pid=os.getpid(),
            last_step=last_step,
            last_attempt=last_attempt,
        )

    def run(self, load: Callable[[Decision], Loaded]) -> Joined:
        """Until the world goes on together. Raises RestoreFailed (or what `load` reported)."""
        while True:
            reply = self._join()
            decision = reply.decision
            assert decision is not None
            loaded = load(decision)
            fault("load.before_confirm")
            verdict = self._confirm(decision, loaded)
            if verdict.status == GO:
                return Joined(
                    point=_point(decision, loaded, verdict), reply=reply, decision=decision
                )

    def _join(self) -> RestoreReply:
        while True:
            reply = self._ask(URL_RESTORE, self._request, RestoreReply)
            if reply.status == LOAD and reply.decision is not None:
                return reply
            self._go_on_waiting(reply.status, reply.message)

    def _confirm(self, decision: Decision, loaded: Loaded) -> ConfirmReply:
        request = ConfirmRequest(
            rank=self._settings.rank,
            nonce=self._request.nonce,
            round=decision.round,
            serial=decision.serial,
            ok=loaded.ok,
            bad=loaded.bad,
            error="" if loaded.error is None else str(loaded.error),
            bytes_by_tier=loaded.bytes_by_tier,
        )
        while True:
            reply = self._ask(URL_CONFIRM, request, ConfirmReply)
            if reply.status in (GO, AGAIN):
                return reply
            if reply.status == FAILED and loaded.error is not None:
                raise loaded.error
            self._go_on_waiting(reply.status, reply.message)

    def _go_on_waiting(self, status: str, message: str) -> None:
        if status == FAILED:
            raise RestoreFailed(message or "the leader gave up without saying why")
        if status != WAIT:
            raise RestoreFailed(
                f"the sidecar answered {status!r}; expected wait, load, go or again"
            )
        self._messages(message)

    def _ask(self, url: str, request: RestoreRequest | ConfirmRequest, reply: type[T]) -> T:
        timeout = request.wait_seconds + LONG_POLL_MARGIN_SECONDS
        try:
            return self._client.patiently(
                lambda: self._client.post(url, request, reply, timeout),
                self._settings.silent_seconds,
                self._messages,
            )
        except Unreachable as error:
            raise SidecarSilent(
                f"no answer from the sidecar for {self._settings.silent_seconds:.0f} s: {error}. "
                "Look at the log of the container `backstay-sidecar` of this pod; to train without "
                "Backstay set BACKSTAY=off"
            ) from error
        except (Refused, ProtocolError) as error:
            raise RestoreFailed(f"the sidecar refused rank {request.rank}: {error}") from error


def _point(decision: Decision, loaded: Loaded, verdict: ConfirmReply) -> RestorePoint:
    return RestorePoint(
        step=0 if decision.base is None else decision.base.step,
        attempt=decision.attempt,
        fresh=decision.base is None,
        checkpoint=decision.base,
        run=decision.base_run,
        sources=loaded.bytes_by_tier,
        sources_of_all=verdict.bytes_by_tier or loaded.bytes_by_tier,
        metadata=loaded.metadata,
        lost_steps=verdict.lost_steps,
        bad=verdict.bad,
        reason=decision.reason,
    )
