"""Fills one tier: takes the next wanted shard, moves it in its own thread, tries again in time.

One per tier, so that a tier that is down or hangs holds up no other. The order and the choice are
`wanted`'s, the pauses `retry`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Event
from typing import Protocol

from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError, Cancelled, CorruptData
from backstay_protocol.manifest import Manifest
from backstay_sidecar.replication.retry import Retry
from backstay_sidecar.replication.wanted import Shard, ShardKey
from backstay_sidecar.tiers.base import ShardReader, TierFull, Unfit, WritableTier, store_code

ASIDE_SECONDS = 60.0

log = logging.getLogger(__name__)


class Moves(Protocol):
    """What the worker needs of the replicator."""

    def source(self, tier: str, shard: Shard) -> AbstractContextManager[ShardReader]:
        """Open the best copy to move it to `tier`. Blocks. Raises FileNotFoundError."""
        ...

    def moved(self, tier: str, shard: Shard, manifest: Manifest, seconds: float) -> None:
        """The tier has it. In the event loop."""
        ...

    def failed(self, tier: str, shard: Shard, error: Exception, *, first: bool) -> None:
        """It has not. In the event loop."""
        ...

    def source_bad(self, tier: str, shard: Shard, error: CorruptData) -> None:
        """The copy that was read is proven bad. Blocks."""
        ...


class TierWorker:
    """One tier's worker. `run` ends only by cancellation."""

    def __init__(
        self,
        tier: WritableTier,
        queue: Callable[[], list[Shard]],
        moves: Moves,
        clock: Clock,
        cancel: Event,
    ) -> None:
        """`queue`: what is wanted now, first one first; `cancel` stops a transfer under way."""
        self.tier = tier
        self.retry = Retry()
        self._queue = queue
        self._moves = moves
        self._clock = clock
        self._cancel = cancel
        self._wake = asyncio.Event()
        self._threads = ThreadPoolExecutor(1, f"tier-{tier.name}")
        self.busy = False
        self.standing = ""
        """A trouble that is not a transfer's (a store that fails its probe); empty: none."""
        self.standing_code = ""
        self._code = ""
        self._no_room = False
        self._set_aside: dict[ShardKey, float] = {}
        self._told: set[ShardKey] = set()
        """Set aside and told of, for as long as they are wanted."""

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    @property
    def backlog(self) -> int:
        """Shards that wait, the one under way included."""
        return len(self._waiting())

    @property
    def degraded(self) -> bool:
        """It has failed for longer than its budget, or can't work at all."""
        return bool(self.standing) or self.retry.degraded(self._clock.monotonic())

    @property
    def full(self) -> bool:
        """A disk has no room for what waits."""
        return self._no_room and bool(self._waiting())

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def trouble(self, error: Exception) -> None:
        """Something else than a transfer failed in this tier (a disk pass, a probe)."""
        self._no_room, self._code = isinstance(error, TierFull), store_code(error)
        self.retry = self.retry.failed(self._clock.monotonic(), str(error), random.random())

    async def run(self) -> None:
        """Move shards for ever."""
        while True:
            self._wake.clear()
            waiting = self._waiting()
            if not waiting:
                await self._until_woken()
                continue
            if pause := self.retry.pause(self._clock.monotonic()):
                await asyncio.sleep(pause)
                continue
            self.busy = True
            try:
                await self._move(waiting[0])
            finally:
                self.busy = False

    def close(self) -> None:
        """Let the thread go; a hung transfer is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def message(self) -> str:
        """What is wrong; empty: nothing."""
        return self.standing or self.retry.message

    @property
    def code(self) -> str:
        """The same for programs: one of the TIER_ codes, or empty."""
        return self.standing_code if self.standing else self._code

    def _waiting(self) -> list[Shard]:
        now = self._clock.monotonic()
        self._set_aside = {key: until for key, until in self._set_aside.items() if until > now}
        wanted = self._queue()
        self._told.intersection_update(shard.key for shard in wanted)
        return [shard for shard in wanted if shard.key not in self._set_aside]

    async def _until_woken(self) -> None:
        """With something set aside not for ever: its time comes again."""
        seconds = ASIDE_SECONDS if self._set_aside else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _move(self, shard: Shard) -> None:
        begun = self._clock.monotonic()
        loop = asyncio.get_running_loop()
        try:
            manifest = await loop.run_in_executor(self._threads, self._put, shard)
        except FileNotFoundError as error:
            # Overwritten or thinned meanwhile: the next look at what is here drops it. A folder
            # that vanished in the tier itself looks the same and must not spin.
            self._failed(shard, error)
        except (Unfit, Cancelled) as error:
            # Of this shard only (it is under a deletion intent, its name is taken, or it has a form
            # that the tier can't take), or the end of this process.
            self._set_aside[shard.key] = self._clock.monotonic() + ASIDE_SECONDS
            if not self._cancel.is_set():
                first = shard.key not in self._told
                self._told.add(shard.key)
                self._moves.failed(self.name, shard, error, first=first)
        except (BackstayError, OSError) as error:
            self._failed(shard, error)
        except Exception as error:  # one bad shard must not end the tier's worker
            log.exception("moving rank %s of %s to %s", shard.rank, shard.checkpoint, self.name)
            self._failed(shard, error)
        else:
            self.retry = Retry()
            self._no_room, self._code = False, ""
            self._moves.moved(self.name, shard, manifest, self._clock.monotonic() - begun)

    def _put(self, shard: Shard) -> Manifest:
        try:
            with self._moves.source(self.name, shard) as source:
                return self.tier.put(source, self._cancel)
        except CorruptData as error:
            self._moves.source_bad(self.name, shard, error)
            raise

    def _failed(self, shard: Shard, error: Exception) -> None:
        first = not self.retry.failures
        text = str(error) or type(error).__name__
        self._no_room, self._code = isinstance(error, TierFull), store_code(error)
        self.retry = self.retry.failed(self._clock.monotonic(), text, random.random())
        self._moves.failed(self.name, shard, error, first=first)
