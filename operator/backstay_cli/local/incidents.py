"""From a failure to the first step after it: what was lost, and how long it took. Pure.

Failures that come while one is being mended belong to it. Fed by the runner with what it sees;
the times are seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_cli.local.events import Recovered
from backstay_protocol.messages import JobView


@dataclass
class _Open:
    failed_at: float
    attempt: int
    failures: list[str] = field(default_factory=list)
    replicas: set[int] = field(default_factory=set)
    noticed_at: float = 0.0


class Incidents:
    """The one incident that is open, if any."""

    def __init__(self) -> None:
        """None is."""
        self._open: _Open | None = None
        self._attempt = 0

    @property
    def is_open(self) -> bool:
        """Whether something is being mended."""
        return self._open is not None

    def failed(self, failure: str, replicas: tuple[int, ...], at: float) -> None:
        """Something was broken on purpose, or was found broken."""
        if self._open is None:
            self._open = _Open(failed_at=at, attempt=self._attempt)
        if failure not in self._open.failures:
            self._open.failures.append(failure)
        self._open.replicas.update(replicas)

    def noticed(self, failure: str, replicas: tuple[int, ...], at: float) -> None:
        """Somebody saw that something is broken; without an order it is told as `failure`."""
        if self._open is None:
            self.failed(failure, replicas, at)
        assert self._open is not None
        if not self._open.noticed_at:
            self._open.noticed_at = max(at, self._open.failed_at)

    def saw(self, view: JobView, now: float) -> Recovered | None:
        """What the leader says; the end of the incident if this is it."""
        if view.phase != "Training":
            if self._open is not None and view.attempt == self._open.attempt:
                self.noticed("process", (), now)
            return None
        incident = self._open
        if incident is None or view.attempt == incident.attempt:
            self._attempt = view.attempt
            return None
        restore = next((r for r in view.restores if r.attempt == view.attempt), None)
        base_step = restore.began_at if restore is not None else 0
        if restore is None or view.step <= base_step:
            return None
        self._open, self._attempt = None, view.attempt
        ended = _step_ended(view, now)
        return Recovered(
            time=ended,
            failures=tuple(incident.failures),
            replicas=tuple(sorted(incident.replicas)),
            failed_at=incident.failed_at,
            detect_seconds=round((incident.noticed_at or ended) - incident.failed_at, 3),
            resume_seconds=round(ended - incident.failed_at, 3),
            attempt=view.attempt,
            base_step=base_step,
            step=view.step,
            lost_steps=restore.lost_steps,
            bytes_by_tier=restore.bytes_by_tier,
        )


def _step_ended(view: JobView, now: float) -> float:
    """When the last rank reported the step that is seen first; a little late if steps are short."""
    ranks = [rank for replica in view.replicas for rank in replica.ranks if rank.step_time]
    times = [rank.step_time for rank in ranks if rank.attempt == view.attempt]
    return min(max(times), now) if times else now
