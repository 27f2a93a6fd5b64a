"""What the leader tells every sidecar between two restores: one word for all, versioned.

Used by the leader. Gathers what the sidecars told (census) and what the remote tier showed, and
works out completeness, thinning, orders, choices by time and the neighbour ring. No I/O; time is
handed in. Everything here comes back by itself after a restart of the leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from backstay_protocol.completeness import complete_in, published_by_all
from backstay_protocol.history import Lineage, lineage_of
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import SCHEDULE
from backstay_protocol.messages import (
    FlushReply,
    Placement,
    Policy,
    ProgressReply,
    ProgressRequest,
    ShardCopy,
    TierPolicy,
)
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE, TIERS
from backstay_protocol.records import AttemptRecord, CommitRecord
from backstay_protocol.retention import ThinView, thin
from backstay_protocol.ring import Ring, neighbors
from backstay_protocol.schedules import chosen_by_time, due
from backstay_protocol.topology import Retention, Schedule, Topology
from backstay_sidecar.restore.census import FRESH_SECONDS, Census
from backstay_sidecar.restore.orders import NOTICE_SECONDS, Look, OrderBook, silence
from backstay_sidecar.restore.standing import Standing

KEPT_FOR_UPLOAD = 2
"""So many of the newest checkpoints that wait for the remote tier are not thinned out before."""
REMEMBERED_DELETES = 256


@dataclass(frozen=True, kw_only=True)
class RemoteKnown:
    """What the leader knows of the remote tier. Written by remote_duties only."""

    listed: bool = False
    claims: frozenset[int] = frozenset()
    base_recorded: bool = False
    commits: Mapping[CheckpointId, CommitRecord] = field(default_factory=dict)
    pins: frozenset[CheckpointId] = frozenset()
    intents: frozenset[CheckpointId] = frozenset()
    copies: tuple[ShardCopy, ...] = ()
    chains: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    keys: Mapping[CheckpointId, tuple[str, ...]] = field(default_factory=dict)
    """Checkpoint -> every object in its folder."""
    trouble: str = ""
    """Why the remote tier can't be worked with just now."""
    trouble_code: str = ""
    """The same for programs: one of the TIER_ codes."""


