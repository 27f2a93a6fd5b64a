"""One sidecar, put together: tiers, member, leader, replication, and the leader's word.

`main` makes and starts it, `app` and the routes call it. It wires and passes on; what is decided is
decided in the protocol's pure modules, by the member and by the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Collection
from typing import Any

from backstay_protocol.clock import Clock
from backstay_protocol.control import State
from backstay_protocol.errors import BackstayError, Unreachable
from backstay_protocol.files import make_folder
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    GO,
    AgentStatus,
    BadSource,
    CaptureNotice,
    ConfirmReply,
    ConfirmRequest,
    Inventory,
    ProgressReply,
    ProgressRequest,
    ReplicaOffer,
    ReplicaReply,
    RestoreReply,
    RestoreRequest,
    ShardPlan,
)
from backstay_protocol.names import (
    LOCAL,
    MEMORY,
    NEIGHBOR,
    REMOTE,
    URL_SHARD_MANIFEST,
)
from backstay_protocol.pull import Endpoint, get_bytes
from backstay_sidecar.ending import Ending
from backstay_sidecar.events import Events
from backstay_sidecar.metrics import Metrics
from backstay_sidecar.replication.control import ControlBlocks
from backstay_sidecar.replication.deleted import Deleted
from backstay_sidecar.replication.gate import Gated
from backstay_sidecar.replication.keeper import REFUSED, Keeper
from backstay_sidecar.replication.prestop import Prestop
from backstay_sidecar.replication.progress import Progress
from backstay_sidecar.replication.refill import Elsewhere, refill
from backstay_sidecar.replication.replicator import Replicator
from backstay_sidecar.replication.rules import Rules
from backstay_sidecar.replication.thinning import Thinning
from backstay_sidecar.replication.wanted import LeaderWord, to_strike
from backstay_sidecar.restore.leader import Leader
from backstay_sidecar.restore.member import Member
from backstay_sidecar.restore.peers import HttpPeers
from backstay_sidecar.settings import Settings
from backstay_sidecar.stores import Stores
from backstay_sidecar.tiers.base import WritableTier, store_code
from backstay_sidecar.tiers.disk import DiskStore
from backstay_sidecar.tiers.neighbor import Neighbor, NeighborTier
from backstay_sidecar.whole_job import WholeJob

PROBE_SECONDS = 5.0

log = logging.getLogger(__name__)


class Agent:
    """One per process. `start` and `stop` run in the event loop; so do all coroutine methods."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Opens nothing yet."""
        self.settings = settings
        self.topology = settings.topology
        self.replica = settings.replica
        self.clock = clock
        self.events = Events(clock)
        self.metrics = Metrics(clock)
        self.stopping = asyncio.Event()
        self._moved = asyncio.Event()
        self.reply: ProgressReply | None = None
        """The leader's last word that counted when it came."""
        self._word = LeaderWord()
        self._step = 0
        """The greatest of this pod's ranks, when it was last told to the leader."""
        self._suspected: set[tuple[CheckpointId, int, str, int]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._refill_cancel = threading.Event()
        self.stores = Stores(settings, clock, lambda: self.word().attempt)
        self._neighbor: Neighbor | None = None
        self._make_parts(settings)

    def _make_parts(self, settings: Settings) -> None:
        topology, clock, emit = self.topology, self.clock, self.events.emit
        self.peers = HttpPeers(topology, settings.tokens[0])
        self.control = ControlBlocks(
            self.stores.layout, topology.ranks_of(self.replica), topology.tiers, self.replica, clock
        )
        self.member = Member(
            topology=topology,
            pod=settings.pod,
            memory=self.stores.layout,
            disk=self.stores.disk,
            address=settings.address,
            shelf=self,
            peers=self.peers,
            remote=self.stores.remote_store,
            clock=clock,
            emit=emit,
        )
        self.leader: Leader | None = None
        if settings.is_leader:
            self.leader = Leader(
                topology=topology,
                pod=settings.pod,
                own=self.member,
                peers=self.peers,
                remote=self.stores.remote_store,
                clock=clock,
                emit=emit,
                sweep=self.stores.abort_stale_uploads,
                keep=self.stores.keep_restores,
                placement_file=self.stores.layout.placement_file,
            )
        self.whole_job = WholeJob(
            self.leader, self.peers, lambda words: emit("requested", words=words)
        )
        where = self.stores.disk or self.stores.layout
        self._deleted = Deleted(where.deleted_file)
        self._rules = Rules(self.stores.layout.policy_file, topology.tiers)
        self.replicator = Replicator(
            memory=self.stores.memory,
            local=self.stores.local,
            held=self.stores.held,
            outer=self._outer_tiers(),
            tiers=topology.tiers,
            schedule=self._rules.schedule,
            word=self.word,
            changed=self._changed,
            emit=emit,
            meter=self.metrics,
            clock=clock,
        )
        self._thinning = Thinning(
            self.stores.memory,
            self.stores.own_areas,
            attempt=lambda: self.member.attempt,
            failed=lambda error: emit("thinning_failed", message=str(error)),
            done=self.replicator.notice_from_thread,
        )
        self.keeper = self._make_keeper()
        self.progress = Progress(
            send=self.leader.progress if self.leader is not None else self.peers.progress,
            build=self._progress_request,
            take=self._take,
            clock=clock,
        )
        self.prestop = Prestop(
            flush=self.whole_job.flush,
            reached=self._step_to_save,
            grace_seconds=settings.grace_seconds,
            clock=clock,
            emit=emit,
        )
        self.ending = Ending(
            alone=settings.flush,
            job=self.whole_job.view,
            reply=self._counting_reply,
            lineage=lambda: self.member.lineage,
            here=lambda: self.replicator.here,
        )

    def _outer_tiers(self) -> dict[str, WritableTier]:
        tiers: dict[str, WritableTier] = {}
        if self.topology.tiers.neighbor is not None:
            tiers[NEIGHBOR] = NeighborTier(
                replica=self.replica,
                address=self.settings.address,
                neighbor=lambda: self._neighbor,
                attempt=lambda: self.word().attempt,
                headers=self.peers.headers,
                clock=self.clock,
            )
        if self.stores.remote is not None:
            tiers[REMOTE] = self.stores.remote
        return tiers

    def _make_keeper(self) -> Keeper | None:
        if self.stores.held is None:
            return None
        return Keeper(
            self.stores.held.own,
            run=self.topology.run,
            replica=self.replica,
            headers=self.peers.headers,
            promised=lambda: self.member.promised,
            changed=self._changed,
            emit=self.events.emit,
            meter=self.metrics,
            clock=self.clock,
        )

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to work. Raises OSError if the memory volume can't be used."""
        await asyncio.to_thread(self._prepare_memory)
        for area in self.stores.own_areas:
            self._in_background(self._prepare_disk(area))
        self._in_background(self._recall_deleted())
        if self.leader is not None:
            self.leader.start(self._rules.told)
        self.member.start(self.leader if self.leader is not None else self.peers)
        self.replicator.start()
        self.progress.start()
        self._in_background(self._keep_word())
        if self.stores.remote is not None:
            self._in_background(self._probe_remote(self.stores.remote))
        self.events.emit(
            "sidecar_started",
            run=self.topology.run,
            replica=self.replica,
            generation=self.settings.pod.generation,
            pid=os.getpid(),
        )

    async def stop(self) -> None:
        """End every task and transfer."""
        self.stopping.set()
        self._refill_cancel.set()
        await self.prestop.close()
        await self.progress.close()
        await self.replicator.close()
        if self.keeper is not None:
            self.keeper.close()
        await self.member.close()
        if self.leader is not None:
            await self.leader.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.peers.close()
        self.control.close()

    async def drained(self) -> None:
        """Return when nothing is left to move in any tier that works."""
        while not self.replicator.idle:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._moved.wait()

    def _prepare_memory(self) -> None:
        make_folder(self.stores.layout.ranks)
        self._rules.recall()
        self.member.prepare()

    async def _prepare_disk(self, area: DiskStore) -> None:
        try:
            await asyncio.to_thread(area.prepare)
        except OSError as error:
            self.events.emit("disk_failed", area=area.area, message=str(error))
            self.replicator.workers[LOCAL].trouble(error)

    async def _recall_deleted(self) -> None:
        try:
            self._deleted.add(await asyncio.to_thread(self._deleted.recall))
        except OSError as error:
            log.warning("what people deleted can't be read: %s", error)
        self.progress.changed()

    async def _write_deleted(self) -> None:
        try:
            await asyncio.to_thread(self._deleted.save)
        except OSError as error:
            log.warning("what people deleted can't be written down: %s", error)

    async def _probe_remote(self, remote: Gated) -> None:
        """Tell early what is wrong with the store, and when it is right."""
        worker = self.replicator.workers[REMOTE]
        while True:
            try:
                await asyncio.to_thread(remote.probe)
            except (BackstayError, OSError) as error:
                if not worker.standing:
                    self.events.emit("remote_unusable", message=str(error))
                worker.standing, worker.standing_code = str(error), store_code(error)
            else:
                worker.standing = ""
                self.replicator.notice()
                return
            await asyncio.sleep(PROBE_SECONDS)

    async def _keep_word(self) -> None:
        """Ranks come to their attempt after the word did: it is written again each second."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self._write_word()
            except OSError as error:
                log.warning("a control block can't be written: %s", error)
            if self.keeper is not None:
                self.keeper.promise_grew()

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- what is here (ports.Shelf; both block) -----------------------------------------------

    def seal(self) -> None:
        """Seal each slot that is published and not yet sealed."""
        self.replicator.sealer.seal_all()

    def inventory(self) -> Inventory:
        """Every sealed copy that a restore may read from this sidecar.

        A delete that is under way is waited for: after a promise nothing that was told goes.
        """
        self._thinning.wait_for_delete()
        return self.replicator.look(siblings=True).inventory

    # --- trainers -----------------------------------------------------------------------------

    def captured(self, notice: CaptureNotice) -> None:
        """A trainer has told of a capture: look at once. A skipped one people want to know of."""
        if not notice.published:
            self.events.emit("save_skipped", rank=notice.rank, step=notice.step, message=notice.why)
        self.replicator.notice()

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """A rank joins."""
        return await self.member.restore(request)

    async def confirm(self, request: ConfirmRequest) -> ConfirmReply:
        """A rank has loaded. With the go-ahead its schedule is in force."""
        for bad in request.bad:
            if bad.proven:
                self._suspect(bad)
        reply = await self.member.confirm(request)
        if reply.status == GO:
            record = self.member.record
            self.control.begin(request.rank, record.every_steps if record is not None else 0)
            self.replicator.notice()
            self.progress.changed()
        return reply

    def _suspect(self, bad: BadSource) -> None:
        """A reader has proven a copy bad: its holder reads it again and lets it go."""
        decision = self.member.decision
        if decision is None or decision.base is None or bad.tier not in (MEMORY, LOCAL, NEIGHBOR):
            return
        key = (decision.base, bad.shard_rank, bad.tier, bad.holder)
        if key not in self._suspected:
            self._suspected.add(key)
            self._in_background(asyncio.to_thread(self._have_verified, *key))

    def _have_verified(self, checkpoint: CheckpointId, rank: int, tier: str, holder: int) -> None:
        if holder == self.replica:
            for shelf in self.stores.shelves(tier):
                self.replicator.verify(shelf, checkpoint, rank)
            return
        path = URL_SHARD_MANIFEST.format(checkpoint=checkpoint, rank=rank)
        url = f"{self.peers.url(holder)}{path}?tier={tier}&verify=true"
        # Out of reach or gone: then it is no source any more either.
        with contextlib.suppress(Unreachable, FileNotFoundError):
            get_bytes(Endpoint(url, self.peers.headers))

    async def keep(self, offer: ReplicaOffer) -> ReplicaReply:
        """A neighbour offers a shard."""
        if self.keeper is None:
            why = f"replica {self.replica} has no disk to keep copies on"
            return ReplicaReply(status=REFUSED, why=why)
        return await self.keeper.offer(offer)

    # --- the leader's word --------------------------------------------------------------------

    def word(self) -> LeaderWord:
        """What the leader said last, if it counts now: under the attempt that is promised here."""
        word = self._word
        return word if word.attempt and word.attempt == self.member.attempt else LeaderWord()

    def _take(self, reply: ProgressReply) -> None:
        if not reply.attempt or reply.attempt != self.member.attempt:
            return
        old, self.reply = self.reply, reply
        record = self.member.record
        base = record.base if record is not None else None
        self._word = LeaderWord.of(reply, self.member.lineage, base)
        for replica, address in reply.addresses.items():
            self.peers.moved(replica, address)
        self._follow_neighbor(reply)
        self._follow_policy(reply)
        self._write_word()
        if self._deleted.heed(reply):
            self._in_background(self._write_deleted())
        self._thin(reply, base)
        if old is None or old.attempt != reply.attempt:
            self._began(reply.attempt, base)
        if old is None or old.version != reply.version:
            self.replicator.notice()
            self.prestop.news()

    def _follow_neighbor(self, reply: ProgressReply) -> None:
        if not reply.neighbors:
            return  # a new leader that does not know yet where all run: the old one stays
        keeper = reply.neighbors.get(self.replica)
        address = "" if keeper is None else reply.addresses.get(keeper, "")
        if keeper is None or keeper == self.replica:
            neighbor = None
        else:
            neighbor = Neighbor(keeper, address or self.topology.address_of(keeper))
        old, self._neighbor = self._neighbor, neighbor
        if neighbor is not None and (old is None or old.replica != neighbor.replica):
            self.replicator.offer_again()

    def _follow_policy(self, reply: ProgressReply) -> None:
        if self._rules.heed(reply):
            try:
                self._rules.save()
            except OSError as error:
                log.warning("the policy can't be written down: %s", error)

    def _write_word(self) -> None:
        if self.reply is not None and self.reply.attempt == self.member.attempt:
            self.control.apply(self.reply)

    def _thin(self, reply: ProgressReply, base: CheckpointId | None) -> None:
        near = {c for c in (*reply.thin, *reply.unwanted) if c != base}
        published = (found.manifest.checkpoint for found in self.replicator.here.published)
        strike = to_strike(published, self._word)
        if not self._thinning.under_way and (strike or self._has_any(near)):
            self._thinning.under_way = True
            work = asyncio.to_thread(self._thinning.run, reply.attempt, near, strike)
            self._in_background(work)

    def _has_any(self, checkpoints: Collection[CheckpointId]) -> bool:
        copies = self.replicator.here.inventory.copies if checkpoints else ()
        return any(copy.tier != MEMORY and copy.checkpoint in checkpoints for copy in copies)

    def _began(self, attempt: int, base: CheckpointId | None) -> None:
        self.metrics.attempt_began(attempt)
        self.replicator.offer_again()  # the neighbour may have been replaced with its disk
        self._refill_cancel.set()
        self._refill_cancel = threading.Event()
        decision = self.member.decision
        if base is None or decision is None or decision.base != base or self.stores.local is None:
            return
        mine = [plan for plan in decision.shards if self._keeps(plan, decision.saved_world_size)]
        self._in_background(self._refill(base, mine, self.stores.local, self._refill_cancel))

    def _keeps(self, plan: ShardPlan, saved_world_size: int) -> bool:
        """Each shard of the base has one replica that keeps its local copy."""
        per_replica = self.topology.processes_per_replica
        if saved_world_size == self.topology.world_size:
            return plan.rank // per_replica == self.replica
        return plan.rank % self.topology.replicas == self.replica

    async def _refill(
        self,
        base: CheckpointId,
        plans: list[ShardPlan],
        local: DiskStore,
        cancel: threading.Event,
    ) -> None:
        here = await asyncio.to_thread(self.replicator.look)
        missing = [plan for plan in plans if (base, plan.rank) not in here.shards]
        open_remote = self.stores.remote.open if self.stores.remote is not None else None
        elsewhere = Elsewhere(self.replica, self.peers.url, self.peers.headers, open_remote)
        made = await refill(base, missing, local, elsewhere, cancel, self.events.emit)
        if made:
            self.events.emit("base_copied", checkpoint=base, shards=made)
            self.replicator.notice()

    # --- telling the leader -------------------------------------------------------------------

    def _changed(self) -> None:
        self._moved.set()
        self.progress.changed()

    def where(self) -> tuple[int, int]:
        """(attempt, step) that this pod has come to; 0: none. From any thread, for the logs."""
        return self.member.attempt, self._step

    def _progress_request(self, seen_version: int, wait_seconds: float) -> ProgressRequest:
        ranks = self.control.progress()
        self._step = max((rank.step for rank in ranks), default=0)
        return ProgressRequest(
            replica=self.replica,
            generation=self.settings.pod.generation,
            attempt=self.member.attempt,
            ranks=ranks,
            published=self.replicator.published,
            inventory=self.replicator.here.inventory,
            uploaded=self.replicator.uploaded,
            tiers=self.replicator.states(),
            unwanted=self._deleted.checkpoints,
            policies=self._rules.told,
            node=self.settings.node,
            seen_version=seen_version,
            wait_seconds=wait_seconds,
        )

    # --- what is said of this sidecar ---------------------------------------------------------

    def status(self) -> AgentStatus:
        """GET /v1/status."""
        return AgentStatus(
            run=self.topology.run,
            replica=self.replica,
            attempt=self.member.attempt,
            generation=self.settings.pod.generation,
            tiers=self.replicator.states(),
            message=self._message(),
        )

    def _message(self) -> str:
        if joined := self.member.joined:
            return f"ranks {', '.join(map(str, joined))} are in restore"
        if self.progress.trouble:
            return f"the leader does not answer: {self.progress.trouble}"
        if self.member.disk_trouble and self.stores.disk is not None:
            return f"promises are not on the disk: {self.member.disk_trouble}"
        return self.reply.message if self.reply is not None else ""

    def _counting_reply(self) -> ProgressReply | None:
        """The leader's last word, while it answers and its attempt is the one promised here."""
        reply = self.reply
        missing = reply is None or reply.attempt != self.member.attempt or self.progress.trouble
        return None if missing else reply

    def _step_to_save(self) -> int:
        """The last step of this pod's ranks that have not come to their end; 0: nobody trains."""
        busy = (State.TRAINING, State.FINISHING)
        ranks = self.control.progress()
        return max((progress.step for progress in ranks if progress.state in busy), default=0)
