"""Tells the leader how this pod does, and brings its word back.

Two calls at the leader are open at most: a long poll that brings news as soon as there are any,
and a short one that is sent at once when something changed here. The agent builds the requests and
takes the replies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backstay_protocol.clock import Clock
from backstay_protocol.errors import Refused, Unreachable
from backstay_protocol.messages import ProgressReply, ProgressRequest
from backstay_protocol.names import PROGRESS_SECONDS

RETRY_SECONDS = 1.0
SETTLE_SECONDS = 0.02  # changes that come together go in one message

log = logging.getLogger(__name__)


class Progress:
    """One per sidecar; everything happens in the event loop."""

    def __init__(
        self,
        *,
        send: Callable[[ProgressRequest], Awaitable[ProgressReply]],
        build: Callable[[int, float], ProgressRequest],
        take: Callable[[ProgressReply], None],
        clock: Clock,
    ) -> None:
        """`build(seen version, wait seconds)`; `take` gets replies in their order."""
        self._send = send
        self._build = build
        self._take = take
        self._clock = clock
        self._version = 0
        self._sent = 0
        self._newest_taken = 0
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.trouble = ""
        """Why the leader does not answer; empty: it does."""

    def start(self) -> None:
        """Needs a running loop."""
        self._tasks = [
            asyncio.create_task(self._listen(), name="progress-listen"),
            asyncio.create_task(self._push(), name="progress-push"),
        ]

    async def close(self) -> None:
        """End both."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def changed(self) -> None:
        """Something changed here: tell it at once."""
        self._changed.set()

    async def _listen(self) -> None:
        while True:
            if not await self._exchange(PROGRESS_SECONDS):
                await asyncio.sleep(RETRY_SECONDS)

    async def _push(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._changed.clear()
            if not await self._exchange(0.0):
                await asyncio.sleep(RETRY_SECONDS)

    async def _exchange(self, wait_seconds: float) -> bool:
        try:
            await self._ask(wait_seconds)
        except (Unreachable, Refused) as error:
            if not self.trouble:
                log.warning("the leader does not answer: %s", error)
            self.trouble = str(error)
            return False
        except Exception:  # without this loop the pod would get no word any more
            log.exception("telling the leader failed; it is tried again")
            return False
        return True

    async def _ask(self, wait_seconds: float) -> None:
        request = self._build(self._version, wait_seconds)
        self._sent += 1
        number = self._sent
        reply = await self._send(request)
        self.trouble = ""
        if number < self._newest_taken and reply.version < self._version:
            return  # overtaken by the answer to a later call
        self._newest_taken, self._version = number, reply.version
        self._take(reply)
