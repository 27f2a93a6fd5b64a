"""Finds what trainers have saved and moves it outwards, each tier by its own schedule.

The agent makes one. A notice or, each second, a look at the slots finds what is published; it is
sealed, and each tier's worker takes what its tier still wants. What is done is derived from what
is here, so a restart of the sidecar loses nothing. It decides nothing for the job: schedules by
seconds, thinning and completeness are the leader's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, Protocol

from backstay_protocol.clock import Clock
from backstay_protocol.copies import copy_of
from backstay_protocol.errors import BackstayError, Cancelled, CorruptData, DigestMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import Inventory, ShardCopy, TierState
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE
from backstay_protocol.schedules import due
from backstay_protocol.slots import SlotBusy
from backstay_protocol.topology import Schedule, Tiers
from backstay_sidecar.replication.sealer import Sealed, Sealer
from backstay_sidecar.replication.wanted import LeaderWord, Shard, ShardKey, wanted
from backstay_sidecar.replication.worker import TierWorker
from backstay_sidecar.tiers.base import ShardReader, Tier, WritableTier
from backstay_sidecar.tiers.disk import DiskStore, HeldTier, Shelved
from backstay_sidecar.tiers.memory import MemoryTier, Published
from backstay_sidecar.tiers.onepass import one_pass

LOOK_SECONDS = 1.0
BELIEVE_SECONDS = 30.0
"""What the neighbour has taken the leader sees complete there within so long, or it is offered
again."""
NUM_SEALERS = 2

log = logging.getLogger(__name__)


class Emit(Protocol):
    """The event bus."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Never blocks or raises."""
        ...


