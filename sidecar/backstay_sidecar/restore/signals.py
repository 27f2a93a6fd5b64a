"""Waiting for a change inside one event loop, bounded; tasks that nobody awaits.

Used by member and leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from backstay_sidecar.restore.ports import Emit


class Changes:
    """Wakes everybody who waits whenever something changed; they look again for themselves."""

    def __init__(self) -> None:
        """Needs no running loop."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until `holds()` or the time is over; returns what `holds()` says then."""
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    await self._next.wait()
        except TimeoutError:
            return holds()
        return True


class Tasks:
    """Background tasks of one owner: none is lost, none fails in silence, all end with it."""

    def __init__(self, emit: Emit) -> None:
        """`emit` hears of tasks that end with an exception."""
        self._emit = emit
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it. Needs a running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel all and wait for their end."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emit("internal_error", message=f"{type(error).__name__}: {error}")
