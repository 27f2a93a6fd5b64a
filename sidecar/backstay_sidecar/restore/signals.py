"""Waiting for a change inside one event loop, bounded. Used by member and leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
