"""The kubelet's preStop hook: one common save, and an answer when it is safe.

Used by the health port's route. Safe means: durable, or in the outermost tier there is; the leader
says so. The answer comes at the latest MARGIN_SECONDS before the pod's grace is over. Hooks may
come twice; both get the answer of one wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError
from backstay_protocol.messages import FlushReply
from backstay_sidecar.replication.replicator import Emit

MARGIN_SECONDS = 20.0
ASK_SECONDS = 1.0
REPEAT_SECONDS = 60.0  # a hook that comes later than this is another stop of the trainer


class Prestop:
    """One per sidecar."""

    def __init__(
        self,
        *,
        flush: Callable[[], Awaitable[FlushReply]],
        reached: Callable[[], int],
        grace_seconds: float,
        clock: Clock,
        emit: Emit,
    ) -> None:
        """`flush` asks the leader; `reached`: the last step of this pod's ranks that still train,
        0: none does.
        """
        self._flush = flush
        self._reached = reached
        self._seconds = max(0.0, grace_seconds - MARGIN_SECONDS)
        self._clock = clock
        self._emit = emit
        self._answered = 0.0
        self._waiting: asyncio.Task[FlushReply] | None = None
        self._news = asyncio.Event()

    def news(self) -> None:
        """The leader has spoken: ask again at once."""
        self._news.set()

    async def wait(self) -> FlushReply:
        """Ask for a save and wait until it is safe, or the time is over."""
        now = self._clock.monotonic()
        over = self._waiting is not None and self._waiting.done()
        if self._waiting is None or (over and now - self._answered > REPEAT_SECONDS):
            self._emit("prestop", message=f"saving, for at most {self._seconds:g} s")
            self._waiting = asyncio.create_task(self._until_safe())
        return await asyncio.shield(self._waiting)

    async def close(self) -> None:
        """End the wait."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)

    async def _until_safe(self) -> FlushReply:
        try:
            return await self._save()
        finally:
            self._answered = self._clock.monotonic()

    async def _save(self) -> FlushReply:
        deadline = self._clock.monotonic() + self._seconds
        needed = self._reached()
        if not needed:
            return FlushReply(step=0, durable=True, message="no rank here has anything to save")
        reply = await self._ask()
        # A leader that has just been restarted may not know yet that anybody trains.
        while not (reply.durable and reply.step >= needed):
            left = deadline - self._clock.monotonic()
            if left <= 0:
                self._emit("prestop_late", step=reply.step, message=reply.message)
                return replace(reply, durable=False)
            self._news.clear()
            with contextlib.suppress(TimeoutError):  # the leader may be silent: ask it then
                async with asyncio.timeout(min(left, ASK_SECONDS)):
                    await self._news.wait()
            reply = await self._ask()
        self._emit("prestop_safe", step=reply.step)
        return reply

    async def _ask(self) -> FlushReply:
        try:
            return await self._flush()
        except BackstayError as error:
            return FlushReply(step=0, durable=False, message=f"the leader does not answer: {error}")
