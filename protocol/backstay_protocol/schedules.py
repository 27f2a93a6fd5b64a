"""When a tier takes a checkpoint, and when all ranks save. Pure; used by sidecars and the leader.

Ranks never agree on a step by talking: the leader announces one far enough ahead, and what backlogs
show it widens the interval for all at once, so that a common step is never lost to ranks that skip
on their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import FORCED
from backstay_protocol.topology import Schedule

MAX_WIDENING = 64
"""The interval grows at most to so many times what was configured."""


def due(
    schedule: Schedule,
    checkpoint: CheckpointId,
    reason: str,
    chosen: Collection[CheckpointId] = (),
) -> bool:
    """Whether a tier takes this captured checkpoint.

    `reason`: the manifest's; what was forced goes to every tier. `chosen`: what the leader's word
    names for this tier (schedules by seconds, and what people asked for).
    """
    if reason == FORCED or checkpoint in chosen:
        return True
    if schedule.every_steps:
        return checkpoint.step % schedule.every_steps == 0
    return not schedule.every_seconds


def chosen_by_time(
    schedule: Schedule,
    complete: Iterable[CheckpointId],
    *,
    last_chosen: CheckpointId | None,
    last_time: float,
    now: float,
) -> CheckpointId | None:
    """For a schedule by seconds: the newest complete checkpoint, once the interval is over."""
    if not schedule.every_seconds or now - last_time < schedule.every_seconds:
        return None
    newest = max(complete, default=None)
    if newest is None or (last_chosen is not None and newest <= last_chosen):
        return None
    return newest


def announce(steps: Collection[int], step_seconds: float, notice_seconds: float) -> int:
    """A step that no rank can have passed by the time it hears of it.

    `steps`: where the ranks were when last heard of; `step_seconds`: how long a step takes (0: not
    known yet); `notice_seconds`: how old that word may be plus how long the order may travel.
    """
    ahead = math.ceil(notice_seconds / step_seconds) if step_seconds > 0 else 0
    return max(steps, default=0) + ahead + 2


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The interval at which all ranks capture, and from which step on it holds."""

    every_steps: int
    from_step: int = 0
    previous: int = 0
    """In force below `from_step`; 0: the same."""


def widen(current: Interval, configured: int, backlog: int, slots: int, from_step: int) -> Interval:
    """The interval for all ranks, given the longest backlog of any sidecar.

    A backlog that fills the slots doubles it, none at all halves it, never below what was
    configured. `from_step`: a step that no rank has reached (see `announce`). The doubled intervals
    are multiples of the configured one, so tiers with coarser schedules keep meeting theirs.
    """
    if not configured or from_step <= current.from_step:
        return current
    wanted = current.every_steps
    if backlog >= max(slots, 1):
        wanted = min(current.every_steps * 2, configured * MAX_WIDENING)
    elif backlog == 0:
        wanted = max(current.every_steps // 2, configured)
    if wanted == current.every_steps:
        return current
    return Interval(every_steps=wanted, from_step=from_step, previous=current.every_steps)


def is_widened(every_steps: int, configured: int) -> bool:
    """Whether `widen` can have made it of what was configured, or it is that itself."""
    doublings = every_steps // configured
    return every_steps % configured == 0 and doublings.bit_count() == 1
