"""What the leader orders ranks to do through their control blocks. No I/O; used by duties.

An order names a step far enough ahead that every rank hears of it in time. There is one save order
at a time: the next is given when all ranks have passed the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from backstay_protocol.messages import Orders, RankProgress
from backstay_protocol.names import PROGRESS_SECONDS
from backstay_protocol.policies import NO_STEPS
from backstay_protocol.schedules import Interval, announce, is_widened, widen
from backstay_protocol.topology import Schedule, Topology

NOTICE_SECONDS = PROGRESS_SECONDS + 1.5
"""How old a rank's word may be, and how long an order travels."""
WIDEN_SECONDS = 10.0
"""An interval is looked at again at most so often."""
STRAGGLER_SECONDS = 20.0
"""Ranks that train on while others wait in restore are told to leave after so long."""
NAMED_REPLICAS = 8
"""A sentence names so many at most."""
OBEY_SECONDS = 20.0
"""A replica that was told to leave and does not is passed over for another one after so long."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What an order is decided from."""

    attempt: int
    now: float
    """Monotonic."""
    stalled: bool = False
    """No rank moved for hang_seconds by the leader's own clock, and every sidecar has said so
    since."""
    training: Mapping[int, RankProgress]
    """Every rank of the world, or nobody: then no step is announced."""
    ranks: Mapping[int, RankProgress] = field(default_factory=dict)
    """Those in this attempt, whatever they do."""
    silent: frozenset[int] = frozenset()
    """Replicas whose last word is older than NOTICE_SECONDS: what is announced now might not reach
    their ranks in time, and a step that only some know of hangs all."""
    replicas_waiting: frozenset[int] = frozenset()
    """Replicas whose ranks are in restore again."""
    step_seconds: float = 0.0
    backlog: int = 0
    """Longest queue of any sidecar towards the tier that frees the slots, in checkpoints."""


def silence(replicas: Collection[int]) -> str:
    """For people: whose sidecars are silent."""
    names = [str(replica) for replica in sorted(replicas)]
    more = f" and {len(names) - NAMED_REPLICAS} more" if len(names) > NAMED_REPLICAS else ""
    return f"no word from the sidecar of replica {', '.join(names[:NAMED_REPLICAS])}{more}"


