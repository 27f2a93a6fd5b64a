"""A sidecar's side of a restore: it speaks for the ranks of its own pod.

Routes call `restore` and `confirm` (trainers) and `promise` and `store` (the leader). One task
keeps the joins of this pod known to the leader; another carries its verdict. The member decides
nothing: what may be promised and stored is `backstay_protocol.promises`, what is loaded is the
leader's word. It survives its own restart (attempt.json), the leader's (it joins again) and the
death of any rank (a new nonce).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from backstay_protocol import promises
from backstay_protocol.clock import Clock
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.errors import (
    BackstayError,
    CorruptData,
    Refused,
    Unreachable,
    VersionMismatch,
)
from backstay_protocol.faults import fault
from backstay_protocol.history import Lineage
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.messages import (
    FAILED,
    GO,
    LOAD,
    WAIT,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    Inventory,
    JoinReply,
    JoinRequest,
    LeaderDecision,
    PromiseReply,
    PromiseRequest,
    RankVerdict,
    RestoreReply,
    RestoreRequest,
    StoreReply,
    StoreRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.names import PROTOCOL_VERSION, TIERS, works_with
from backstay_protocol.records import AttemptRecord, AttemptState
from backstay_protocol.topology import PodIdentity, Topology
from backstay_sidecar.restore.desk import REPLACED, Desk
from backstay_sidecar.restore.ports import Emit, LeaderDoor, Peers, RemoteStore, Shelf
from backstay_sidecar.restore.promise_store import PromiseStore
from backstay_sidecar.restore.resolve import LocalFiles, Resolver
from backstay_sidecar.restore.signals import Tasks

T = TypeVar("T")
MAX_WAIT_SECONDS = 30.0
"""Longest time for which a trainer's request is held."""
POLL_SECONDS = 10.0
"""How long the leader may hold a request of ours."""
FIRST_POLL_SECONDS = 0.5
"""So soon a rank hears who is missing; then the polls grow longer."""
RETRY_SECONDS = 0.5
SILENT_SECONDS = 60.0
"""A rank that waits for a decision and has not asked for so long is taken for dead."""


