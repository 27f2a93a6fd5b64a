"""What the kubelet decides in a cluster: whether a container that ended starts again, and when.

The local runner asks this; the operator only reads its results. One restart at once, then with a
doubling wait; a container that ran long enough starts afresh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backstay_operator.decide.observed import ContainerState, Ended
from backstay_operator.settings import RestartSettings


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Start it again at `at` (seconds since the epoch)."""

    at: float
    why: str


@dataclass(frozen=True, kw_only=True)
class StaysEnded:
    """Not again."""

    why: str


def ended(state: ContainerState, end: Ended, settings: RestartSettings) -> ContainerState:
    """The state after an end."""
    quick = end.at - state.started_at < settings.calm_seconds
    return replace(state, running=False, ended=end, quick_ends=state.quick_ends + 1 if quick else 1)


def started(state: ContainerState, now: float) -> ContainerState:
    """The state after a (re)start."""
    again = state.ended is not None
    return replace(
        state, running=True, started_at=now, restarts=state.restarts + (1 if again else 0)
    )


def after_end(
    state: ContainerState, *, always: bool, settings: RestartSettings
) -> Restart | StaysEnded:
    """What follows. `always`: a native sidecar; else the pod's OnFailure counts."""
    assert not state.running
    assert state.ended is not None
    if state.ended.exit_code == 0 and not always:
        return StaysEnded(why="completed")
    wait = _backoff(state.quick_ends, settings)
    if wait == 0:
        return Restart(at=state.ended.at, why="restarts at once")
    return Restart(at=state.ended.at + wait, why=f"restarts in {wait:g} s")


def _backoff(quick_ends: int, settings: RestartSettings) -> float:
    if quick_ends <= 1:
        return 0.0
    doubled = settings.first_backoff_seconds * 2.0 ** min(quick_ends - 2, 32)
    return min(doubled, settings.most_backoff_seconds)
