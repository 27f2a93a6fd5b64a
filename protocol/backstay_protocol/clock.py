"""The only module that asks the machine for the time. Everything else takes a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What needs "now" or waits takes one of these; tests pass their own."""

    def time(self) -> float:
        """Seconds since the epoch, for people and for files that outlive a process."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for time-outs."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait in this thread."""
        ...


class SystemClock:
    """The machine's own clock."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait in this thread."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