class Member:
    """One per sidecar."""

    def __init__(
        self,
        *,
        topology: Topology,
        pod: PodIdentity,
        memory: MemoryLayout,
        disk: DiskLayout | None,
        address: str,
        shelf: Shelf,
        peers: Peers,
        remote: RemoteStore | None,
        clock: Clock,
        emit: Emit,
    ) -> None:
        """`address`: `host:port` of this sidecar. Call `prepare`, then `start`."""
        self._topology = topology
        self._pod = pod
        self._memory = memory
        self._address = address
        self._shelf = shelf
        self._peers = peers
        self._clock = clock
        self._emit = emit
        self._store = PromiseStore(memory, disk, emit)
        tier = topology.tiers.remote
        self._resolver = Resolver(
            pod.replica,
            LocalFiles(memory, disk),
            peers.url,
            peers.headers,
            remote,
            RemoteLayout(tier.prefix, topology.run) if tier else None,
        )
        self._desk = Desk()
        self._unanswered: dict[str, float] = {}
        """Process whose go-ahead only attempt.json knows -> since when the leader is silent."""
        self._door: LeaderDoor | None = None
        self._writing = asyncio.Lock()
        self._tasks = Tasks(emit)

    # --- life ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Read and reserve attempt.json (blocks). Raises OSError: no usable memory volume."""
        self._store.prepare()

    def start(self, door: LeaderDoor) -> None:
        """Begin to keep the joins known at the leader. Needs a running loop."""
        self._door = door
        self._tasks.spawn(self._keep_joined(door))
        self._tasks.spawn(self._keep_verdicts(door))

    async def close(self) -> None:
        """End every task. Waiting trainers get their `wait` answers from the routes' end."""
        await self._tasks.close()

    # --- what the rest of the sidecar asks ----------------------------------------------------

    @property
    def promised(self) -> int:
        """Greatest number promised: everything under a smaller one is refused."""
        return self._store.state.promised

    @property
    def record(self) -> AttemptRecord | None:
        """The newest record stored here, its go-ahead given or not."""
        return self._store.state.record

    @property
    def attempt(self) -> int:
        """The attempt that this pod's ranks train in: orders and words count under it alone.

        0 while a round is under way: then nothing is deleted and no control word is written.
        """
        record = self.record
        if self._desk.joins or record is None or not record.ran:
            return 0
        return promises.current_attempt(self._store.state)

    def round_of(self, attempt: int) -> str:
        """Name of the round that the attempt was promised to; empty: another one is promised."""
        state = self._store.state
        return state.round if state.promised == attempt else ""

    def ran(self, round_name: str) -> bool:
        """Whether that round, the newest promised here, got its go-ahead."""
        state = self._store.state
        record = state.record
        return bool(
            record and record.ran and record.attempt == state.promised and state.round == round_name
        )

    @property
    def lineage(self) -> Lineage | None:
        """Lineage of the newest record."""
        record = self.record
        return Lineage(record.attempt, record.chain) if record else None

    @property
    def in_line(self) -> bool:
        """Whether this pod may begin without a look at the remote tier (rule `known`)."""
        return self._store.has_disk and promises.in_line(self._store.state, self._pod)

    @property
    def disk_trouble(self) -> str:
        """Why promises and records are not on the disk; empty: they are."""
        return self._store.disk_trouble

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks of this pod that are in restore just now."""
        return tuple(sorted(self._desk.joins))

    @property
    def decision(self) -> LeaderDecision | None:
        """What is being loaded, or was loaded last."""
        return self._desk.decision or self._desk.loaded

    # --- trainers -----------------------------------------------------------------------------

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """POST /v1/restore: held until there is a decision for this process, or its time is up."""
        if trouble := self._unfit(request):
            return self._reply(FAILED, trouble)
        desk = self._desk
        joined, is_new = desk.admit(request, self._clock.monotonic())
        if is_new:
            self._emit("rank_joined", rank=request.rank, pid=request.pid)
            await asyncio.to_thread(silence_orders, self._memory, request.rank)
        joined.open += 1
        try:
            await desk.changes.until(
                lambda: self._answer_for(request) is not None, _bounded(request.wait_seconds)
            )
        finally:
            joined.open -= 1
            joined.heard = self._clock.monotonic()
        reply = self._answer_for(request)
        if reply is None:
            return self._reply(WAIT, desk.message)
        if reply.status == LOAD:
            return replace(reply, decision=await self._resolve())
        return reply

    async def confirm(self, request: ConfirmRequest) -> ConfirmReply:
        """POST /v1/restore/confirm: held until the world's verdict is in, or its time is up."""
        desk = self._desk
        if desk.was_replaced(request.nonce):
            return ConfirmReply(status=FAILED, message=REPLACED)
        if (go := desk.went(request)) is not None:
            desk.let_go(request)
            return go
        if self._only_on_record(request):
            return await self._ask_whether_it_went(request)
        if (reply := desk.verdict_for(request)) is not None:
            return reply
        joined = desk.confirmed(request, self._clock.monotonic())
        joined.open += 1
        try:
            await desk.changes.until(
                lambda: self._verdict_for(request) is not None, _bounded(request.wait_seconds)
            )
        finally:
            joined.open -= 1
        return self._verdict_for(request) or ConfirmReply(status=WAIT, message=desk.message)

    def _unfit(self, request: RestoreRequest) -> str:
        if not works_with(request.protocol):
            return (
                f"rank {request.rank} speaks protocol {request.protocol}, its sidecar "
                f"{PROTOCOL_VERSION}; install the backstay version of the sidecar's image"
            )
        choice = self._topology.restore.choice
        if choice is not None and (why := choice.unknown_to(request.protocol)):
            return f"rank {request.rank}'s library: {why}"
        return REPLACED if self._desk.was_replaced(request.nonce) else ""

    def _answer_for(self, request: RestoreRequest) -> RestoreReply | None:
        desk = self._desk
        if desk.was_replaced(request.nonce):
            return self._reply(FAILED, REPLACED)
        if desk.failure:
            return self._reply(FAILED, desk.failure)
        if desk.decision is not None and desk.loads(request):
            return self._reply(LOAD, desk.decision.reason)
        return None

    def _reply(self, status: str, message: str) -> RestoreReply:
        tiers = self._topology.tiers
        return RestoreReply(
            status=status,
            message=message,
            run=self._topology.run,
            replica=self._pod.replica,
            tiers=tuple(name for name in TIERS if getattr(tiers, name) is not None),
            slots=tiers.memory.slots,
        )

    async def _resolve(self) -> Decision:
        """Once for all ranks of the pod: looking at files takes a while."""
        desk = self._desk
        decision = desk.decision
        assert decision is not None
        if desk.resolved is None:
            resolved = await asyncio.to_thread(self._resolver.resolve, decision)
            if desk.decision is decision:
                desk.resolved = resolved
            return resolved
        return desk.resolved

    def _verdict_for(self, request: ConfirmRequest) -> ConfirmReply | None:
        return self._desk.went(request) or self._desk.verdict_for(request)

    def _only_on_record(self, request: ConfirmRequest) -> bool:
        """Whether after a restart only attempt.json knows of this rank's go-ahead."""
        return request.rank not in self._desk.joins and request.ok and self.ran(request.round)

    async def _ask_whether_it_went(self, request: ConfirmRequest) -> ConfirmReply:
        """The go-ahead stored here may not have reached the others: the round can still be given
        up, and then this rank would train alone.
        """
        assert self._door is not None
        asked = VerdictRequest(
            replica=self._pod.replica,
            round=request.round,
            serial=request.serial,
            verdicts=(RankVerdict(rank=request.rank, nonce=request.nonce, ok=True),),
            wait_seconds=min(_bounded(request.wait_seconds), POLL_SECONDS),
        )
        try:
            reply = await self._door.verdict(asked)
        except (Unreachable, Refused) as error:
            since = self._unanswered.setdefault(request.nonce, self._clock.monotonic())
            await self._pause(self._desk.version)
            if self._clock.monotonic() - since > self._topology.restore.barrier_seconds:
                return ConfirmReply(status=FAILED, message=self._away_for_good(error))
            return ConfirmReply(status=WAIT, message=f"the leader can't be reached: {error}")
        self._unanswered.clear()
        return ConfirmReply(
            status=reply.status,
            message=reply.message,
            bytes_by_tier=reply.bytes_by_tier,
            bad=reply.bad,
            lost_steps=reply.lost_steps,
        )

    # --- joins, towards the leader ------------------------------------------------------------

    async def _keep_joined(self, door: LeaderDoor) -> None:
        """For as long as the sidecar lives: while ranks wait for a decision, ask for it."""
        silent_since, asked_about, patience = None, -1, FIRST_POLL_SECONDS
        while True:
            await self._desk.changes.until(lambda: self._desk.asks, SILENT_SECONDS)
            self._drop_silent()
            if not self._desk.asks:
                silent_since = None
                continue
            version = self._desk.version
            patience = FIRST_POLL_SECONDS if version != asked_about else 2 * patience
            asked_about = version
            try:
                reply = await self._unless(door.join(self._join_request(patience)), version)
            except (Unreachable, Refused) as error:
                silent_since = silent_since or self._clock.monotonic()
                self._leader_away(error, silent_since)
                await self._pause(version)
                continue
            silent_since = None
            if reply is not None and not self._take(reply):
                await self._pause(version)

    def _join_request(self, patience: float) -> JoinRequest:
        return JoinRequest(
            replica=self._pod.replica,
            generation=self._pod.generation,
            current=self._pod.current,
            replaces=self._pod.replaces,
            uid=self._pod.uid,
            address=self._address,
            ranks=self._desk.rank_joins(),
            wait_seconds=min(patience, POLL_SECONDS),
        )

    def _take(self, reply: JoinReply) -> bool:
        """Whether the reply moved anything."""
        if reply.status == FAILED:
            self._desk.fail(reply.message)
        elif reply.status == WAIT:
            self._desk.say(reply.message)
        elif reply.decision is not None and self._fits(reply.decision):
            self._desk.accept(reply.decision)
        else:
            return False
        return True

    def _fits(self, decision: LeaderDecision) -> bool:
        """A decision counts only for the promise given last and for exactly these processes."""
        state = self._store.state
        return (decision.attempt, decision.round) == (state.promised, state.round) and all(
            decision.nonces.get(rank) == joined.request.nonce
            for rank, joined in self._desk.joins.items()
        )

    def _leader_away(self, error: BackstayError, since: float) -> None:
        if self._clock.monotonic() - since > self._topology.restore.barrier_seconds:
            self._desk.fail(self._away_for_good(error))
        else:
            self._desk.say(f"the leader can't be reached: {error}")

    def _away_for_good(self, error: BackstayError) -> str:
        barrier = self._topology.restore.barrier_seconds
        return f"for {barrier:.0f} s the leader can't be reached: {error}"

    def _drop_silent(self) -> None:
        for joined in self._desk.drop_silent(self._clock.monotonic() - SILENT_SECONDS):
            self._emit("rank_silent", rank=joined.request.rank, pid=joined.request.pid)

    # --- verdicts, towards the leader ---------------------------------------------------------

    async def _keep_verdicts(self, door: LeaderDoor) -> None:
        """For as long as the sidecar lives: once all ranks have confirmed, see it through."""
        silent_since = None
        while True:
            await self._desk.changes.until(lambda: bool(self._desk.verdicts()), SILENT_SECONDS)
            request, version = self._verdict_request(), self._desk.version
            if request is None:
                silent_since = None
                continue
            try:
                reply = await self._unless(door.verdict(request), version)
            except (Unreachable, Refused) as error:
                silent_since = silent_since or self._clock.monotonic()
                self._leader_away(error, silent_since)
                await self._pause(version)
                continue
            silent_since = None
            if reply is not None:
                await self._obey(request, reply)

    def _verdict_request(self) -> VerdictRequest | None:
        decision, verdicts = self._desk.decision, self._desk.verdicts()
        if decision is None or not verdicts:
            return None
        return VerdictRequest(
            replica=self._pod.replica,
            round=decision.round,
            serial=decision.serial,
            verdicts=verdicts,
            wait_seconds=POLL_SECONDS,
        )

    async def _obey(self, asked: VerdictRequest, reply: VerdictReply) -> None:
        desk, version = self._desk, self._desk.version
        if reply.status == GO and reply.record is not None and not self.ran(asked.round):
            # A leader that died between the go-ahead's stores left this one out.
            await self.store(StoreRequest(round=asked.round, record=reply.record))
            if desk.version != version:
                return
        if reply.status == WAIT:
            desk.say(reply.message)
        elif reply.status == FAILED:
            desk.fail(reply.message)
        elif reply.status == GO and self.ran(asked.round):
            desk.end(asked.round, reply)
            self._emit("restore_done", attempt=self.promised, round=asked.round)
        else:
            desk.drop_decision(reply.message or "the leader decides again")

    async def _unless(self, poll: Coroutine[Any, Any, T], version: int) -> T | None:
        """The poll's answer, or None if the joins or the decision changed meanwhile."""
        asking = asyncio.ensure_future(poll)
        changed = asyncio.ensure_future(
            self._desk.changes.until(lambda: self._desk.version != version, 10 * POLL_SECONDS)
        )
        try:
            await asyncio.wait({asking, changed}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and self._desk.version == version:
                return asking.result()
            return None
        finally:
            for task in (asking, changed):
                task.cancel()
            await asyncio.gather(asking, changed, return_exceptions=True)

    async def _pause(self, version: int) -> None:
        """Before the next try; cut short when the joins change."""
        await self._desk.changes.until(lambda: self._desk.version != version, RETRY_SECONDS)

    # --- the leader's round -------------------------------------------------------------------

    async def promise(self, request: PromiseRequest) -> PromiseReply:
        """POST /v1/round/promise: promise the number, then report record and inventory."""
        async with self._writing:
            before = self._store.state
            after, granted, why = promises.promise(
                before, request, self._pod, has_disk=self._store.has_disk
            )
            if not granted:
                return PromiseReply(granted=False, why=why, known=_known(before))
            await asyncio.to_thread(self._keep_promise, after)
        decision = self._desk.decision
        if decision is not None and decision.round != request.round:
            self._desk.drop_decision("a new round has begun")
        self._emit("promised", attempt=request.attempt, round=request.round)
        inventory = await asyncio.to_thread(self._take_stock)
        seen = [*inventory.chains, *(copy.checkpoint.attempt for copy in inventory.copies)]
        return PromiseReply(
            granted=True,
            known=max([_known(before), *seen]),
            record=after.record,
            in_line=self.in_line,
            inventory=inventory,
        )

    async def store(self, request: StoreRequest) -> StoreReply:
        """POST /v1/round/store: keep the record; with `ran` it is the go-ahead."""
        async with self._writing:
            after, stored, why = promises.store(
                self._store.state, request, self._pod, has_disk=self._store.has_disk
            )
            if stored:
                await asyncio.to_thread(self._keep_record, after)
        if stored:
            self._emit("stored", attempt=request.record.attempt, ran=request.record.ran)
        return StoreReply(stored=stored, why=why)

    def _keep_promise(self, state: AttemptState) -> None:
        fault("promise.before")
        self._store.save(state)
        fault("promise.after")

    def _keep_record(self, state: AttemptState) -> None:
        fault("store.before")
        self._store.save(state)
        fault("store.after")

    def _take_stock(self) -> Inventory:
        self._shelf.seal()
        return self._shelf.inventory()


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_SECONDS)


def _known(state: AttemptState) -> int:
    return max(state.promised, state.record.attempt if state.record else 0)


def silence_orders(memory: MemoryLayout, rank: int) -> None:
    """Zero the sidecar's half of a rank's control block: orders to an earlier process die.

    A rank without a (readable) control block has no orders to obey.
    """
    with contextlib.suppress(OSError, CorruptData, VersionMismatch):
        block = ControlBlock(memory.control(rank), create=False)
        try:
            for word in Word:
                if word >= Word.SAVE_AT_STEP:
                    block[word] = 0
        finally:
            block.close()