class Duties:
    """One per leader."""

    def __init__(self, topology: Topology, first_version: int) -> None:
        """`first_version` must be greater than any version of an earlier leader process."""
        self._topology = topology
        self.census = Census(topology)
        self.remote = RemoteKnown()
        self.record: AttemptRecord | None = None
        self.orders: OrderBook | None = None
        self._pinned: set[CheckpointId] = set()
        """By people, of this process's time; pins of durable ones stand in the remote tier."""
        self._asked: dict[str, set[CheckpointId]] = {}
        """Tier -> checkpoints that people want there."""
        self._unwanted: dict[CheckpointId, None] = {}
        """That people want deleted, oldest wish first. Remembered when they are gone, too: a disk
        that was away may bring one back."""
        self._spared: set[CheckpointId] = set()
        """That people want after all, whatever sidecars still remember."""
        self._chosen: dict[str, tuple[CheckpointId, float]] = {}
        """Tier with a schedule by seconds -> (last one chosen, when)."""
        self._arrived: dict[str, CheckpointId] = {}
        """Tier -> the last one chosen for it by time that was complete there."""
        self._addresses: dict[int, str] = {p.replica: p.address for p in topology.peers}
        self._replaced_by = 0
        self._begun_at = float("-inf")
        self.standing = Standing(topology.tiers)
        self.placement: Placement | None = None
        """What the operator told of nodes."""
        self.ring = Ring()
        self._word = ProgressReply(attempt=0, version=first_version)

    # --- what happens -------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The attempt that has its go-ahead; 0: none."""
        return self.record.attempt if self.record else 0

    @property
    def lineage(self) -> Lineage | None:
        """Of that attempt."""
        return lineage_of(self.record) if self.record else None

    def quiet_seconds(self, now: float) -> float:
        """How long no rank of the attempt has made a step; 0 while none has its go-ahead."""
        return max(0.0, now - self.census.moved_at) if self.record is not None else 0.0

    @property
    def superseded(self) -> int:
        """A greater attempt that somebody is in: this leader was replaced. 0: none."""
        newest = max(self._replaced_by, max(self.remote.claims, default=0))
        return newest if self.record and newest > self.attempt else 0

    @property
    def word(self) -> ProgressReply:
        """What was said last."""
        return self._word

    @property
    def unwanted(self) -> frozenset[CheckpointId]:
        """What people want deleted and no rule protects."""
        return frozenset(self._unwanted) - self.protected()

    @property
    def newest_copy(self) -> CheckpointId | None:
        """The newest on the lineage of which any sidecar holds something."""
        found = {copy.checkpoint for copy in self.census.copies()}
        found.update(c for there in self.census.published().values() for c in there)
        return next(iter(self._history(found)), None)

    def begin(self, record: AttemptRecord, now: float) -> None:
        """An attempt has its go-ahead, or this leader found one that has."""
        self._begun_at = now
        self.record = record
        schedule = self.standing.newest.tiers[MEMORY].schedule
        self.orders = OrderBook(self._topology, schedule, record.attempt, now)
        self.census.begin(record.attempt, now)
        self.remote = replace(self.remote, base_recorded=False)
        self._chosen = {}
        self._arrived = {}
        self._asked = {}
        self._replaced_by = 0

    def moved(self, replica: int, address: str) -> None:
        """A sidecar joined from there."""
        if address:
            self._addresses[replica] = address

    def take(self, request: ProgressRequest, now: float) -> bool:
        """A sidecar told how it does; False: a pod that was replaced."""
        if not self.census.take(request, now):
            return False
        for checkpoint in request.unwanted:
            self._delete(checkpoint)
        self.standing.hear(request.policies)
        if request.attempt > self.attempt:
            self._replaced_by = max(self._replaced_by, request.attempt)
        return True

    def ask(self, words: str) -> None:
        """What people and hooks ask. Raises ValueError for words that mean nothing."""
        verb, _, name = words.partition(" ")
        if verb in ("save", "flush") and not name:
            if self.orders is not None:
                self.orders.force_save()
            return
        if verb not in ("pin", "unpin", "persist", "delete"):
            raise ValueError(f"{words!r} is not a request; expected save, flush or pin <id> ...")
        checkpoint = CheckpointId.parse(name)
        if verb == "pin":
            self._pinned.add(checkpoint)
            self._spare(checkpoint)
        elif verb == "unpin":
            self._pinned.discard(checkpoint)
        elif verb == "persist":
            self._spare(checkpoint)
            for tier in self._outer():
                self._asked.setdefault(tier, set()).add(checkpoint)
        else:
            self._spared.discard(checkpoint)
            self._delete(checkpoint)

    def _delete(self, checkpoint: CheckpointId) -> None:
        if checkpoint not in self._spared:
            self._unwanted.setdefault(checkpoint)
        while len(self._unwanted) > REMEMBERED_DELETES:
            del self._unwanted[next(iter(self._unwanted))]

    def _spare(self, checkpoint: CheckpointId) -> None:
        self._spared.add(checkpoint)
        self._unwanted.pop(checkpoint, None)

    def set_policy(self, policy: Policy, look: Look) -> Policy:
        """Other schedules and retention, from a step that all ranks can still hear of."""
        if self.orders is None:
            raise ValueError("no attempt has begun: change the job's manifest instead")
        if not policy.tiers and policy.every_steps < 1:
            raise ValueError(
                f"every_steps is {policy.every_steps}; expected 1 or more (a schedule can be made "
                "rare, not taken away: give a large number), or `tiers` with what shall change"
            )
        if policy.effective_from < 0:
            raise ValueError(f"effective_from is {policy.effective_from}; expected 0 or more")
        interval = TierPolicy(schedule=Schedule(every_steps=policy.every_steps))
        change = policy.tiers or {MEMORY: interval}
        why_not = self.standing.problem(change)
        if why_not:
            raise ValueError(why_not)
        if self.standing.stands(change):
            return self.standing.newest
        return self._change(self.orders, change, look, policy.effective_from)

    def _change(
        self, orders: OrderBook, change: Mapping[str, TierPolicy], look: Look, from_step: int = 0
    ) -> Policy:
        start = orders.common_step(look, from_step)
        before = self.standing.newest.tiers[MEMORY]
        done = self.standing.change(change, start)
        if done.tiers[MEMORY] != before:
            orders.set_schedule(done.tiers[MEMORY].schedule, start)
        return done

    def first_interval(self, record: AttemptRecord) -> int:
        """An attempt is about to begin: the capture interval of all its ranks."""
        return self.standing.begin(record.base.step + 1 if record.base is not None else 0)

    def _settle_policy(self, look: Look) -> None:
        """By what the sidecars remember; then by this topology, if that was changed meanwhile."""
        if self.orders is None:
            return
        if not self.standing.settled:
            if not self.census.all_heard() and look.now - self._begun_at < FRESH_SECONDS:
                return
            self.standing.settle()
            schedule = self.standing.newest.tiers[MEMORY].schedule
            self.orders.configure(schedule, certain=self.standing.was_changed)
        if self.standing.wanted and look.training and not look.silent:
            self._change(self.orders, self.standing.wanted, look)

    def _step(self) -> int:
        """Where the job is: what holds later does not hold yet."""
        base = self.record.base if self.record is not None else None
        ranks = self.census.ranks(self.attempt).values()
        return min((rank.step for rank in ranks), default=base.step if base is not None else 0)

    def retention(self, tier: str) -> Retention:
        """What a tier keeps now."""
        return self.standing.retention(tier, self._step())

    def flush(self) -> FlushReply:
        """Ask for one common save, or tell how far the last one got."""
        orders, outermost = self.orders, self._topology.tiers.outermost
        if orders is None:
            return FlushReply(step=0, durable=False, message="no attempt has begun yet")
        there = self._word.complete.get(outermost, ())
        safe = max((c.step for c in there), default=0)
        message = f"step {safe} is the newest in {outermost}"
        if not self.census.training(self.attempt):  # nobody can save: what is there shall be safe
            newest = max((c for cs in self._word.complete.values() for c in cs), default=None)
            last = newest.step if newest is not None else 0
            if newest is not None and last > safe:  # whatever the tier's own schedule says
                self._asked.setdefault(outermost, set()).add(newest)
            heard = self.census.all_heard()  # by a leader that has just started, they are not
            return FlushReply(step=last, durable=heard and safe >= last, message=message)
        if not orders.forced_step and not orders.forced_pending:
            orders.force_save()
        step = orders.forced_step
        done = bool(step) and safe >= step and not orders.forced_pending
        if done:
            orders.forced_step = 0  # asked again after this answer, it is another flush
        return FlushReply(step=step, durable=done, message=message)

    # --- the word -----------------------------------------------------------------------------

    def look(self, now: float, waiting: Iterable[int] = ()) -> Look:
        """What orders are decided from."""
        return Look(
            attempt=self.attempt,
            now=now,
            stalled=self._stalled(now),
            training=self.census.training(self.attempt) if self.attempt else {},
            ranks=self.census.ranks(self.attempt) if self.attempt else {},
            silent=self.census.silent(now, NOTICE_SECONDS),
            replicas_waiting=frozenset(waiting),
            step_seconds=self.census.seconds_per_step(),
            backlog=self._backlog(),
        )

    def _stalled(self, now: float) -> bool:
        limit = self._topology.hang_seconds
        out = self.census.moved_at + limit
        return bool(limit) and now >= out and self.census.heard_since(out)

    def woke(self, now: float) -> None:
        """The leader was paused: nothing is concluded from what it did not hear meanwhile."""
        self.census.woke(now, NOTICE_SECONDS)

    def speak(self, look: Look) -> ProgressReply:
        """Work the word out anew; its version grows only if it says something else."""
        word = self._decide(look)
        if replace(word, version=self._word.version) != self._word:
            self._word = replace(word, version=self._word.version + 1)
        return self._word

    def _decide(self, look: Look) -> ProgressReply:
        ring = self.ring = self._ring(look.now)
        self._settle_policy(look)
        if self.record is None or self.orders is None or self.superseded:
            why = f"attempt {self.superseded} has replaced this world" if self.superseded else ""
            return ProgressReply(attempt=0, addresses=dict(self._addresses), message=why)
        complete = self._complete()
        persist = self._persist(complete, look.now)
        in_memory = complete[MEMORY]
        quiet = f"{silence(look.silent)}: no step is announced meanwhile" if look.silent else ""
        warnings = (*ring.warnings, self.remote.trouble, quiet)
        return ProgressReply(
            attempt=self.attempt,
            record=self.record,
            complete=complete,
            durable=complete.get(REMOTE, ()),
            pinned=tuple(sorted(self.pinned())),
            complete_step=in_memory[0].step if in_memory else 0,
            orders=self.orders.update(look),
            persist=persist,
            thin=self._thin(complete, persist, look.now),
            unwanted=tuple(sorted(self.unwanted)),
            policies=self.standing.word,
            neighbors=ring.neighbors,
            addresses=dict(self._addresses),
            message="; ".join(filter(None, warnings)),
        )

    def pinned(self) -> frozenset[CheckpointId]:
        """Kept until people unpin them."""
        return frozenset(self._pinned | self.remote.pins)

    def protected(self) -> frozenset[CheckpointId]:
        """What nobody may delete: base, last durable, pinned, the only one that is complete."""
        kept = set(self.pinned())
        kept.update(self._durable()[:1])
        whole = {c for there in self._word.complete.values() for c in there}
        left = whole - self._unwanted.keys()
        if whole and len(left) < 2:
            kept.add(max(left or whole))
        if self.record is not None and self.record.base is not None:
            kept.add(self.record.base)
        return frozenset(kept)

    def _history(self, checkpoints: Iterable[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Those on the lineage, newest first."""
        lineage = self.lineage
        if lineage is None:
            return ()
        return tuple(sorted((c for c in checkpoints if lineage.contains(c)), reverse=True))

    def _durable(self) -> tuple[CheckpointId, ...]:
        """Committed, on the lineage, and not about to be deleted; newest first."""
        return self._history(c for c in self.remote.commits if c not in self.remote.intents)

    def _complete(self) -> dict[str, tuple[CheckpointId, ...]]:
        tiers, copies = self._topology.tiers, self.census.copies()
        found = {MEMORY: self._history(self._in_memory(copies))}
        if tiers.local is not None:
            found[LOCAL] = self._history(complete_in(copies, LOCAL))
        if tiers.neighbor is not None:
            found[NEIGHBOR] = self._history(complete_in(copies, NEIGHBOR))
        if tiers.remote is not None:
            found[REMOTE] = self._durable()
        return found

    def _in_memory(self, copies: list[ShardCopy]) -> set[CheckpointId]:
        """Published by all; not if the sealed shards turned out not to belong together."""
        world = self._topology.world_size
        published = set(published_by_all(self.census.published(), world))
        sealed = [c for c in copies if c.tier == MEMORY and c.checkpoint in published]
        whole = complete_in(sealed, MEMORY)
        for checkpoint in {c.checkpoint for c in sealed} - set(whole):
            if len({c.rank for c in sealed if c.checkpoint == checkpoint}) == world:
                published.discard(checkpoint)
        return published

    def _outer(self) -> list[str]:
        tiers = self._topology.tiers
        return [n for n in TIERS if n != MEMORY and getattr(tiers, n) is not None]

    def _schedule(self, tier: str) -> Schedule:
        """That holds now."""
        return self.standing.schedule(tier, self._step())

    def _persist(
        self, complete: Mapping[str, tuple[CheckpointId, ...]], now: float
    ) -> dict[str, tuple[CheckpointId, ...]]:
        """Tier -> what it shall take beyond its own schedule, until it has it."""
        found = {}
        for tier in self._outer():
            there = complete.get(tier, ())
            wanted = {c for c in self._asked.get(tier, ()) if c not in there}
            self._asked[tier] = wanted
            self._choose_by_time(tier, complete[MEMORY], there, now)
            last = self._chosen.get(tier)
            if last is not None and last[0] in there:
                self._arrived[tier] = last[0]  # thinned out later, it is not wanted again
            elif last is not None and last[0] != self._arrived.get(tier):
                wanted = wanted | {last[0]}
            wanted = wanted - self.unwanted
            if wanted:
                found[tier] = tuple(sorted(wanted))
        return found

    def _choose_by_time(
        self,
        tier: str,
        in_memory: Iterable[CheckpointId],
        there: tuple[CheckpointId, ...],
        now: float,
    ) -> None:
        schedule = self._schedule(tier)
        if not schedule.every_seconds:
            return
        last, when = self._chosen.get(tier, (None, float("-inf")))
        if last is None and there:  # a new leader: what is there was chosen before
            last = there[0]
        chosen = chosen_by_time(schedule, in_memory, last_chosen=last, last_time=when, now=now)
        if chosen is not None:
            self._chosen[tier] = (chosen, now)

    def _thin(
        self,
        complete: Mapping[str, tuple[CheckpointId, ...]],
        persist: Mapping[str, tuple[CheckpointId, ...]],
        now: float,
    ) -> tuple[CheckpointId, ...]:
        tiers, lineage = self._topology.tiers, self.lineage
        if tiers.local is None or lineage is None or not self.census.all_fresh(now):
            return ()
        near = (LOCAL, NEIGHBOR)
        copies = self.census.copies()
        present = {c.checkpoint for c in copies if c.tier in near}
        in_memory = {c for there in self.census.published().values() for c in there}
        in_memory.update(c.checkpoint for c in copies if c.tier == MEMORY)
        disks = [state for tier in near for state in self.census.tiers(tier).values()]
        going = {c for chosen in persist.values() for c in chosen}
        view = ThinView(
            lineage=lineage,
            present=frozenset(present),
            in_memory=frozenset(in_memory),
            complete_local=frozenset(complete.get(LOCAL, ())),
            complete_neighbor=frozenset(complete.get(NEIGHBOR, ())),
            durable=frozenset(complete.get(REMOTE, ())),
            has_neighbor=tiers.neighbor is not None and self._topology.replicas > 1,
            has_remote=tiers.remote is not None,
            retention=self.retention(LOCAL),
            pinned=self.pinned(),
            in_transit=frozenset(going | self._for_upload(complete)),
            disk_full=any(disk.full for disk in disks),
        )
        return thin(view)

    def _for_upload(self, complete: Mapping[str, tuple[CheckpointId, ...]]) -> set[CheckpointId]:
        """The newest that the remote tier's own schedule takes and that are not there yet."""
        if self._topology.tiers.remote is None:
            return set()
        durable = complete.get(REMOTE, ())
        newest = durable[0] if durable else CheckpointId(-1, 0)
        waiting = [
            c
            for c in complete.get(LOCAL, ())
            if c > newest and due(self.standing.schedule(REMOTE, c.step), c, SCHEDULE)
        ]
        return set(waiting[:KEPT_FOR_UPLOAD])

    def _backlog(self) -> int:
        """Of the nearest outer tier that works: while it has not read a slot, the slot is taken."""
        for tier in self._outer():
            states = [state for state in self.census.tiers(tier).values() if state.ok]
            if states:
                longest = max(state.backlog for state in states)
                return -(-longest // self._topology.processes_per_replica)
        return 0

    def _ring(self, now: float) -> Ring:
        """None for a moment while a new leader does not know where all run: by addresses alone it
        would be another one, and for that long both copies might lie on one node.
        """
        if self._topology.tiers.neighbor is None:
            return Ring()
        if not self.census.all_heard() and now - self._begun_at < FRESH_SECONDS:
            return Ring()
        where = {i: address.rpartition(":")[0] for i, address in self._addresses.items()}
        nodes = self.census.nodes()
        where.update(nodes)
        told = self.placement or Placement()
        domain = {i: d for i, d in told.domains.items() if told.nodes.get(i) == nodes.get(i)}
        return neighbors(range(self._topology.replicas), where, domain or None)
