"""When to try again, and when to give up: a pure policy and the thin loop that carries it out.

A budget belongs to one transfer and is shared by its threads. It bounds the time *without any
success*: a long upload over a bad network may fail a thousand times as long as it gets on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from backstay_protocol.clock import Clock
from backstay_protocol.errors import Cancelled, Unreachable

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to wait between tries."""

    first_seconds: float = 0.2
    """Pause after the first failure."""
    factor: float = 2.0
    """Each pause is so many times the one before."""
    most_seconds: float = 5.0
    """No pause is longer."""
    budget_seconds: float = 10.0
    """Seconds without any success after which the transfer gives up. 0: one try only."""

    def __post_init__(self) -> None:
        if min(self.first_seconds, self.most_seconds, self.budget_seconds) < 0 or self.factor < 1:
            raise ValueError("seconds must be 0 or more, the factor 1 or more")


def pause(policy: RetryPolicy, failures: int, spent: float, chance: float) -> float | None:
    """Seconds to wait after this many failures in a row; None: the budget is spent.

    `spent`: seconds since the last success; `chance` in [0, 1) spreads the pauses of many clients
    between half and the whole (so that a thousand sidecars don't come back at the same moment).
    """
    if spent >= policy.budget_seconds:
        return None
    longest = min(
        policy.most_seconds, policy.first_seconds * policy.factor ** min(failures - 1, 64)
    )
    return min(longest * (0.5 + chance / 2), policy.budget_seconds - spent)


class Budget:
    """What one transfer has left. Safe for several threads."""

    def __init__(
        self, policy: RetryPolicy, clock: Clock, chance: Callable[[], float] = random.random
    ) -> None:
        """Starts full."""
        self._policy = policy
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._since = clock.monotonic()
        self._failures = 0

    def succeeded(self) -> None:
        """Something got on: the budget is full again."""
        with self._lock:
            self._since = self._clock.monotonic()
            self._failures = 0

    def failed(self) -> float | None:
        """Something failed: how long to wait, or None when the budget is spent."""
        with self._lock:
            self._failures += 1
            spent = self._clock.monotonic() - self._since
            return pause(self._policy, self._failures, spent, self._chance())


def worth_retrying(error: Exception) -> bool:
    """Whether waiting alone may help."""
    return isinstance(error, Unreachable) and getattr(error, "passes", True)


def with_retries(
    budget: Budget,
    cancel: threading.Event,
    action: Callable[[], T],
    retryable: Callable[[Exception], bool] = worth_retrying,
) -> T:
    """Call `action` until it works, fails for good, or the budget is spent (its last error)."""
    while True:
        if cancel.is_set():
            raise Cancelled("told to stop")
        try:
            result = action()
        except Exception as error:
            if cancel.is_set() or not retryable(error):
                raise
            seconds = budget.failed()
            if seconds is None:
                raise
            cancel.wait(seconds)
        else:
            budget.succeeded()
            return result
