"""When to try again, and when to call a tier degraded. Pure: the clock's value is an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
BUDGET_SECONDS = 15.0


@dataclass(frozen=True)
class Retry:
    """Failures in a row of one tier. A degraded tier is still tried, each LONGEST_PAUSE_SECONDS."""

    failures: int = 0
    since: float = 0.0
    """When the first of them happened."""
    not_before: float = 0.0
    message: str = ""

    def failed(self, now: float, message: str, jitter: float = 0.5) -> Retry:
        """One more failure. `jitter` (0 to 1) spreads the sidecars of a job."""
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**self.failures)
        return replace(
            self,
            failures=self.failures + 1,
            since=self.since if self.failures else now,
            not_before=now + pause * (0.5 + jitter / 2),
            message=message,
        )

    def degraded(self, now: float) -> bool:
        """The budget is used up: people are told."""
        return bool(self.failures) and now - self.since >= BUDGET_SECONDS

    def pause(self, now: float) -> float:
        """Seconds until the next try."""
        return max(0.0, self.not_before - now)
