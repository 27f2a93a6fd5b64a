"""Keys of jobs that want a look: each once, one worker a key, delays and backoff.

The shape of client-go's work queue. Called from one event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

from backstay_protocol.clock import Clock

Key = tuple[str, str]
"""(namespace, name)."""
FIRST_BACKOFF_SECONDS = 0.5
MOST_BACKOFF_SECONDS = 60.0
TICK_SECONDS = 5.0


class WorkQueue:
    """A key that is added while it is worked on comes again afterwards."""

    def __init__(self, clock: Clock) -> None:
        """Empty."""
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self.turned_at = clock.monotonic()
        """When a worker asked last: they turn even when nothing is to be done."""

    def __len__(self) -> int:
        """Keys that are due now."""
        now = self._clock.monotonic()
        return sum(at <= now for at in self._due.values())

    def add(self, key: Key, after_seconds: float = 0.0) -> None:
        """Look at it by then; an earlier date that it has already stands."""
        at = self._clock.monotonic() + after_seconds
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            self._changed.set()

    def retry(self, key: Key) -> float:
        """Look again after a failure, later each time; how long that is."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        wait = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(count, 16), MOST_BACKOFF_SECONDS)
        wait *= random.uniform(0.75, 1.25)
        self.add(key, wait)
        return wait

    def succeeded(self, key: Key) -> None:
        """The next failure is the first again."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    async def get(self) -> Key:
        """The next key that is due; give it back with `done`."""
        while True:
            now = self.turned_at = self._clock.monotonic()
            free = [(at, key) for key, at in self._due.items() if key not in self._busy]
            at, key = min(free, default=(float("inf"), ("", "")))
            if at <= now:
                del self._due[key]
                self._busy.add(key)
                return key
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(at - now, TICK_SECONDS)):
                    await self._changed.wait()

    def done(self, key: Key) -> None:
        """Worked on; it may be handed out again."""
        self._busy.discard(key)
        self._changed.set()