class Meter(Protocol):
    """What is counted."""

    def moved(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A shard has reached a tier."""
        ...

    def failed(self, tier: str) -> None:
        """A transfer failed."""
        ...


@dataclass(frozen=True)
class Here:
    """What lies in this pod's volumes, as of the last look."""

    published: tuple[Published, ...] = ()
    shards: dict[ShardKey, Shard] = field(default_factory=dict)
    inventory: Inventory = field(default_factory=Inventory)
    created: dict[CheckpointId, float] = field(default_factory=dict)
    disk_error: str = ""


NOT_LOOKED = "the disk was not looked at yet"


class Replicator:
    """One per sidecar. All state is touched in the event loop only."""

    def __init__(
        self,
        *,
        memory: MemoryTier,
        local: DiskStore | None,
        held: HeldTier | None,
        outer: Mapping[str, WritableTier],
        tiers: Tiers,
        schedule: Callable[[str, int], Schedule],
        word: Callable[[], LeaderWord],
        changed: Callable[[], None],
        emit: Emit,
        meter: Meter,
        clock: Clock,
    ) -> None:
        """`outer`: neighbor and remote, where configured; `schedule`: by which a tier takes a
        checkpoint of a step; `word`: the leader's word that counts
        now; `changed` is called when what is here, or its way outwards, has changed.
        """
        self.here = Here(disk_error=NOT_LOOKED if local is not None else "")
        self.cancel = Event()
        self._memory = memory
        self._local = local
        self._held = held
        self._tiers = tiers
        self._schedule = schedule
        self._word = word
        self._changed = changed
        self._emit = emit
        self._meter = meter
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._sealing: dict[tuple[int, int], ShardKey] = {}
        self._seal_threads = ThreadPoolExecutor(NUM_SEALERS, "seal")
        self._placed: dict[str, dict[ShardKey, ShardCopy]] = {NEIGHBOR: {}, REMOTE: {}}
        self._offered: dict[ShardKey, float] = {}
        """When the neighbour last said that it has it."""
        self._doubted: set[ShardKey] = set()
        """Offered once more because the leader does not see them there."""
        self._degraded: set[str] = set()
        self._troubled_slots: set[tuple[int, int]] = set()
        self.sealer = Sealer(memory, local, self._local_due, self.cancel)
        stores: dict[str, WritableTier] = {LOCAL: local} if local is not None else {}
        stores.update(outer)
        self.workers = {
            name: TierWorker(store, self._queue_of(name), self, clock, self.cancel)
            for name, store in stores.items()
        }
        self._tasks: list[asyncio.Task[Any]] = []

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._spawn("look", self._watch)
        for worker in self.workers.values():
            self._spawn(worker.name, worker.run)

    async def close(self) -> None:
        """Stop transfers and end every task."""
        self.cancel.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers.values():
            worker.close()
        self._seal_threads.shutdown(wait=False, cancel_futures=True)

    def notice(self) -> None:
        """Something was published, or the leader has spoken: look now."""
        self._wake.set()
        for worker in self.workers.values():
            worker.wake()

    def notice_from_thread(self) -> None:
        """As `notice`, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notice)

    def offer_again(self) -> None:
        """Another replica or another pod may keep our copies from now on: what the old one took
        says nothing. Offering what is there costs one answer.
        """
        self._placed[NEIGHBOR].clear()
        self._offered.clear()
        self._doubted.clear()
        self.notice()

    def _spawn(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.create_task(self._forever(name, run), name=name))

    async def _forever(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await run()
            except Exception:  # this loop must outlive any single surprise
                log.exception("the %s loop failed; it goes on", name)
                await asyncio.sleep(LOOK_SECONDS)

    # --- what is here -------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            self._wake.clear()
            here = await asyncio.to_thread(self.look)
            changed = here != self.here
            self.here = here
            self._begin_sealing(here)
            self._tell_degraded()
            self._doubt_neighbor()
            if changed:
                self._forget_gone()
                for worker in self.workers.values():
                    worker.wake()
                self._changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()

    def look(self, *, siblings: bool = False) -> Here:
        """Look at memory volume and disk. Blocks. With `siblings` also what may only be read."""
        published = tuple(self._memory.published())
        local, held, error = self._look_at_disk(siblings)
        shards: dict[ShardKey, Shard] = {}
        for shelved in local:
            copy = shelved.copy
            shards[copy.checkpoint, copy.rank] = _shard(copy, shelved.reason, in_local=True)
        copies = [shelved.copy for shelved in (*local, *held)]
        chains = {s.copy.checkpoint.attempt: s.chain for s in (*local, *held)}
        created = {s.copy.checkpoint: s.created for s in (*held, *local)}
        for found in published:
            manifest = found.manifest
            if manifest.sealed:
                copy = self._memory.copy_of(manifest)
                key = (copy.checkpoint, copy.rank)
                copies.append(copy)
                shards[key] = _shard(copy, manifest.reason, in_local=key in shards, in_memory=True)
                chains[manifest.attempt] = manifest.chain
                created[copy.checkpoint] = manifest.created
        inventory = Inventory(copies=tuple(copies), chains=chains)
        return Here(published, shards, inventory, created, error)

    def _look_at_disk(self, siblings: bool) -> tuple[list[Shelved], list[Shelved], str]:
        try:
            local = self._local.scan() if self._local is not None else []
            held = self._held
            if held is None:
                return local, [], ""
            return local, held.scan_all() if siblings else held.own.scan(), ""
        except OSError as error:
            return [], [], f"the disk can't be read: {error}"

    def _forget_gone(self) -> None:
        """What was placed elsewhere is remembered for as long as it could be wanted again."""
        newest = max(self._word().complete.get(REMOTE, ()), default=None)
        for key in self._offered.keys() - self.here.shards.keys():
            self._offered.pop(key)
            self._doubted.discard(key)
        for tier, placed in self._placed.items():
            for key in [key for key in placed if key not in self.here.shards]:
                if tier == NEIGHBOR or (newest is not None and key[0] <= newest):
                    del placed[key]

    def _doubt_neighbor(self) -> None:
        """Offer again what the leader does not see complete there: a node may have lost it."""
        word, now = self._word(), self._clock.monotonic()
        if not word.attempt or NEIGHBOR not in self.workers:
            return
        complete, placed = word.complete.get(NEIGHBOR, ()), self._placed[NEIGHBOR]
        lost = [
            key
            for key in placed
            if key[0] not in complete and now - self._offered.get(key, 0.0) > BELIEVE_SECONDS
        ]
        for key in lost:
            del placed[key]
        self._doubted.update(lost)
        if lost:
            self.workers[NEIGHBOR].wake()

    # --- sealing ------------------------------------------------------------------------------

    def _begin_sealing(self, here: Here) -> None:
        for found in here.published:
            place = (found.slot_rank, found.slot)
            if not found.manifest.sealed and place not in self._sealing:
                self._sealing[place] = (found.manifest.checkpoint, found.manifest.rank)
                self._tasks.append(asyncio.create_task(self._seal(place)))
        self._tasks = [task for task in self._tasks if not task.done()]

    async def _seal(self, place: tuple[int, int]) -> None:
        loop, begun = asyncio.get_running_loop(), self._clock.monotonic()
        try:
            sealed = await loop.run_in_executor(self._seal_threads, self.sealer.seal, *place)
        except (SlotBusy, FileNotFoundError, Cancelled):
            return
        except (BackstayError, OSError) as error:
            if place not in self._troubled_slots:
                self._troubled_slots.add(place)
                self._emit("seal_failed", rank=place[0], slot=place[1], message=str(error))
            return
        finally:
            self._sealing.pop(place, None)
        self._troubled_slots.discard(place)
        if sealed is not None:
            self._was_sealed(sealed, self._clock.monotonic() - begun)
        self.notice()

    def _was_sealed(self, sealed: Sealed, seconds: float) -> None:
        manifest = sealed.manifest
        self._meter.moved(MEMORY, manifest.size, seconds)
        self._emit(
            "shard_sealed",
            checkpoint=manifest.checkpoint,
            rank=manifest.rank,
            bytes=manifest.size,
            seconds=round(seconds, 3),
            local=sealed.in_local,
        )
        if sealed.in_local:
            self._meter.moved(LOCAL, manifest.size, seconds)
        if sealed.local_error is not None:
            self._meter.failed(LOCAL)
            self.workers[LOCAL].trouble(sealed.local_error)

    def _local_due(self, manifest: Manifest) -> bool:
        """Asked in a sealing thread. A disk in trouble is left to its worker: it may hang."""
        local = self._tiers.local
        if local is None or self._local is None or not self._local.prepared:
            return False
        if self.workers[LOCAL].retry.failures:
            return False
        chosen = self._word().persist.get(LOCAL, ())
        schedule = self._schedule(LOCAL, manifest.step)
        return due(schedule, manifest.checkpoint, manifest.reason, chosen)

    # --- the workers' side (Moves) ------------------------------------------------------------

    def _queue_of(self, tier: str) -> Callable[[], list[Shard]]:
        def queue() -> list[Shard]:
            shards, word = self.here.shards, self._word()
            if tier != LOCAL and not word.attempt:
                return []  # nothing leaves this pod while no attempt is under way
            if tier == LOCAL:
                there = {key for key, shard in shards.items() if shard.in_local}
                there.update(self._sealing.values())
            else:
                there = set(self._placed[tier])
            return wanted(tier, partial(self._schedule, tier), shards.values(), there, word)

        return queue

    @contextmanager
    def source(self, tier: str, shard: Shard) -> Iterator[ShardReader]:
        """The disk's copy where there is one, so that the slot stays free for the trainer."""
        store = self._source_of(tier, shard)
        with store.open(shard.checkpoint, shard.rank) as reader:
            yield reader

    def _source_of(self, tier: str, shard: Shard) -> DiskStore | MemoryTier:
        if tier != LOCAL and shard.in_local and self._local is not None:
            return self._local
        return self._memory

    def moved(self, tier: str, shard: Shard, manifest: Manifest, seconds: float) -> None:
        """A tier has taken a shard."""
        if tier in self._placed:
            self._placed[tier][shard.key] = copy_of(manifest, tier)
        if tier == NEIGHBOR:
            self._offered[shard.key] = self._clock.monotonic()
        if tier != NEIGHBOR or shard.key not in self._doubted:
            self._tell_moved(tier, shard, seconds)
        self._tell_degraded()
        self._wake.set()
        self._changed()

    def _tell_moved(self, tier: str, shard: Shard, seconds: float) -> None:
        self._meter.moved(tier, shard.size, seconds)
        self._emit(
            "shard_stored",
            tier=tier,
            checkpoint=shard.checkpoint,
            rank=shard.rank,
            bytes=shard.size,
            seconds=round(seconds, 3),
        )

    def failed(self, tier: str, shard: Shard, error: Exception, *, first: bool) -> None:
        """A transfer failed. The first of a row is told; the rest is the tier's state."""
        self._meter.failed(tier)
        gone = isinstance(error, FileNotFoundError)
        if first and not gone:
            self._emit(
                "transfer_failed",
                tier=tier,
                checkpoint=shard.checkpoint,
                rank=shard.rank,
                message=str(error),
            )
        if DigestMismatch.__name__ in str(error) and shard.in_memory and shard.in_local:
            # The neighbour was served from memory, what was offered lies on the disk.
            suspect = asyncio.to_thread(self.verify, self._memory, shard.checkpoint, shard.rank)
            self._tasks.append(asyncio.create_task(suspect))
        self._tell_degraded()
        self._wake.set()

    def source_bad(self, tier: str, shard: Shard, error: CorruptData) -> None:
        """The copy that was read is bad: it is struck here, before anybody else reads it."""
        self._strike(self._source_of(tier, shard), shard.checkpoint, shard.rank, error)

    def verify(self, store: Tier, checkpoint: CheckpointId, rank: int) -> bool:
        """Read a copy that is here and strike it if it is bad. Blocks. False: bad, or not there."""
        try:
            with store.open(checkpoint, rank) as shard:
                one_pass(shard, None, self.cancel)
        except FileNotFoundError:
            return False
        except CorruptData as error:
            self._strike(store, checkpoint, rank, error)
            return False
        return True

    def _strike(self, store: Tier, checkpoint: CheckpointId, rank: int, error: CorruptData) -> None:
        self._emit(
            "copy_struck", tier=store.name, checkpoint=checkpoint, rank=rank, message=str(error)
        )
        store.delete(checkpoint, rank)
        self.notice_from_thread()

    # --- for the leader and for people ----------------------------------------------------------

    @property
    def uploaded(self) -> tuple[ShardCopy, ...]:
        """What this process has put into the remote tier and is not known to be committed."""
        committed = self._word().complete.get(REMOTE, ())
        return tuple(c for c in self._placed[REMOTE].values() if c.checkpoint not in committed)

    @property
    def published(self) -> dict[int, tuple[CheckpointId, ...]]:
        """Rank -> checkpoints in its slots, sealed or not."""
        found: dict[int, list[CheckpointId]] = {}
        for each in self.here.published:
            found.setdefault(each.manifest.rank, []).append(each.manifest.checkpoint)
        return {rank: tuple(sorted(ids)) for rank, ids in found.items()}

    def states(self) -> tuple[TierState, ...]:
        """How each configured tier does."""
        word = self._word()
        return tuple(self._state(name, word) for name in (MEMORY, *self.workers))

    def _state(self, name: str, word: LeaderWord) -> TierState:
        newest = max(word.complete.get(name, ()), default=None)
        worker = self.workers.get(name)
        trouble = self.here.disk_error if name == LOCAL else ""
        return TierState(
            tier=name,
            ok=not trouble and (worker is None or not worker.degraded),
            message=trouble or (worker.message if worker is not None else ""),
            newest=newest,
            newest_time=self.here.created.get(newest, 0.0) if newest is not None else 0.0,
            backlog=worker.backlog if worker is not None else len(self._sealing),
            full=worker is not None and worker.full,
            code=worker.code if worker is not None and worker.degraded else "",
        )

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing waits in a tier that works."""
        unsealed = any(not found.manifest.sealed for found in self.here.published)
        waiting = any(w.busy or (w.backlog and not w.degraded) for w in self.workers.values())
        return not unsealed and not self._sealing and not waiting

    def _tell_degraded(self) -> None:
        for worker in self.workers.values():
            if worker.degraded and worker.name not in self._degraded:
                self._degraded.add(worker.name)
                self._emit("tier_degraded", tier=worker.name, message=worker.message)
                self._changed()
            elif worker.name in self._degraded and not worker.message:
                self._degraded.discard(worker.name)
                self._emit("tier_recovered", tier=worker.name, backlog=worker.backlog)
                self._changed()


def _shard(copy: ShardCopy, reason: str, *, in_local: bool, in_memory: bool = False) -> Shard:
    return Shard(
        checkpoint=copy.checkpoint,
        rank=copy.rank,
        reason=reason,
        size=copy.size,
        in_memory=in_memory,
        in_local=in_local,
    )