class OrderBook:
    """One per attempt."""

    def __init__(self, topology: Topology, schedule: Schedule, attempt: int, now: float) -> None:
        """`schedule`: of captures; `now`: when the attempt began, or this leader took it over."""
        self._topology = topology
        self._attempt = attempt
        self._configured = schedule.every_steps
        self._every_seconds = schedule.every_seconds
        self._interval = Interval(every_steps=schedule.every_steps)
        self._interval_heard = False
        """Whether the ranks told what is in force: a leader that took over must not guess it."""
        self._certain = False
        """Whether ranks that go by another interval missed the last word of an earlier leader."""
        self._looked_at = now
        self._saved_at = now
        self._save = 0
        self._replan = 0
        self._forced_wanted = False
        self._leave_replica: int | None = None
        self._told_to_leave: dict[int, float] = {}
        """Replica -> when it was told, of those told because of a hang."""
        self._straggling_since: float | None = None
        self._all_told_at: float | None = None
        """When all replicas were told to leave."""
        self.forced_step = 0
        """Step of the last forced save that was ordered; 0: none."""

    def force_save(self) -> None:
        """People or a drain want one common save; asked again before it is made, it is the same."""
        if self._save >= 0:
            self._forced_wanted = True

    @property
    def forced_pending(self) -> bool:
        """Whether a forced save is still ahead."""
        return self._forced_wanted or self._save < 0

    @property
    def interval(self) -> Interval:
        """In force, or about to be."""
        return self._interval

    def common_step(self, look: Look, from_step: int = 0) -> int:
        """A step that all ranks can still hear of, not before `from_step`.

        Raises ValueError while not every rank trains, or a sidecar is silent: none can be named.
        """
        if not look.training:
            raise ValueError("not every rank trains just now; ask again when the job goes on")
        if look.silent:
            raise ValueError(f"{silence(look.silent)}; ask again when it is heard")
        return max(from_step, self._ahead(look))

    def configure(self, schedule: Schedule, *, certain: bool = False) -> None:
        """What is widened and narrowed from. It changes no interval that ranks were told, but
        where it is `certain` that this was announced and they go by another one.
        """
        self._configured, self._every_seconds = schedule.every_steps, schedule.every_seconds
        self._certain = certain

    def set_schedule(self, schedule: Schedule, from_step: int) -> None:
        """Another schedule of captures, from a common step on."""
        self.configure(schedule)
        previous = self._interval.every_steps
        every_steps = schedule.every_steps or NO_STEPS
        self._interval_heard = True
        self._interval = Interval(every_steps=every_steps, from_step=from_step, previous=previous)

    def update(self, look: Look) -> Orders:
        """Look again; what is told now."""
        self._end_what_is_done(look)
        if look.training and not look.silent:
            self._hear_interval(look)
            self._announce_replan(look)
            self._announce_save(look)
            self._widen(look)
        self._tell_stragglers(look)
        self._tell_the_hung(look)
        if self._leave_replica == -1 and self._all_told_at is None:
            self._all_told_at = look.now
        leaving = self._leave_replica is not None
        return Orders(
            save_at_step=self._save,
            replan_at_step=self._replan,
            leave_attempt=self._attempt if leaving else 0,
            leave_replica=-1 if self._leave_replica is None else self._leave_replica,
            every_steps=self._interval.every_steps if self._interval_heard else 0,
            every_from=self._interval.from_step if self._interval_heard else 0,
        )

    def unheeded(self, look: Look) -> tuple[tuple[int, ...], float]:
        """Replicas, furthest behind first, that an order for all has not moved though they had
        their time; and how long ago it was given.
        """
        told = self._all_told_at
        if told is None or look.now - told < OBEY_SECONDS:
            return (), 0.0
        per = self._topology.processes_per_replica
        behind: dict[int, tuple[int, float]] = {}
        for rank in look.ranks.values():
            replica = rank.rank // per
            if replica not in look.replicas_waiting and not rank.leaving:
                place = (rank.step, rank.step_time)
                behind[replica] = min(place, behind.get(replica, place))
        return tuple(sorted(behind, key=lambda i: (behind[i], i))), look.now - told

    def _hear_interval(self, look: Look) -> None:
        """Go on with what is in force: an earlier leader may have widened it, or a person.

        Ranks that differ were told by a leader that died while its word travelled: the widest is
        announced anew, for its steps are steps of all.
        Where that is no widening of what was announced last, the announcement did not arrive.
        """
        if self._interval_heard:
            return
        self._interval_heard = True
        told = {(rank.every_steps, rank.every_from) for rank in look.training.values()}
        every_steps, from_step = max(told)
        if self._certain and not is_widened(every_steps, self._configured or NO_STEPS):
            wanted = self._configured or NO_STEPS
            start = self._ahead(look)
            self._interval = Interval(every_steps=wanted, from_step=start, previous=every_steps)
        elif every_steps:
            start = from_step if len(told) == 1 else self._ahead(look)
            self._interval = Interval(every_steps=every_steps, from_step=start)

    def _end_what_is_done(self, look: Look) -> None:
        if not look.ranks or len(look.ranks) < self._topology.world_size:
            return
        slowest = min(rank.step for rank in look.ranks.values())
        at_end = not look.training and not look.replicas_waiting
        if self._save and (slowest >= abs(self._save) or at_end):
            self._save, self._saved_at = 0, look.now
        if self._replan and (slowest >= self._replan or at_end):
            self._replan = 0

    def _ahead(self, look: Look) -> int:
        steps = [rank.step for rank in look.training.values()]
        return announce(steps, look.step_seconds, NOTICE_SECONDS)

    def _announce_replan(self, look: Look) -> None:
        if self._replan or self._save or not any(r.replan_wanted for r in look.training.values()):
            return
        self._replan = self._save = self._ahead(look)  # it is carried out at the start of a save

    def _announce_save(self, look: Look) -> None:
        if self._save:
            return
        if self._forced_wanted:
            self.forced_step = self._ahead(look)
            self._save, self._forced_wanted = -self.forced_step, False
        elif self._every_seconds and look.now - self._saved_at >= self._every_seconds:
            self._save = self._ahead(look)

    def _widen(self, look: Look) -> None:
        slowest = min(rank.step for rank in look.training.values())
        settled = slowest >= self._interval.from_step + self._interval.every_steps
        if not settled or look.now - self._looked_at < WIDEN_SECONDS:
            return
        self._looked_at = look.now
        slots = self._topology.tiers.memory.slots
        self._interval = widen(
            self._interval, self._configured, look.backlog, slots, self._ahead(look)
        )

    def _tell_stragglers(self, look: Look) -> None:
        """Some wait in restore, others train on: without these no attempt can begin."""
        per = self._topology.processes_per_replica
        behind = [r for r in look.ranks if r // per not in look.replicas_waiting]
        if not look.replicas_waiting or not behind:
            self._straggling_since = None
            return
        self._straggling_since = self._straggling_since or look.now
        if look.now - self._straggling_since >= STRAGGLER_SECONDS:
            self._leave_replica = -1

    def _tell_the_hung(self, look: Look) -> None:
        """No rank made a step for too long: the one that is furthest behind shall leave.

        A thread of the trainer obeys; where even that is stuck, the next replica is told in time,
        and at last all.
        """
        if not look.stalled or not look.training or self._leave_replica == -1:
            return
        if look.silent or self._is_being_obeyed(look):
            return
        per = self._topology.processes_per_replica
        left = [r for r in look.training.values() if r.rank // per not in self._told_to_leave]
        if self._topology.leave_together or not left:
            self._leave_replica = -1
            return
        last = min(left, key=lambda r: (r.step, r.step_time, r.rank))
        self._leave_replica = last.rank // per
        self._told_to_leave[self._leave_replica] = look.now

    def _is_being_obeyed(self, look: Look) -> bool:
        """Whether the replica that was told last leaves, or has not had its time yet."""
        if self._leave_replica is None:
            return False
        if look.now - self._told_to_leave[self._leave_replica] < OBEY_SECONDS:
            return True
        ranks = self._topology.ranks_of(self._leave_replica)
        return all(look.training[rank].leaving for rank in ranks)
