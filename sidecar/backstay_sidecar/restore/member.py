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
from dataclasses import dataclass, field, replace
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
    AGAIN,
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
    RankJoin,
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

from backstay_sidecar.restore.ports import Emit, LeaderDoor, Peers, RemoteStore, Shelf
from backstay_sidecar.restore.promise_store import PromiseStore
from backstay_sidecar.restore.resolve import LocalFiles, Resolver
from backstay_sidecar.restore.signals import Changes, Tasks

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
REMEMBERED_NONCES = 1000


@dataclass
class _Joined:
    """One rank that is in restore."""

    request: RestoreRequest
    heard: float
    open: int = 0
    """Requests of it that are held just now."""
    verdict: RankVerdict | None = None
    """About the decision in force."""


@dataclass(frozen=True)
class _Ended:
    """How the ranks that were in restore left it."""

    round: str
    nonces: dict[int, str]
    reply: VerdictReply


@dataclass
class _Desk:
    """What the member holds in memory; all of it is told again after a restart."""

    joins: dict[int, _Joined] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    """Nonces of processes that gave way to newer ones."""
    decision: LeaderDecision | None = None
    resolved: Decision | None = None
    loaded: LeaderDecision | None = None
    """The last one that got its go-ahead."""
    failure: str = ""
    message: str = "joining"
    ended: _Ended | None = None
    version: int = 0
    """Grows with every change of the joins."""


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
        self._desk = _Desk()
        self._changes = Changes()
        self._writing = asyncio.Lock()
        self._tasks = Tasks(emit)

    # --- life ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Read and reserve attempt.json (blocks). Raises OSError: no usable memory volume."""
        self._store.prepare()

    def start(self, door: LeaderDoor) -> None:
        """Begin to keep the joins known at the leader. Needs a running loop."""
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
        joined = await self._admit(request)
        joined.open += 1
        try:
            await self._changes.until(
                lambda: self._answer_for(request) is not None, _bounded(request.wait_seconds)
            )
        finally:
            joined.open -= 1
            joined.heard = self._clock.monotonic()
        reply = self._answer_for(request)
        if reply is None:
            return self._reply(WAIT, self._desk.message)
        if reply.status == LOAD:
            return replace(reply, decision=await self._resolve())
        return reply

    async def confirm(self, request: ConfirmRequest) -> ConfirmReply:
        """POST /v1/restore/confirm: held until the world's verdict is in, or its time is up."""
        if request.nonce in self._desk.replaced:
            return ConfirmReply(status=FAILED, message=_REPLACED)
        if (reply := self._verdict_for(request)) is not None:
            return self._let_go(request, reply)
        joined = self._desk.joins[request.rank]
        joined.heard = self._clock.monotonic()
        joined.verdict = RankVerdict(
            rank=request.rank,
            nonce=request.nonce,
            ok=request.ok,
            bad=request.bad,
            error=request.error,
            bytes_by_tier=request.bytes_by_tier,
        )
        self._changes.notify()
        joined.open += 1
        try:
            await self._changes.until(
                lambda: self._verdict_for(request) is not None, _bounded(request.wait_seconds)
            )
        finally:
            joined.open -= 1
        return self._verdict_for(request) or ConfirmReply(status=WAIT, message=self._desk.message)

    def _let_go(self, request: ConfirmRequest, reply: ConfirmReply) -> ConfirmReply:
        """A rank that joined again for a round that it had its go-ahead for leaves restore."""
        desk = self._desk
        joined = desk.joins.get(request.rank)
        if reply.status == GO and joined is not None and joined.request.nonce == request.nonce:
            del desk.joins[request.rank]
            desk.version += 1
            if not desk.joins:
                desk.decision = desk.resolved = None
            self._changes.notify()
        return reply

    def _unfit(self, request: RestoreRequest) -> str:
        if not works_with(request.protocol):
            return (
                f"rank {request.rank} speaks protocol {request.protocol}, its sidecar "
                f"{PROTOCOL_VERSION}; install the backstay version of the sidecar's image"
            )
        if request.nonce in self._desk.replaced:
            return _REPLACED
        return ""

    async def _admit(self, request: RestoreRequest) -> _Joined:
        """A known nonce re-attaches; a new one takes the rank over and restarts the round."""
        desk, now = self._desk, self._clock.monotonic()
        joined = desk.joins.get(request.rank)
        if joined is not None and joined.request.nonce == request.nonce:
            joined.heard, joined.verdict = now, None
            return joined
        if joined is not None:
            self._forget_nonce(joined.request.nonce)
        if desk.ended and (old := desk.ended.nonces.get(request.rank)) not in (None, request.nonce):
            assert old is not None
            self._forget_nonce(old)
        desk.joins[request.rank] = joined = _Joined(request, now)
        self._drop_decision("a process joined")
        desk.failure, desk.version = "", desk.version + 1
        self._emit("rank_joined", rank=request.rank, pid=request.pid, last_step=request.last_step)
        self._changes.notify()
        await asyncio.to_thread(silence_orders, self._memory, request.rank)
        return joined

    def _forget_nonce(self, nonce: str) -> None:
        self._desk.replaced.append(nonce)
        del self._desk.replaced[:-REMEMBERED_NONCES]

    def _answer_for(self, request: RestoreRequest) -> RestoreReply | None:
        desk = self._desk
        joined = desk.joins.get(request.rank)
        if request.nonce in desk.replaced:
            return self._reply(FAILED, _REPLACED)
        if desk.failure:
            return self._reply(FAILED, desk.failure)
        if desk.decision is None or joined is None or joined.verdict is not None:
            return None
        if desk.decision.nonces.get(request.rank) != request.nonce:
            return None
        return self._reply(LOAD, desk.decision.reason)

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
        """The answer to a confirm, None while it is open."""
        desk = self._desk
        if self._went(request):
            reply = desk.ended.reply if desk.ended else VerdictReply(status=GO)
            return ConfirmReply(
                status=GO,
                message=reply.message,
                bytes_by_tier=reply.bytes_by_tier,
                bad=reply.bad,
                lost_steps=reply.lost_steps,
            )
        if desk.failure:
            return ConfirmReply(status=FAILED, message=desk.failure)
        joined, decision = desk.joins.get(request.rank), desk.decision
        if joined is None or joined.request.nonce != request.nonce or decision is None:
            return ConfirmReply(status=AGAIN, message="the round has begun anew")
        if (decision.round, decision.serial) != (request.round, request.serial):
            return ConfirmReply(status=AGAIN, message="the leader has decided again")
        return None

    def _went(self, request: ConfirmRequest) -> bool:
        """Whether the round that the rank has loaded for got its go-ahead."""
        ended = self._desk.ended
        if ended is not None and ended.round == request.round:
            return ended.nonces.get(request.rank) == request.nonce
        # After a restart of this sidecar: attempt.json says so.
        joined = self._desk.joins.get(request.rank)
        return joined is None and request.ok and self.ran(request.round)

    # --- joins, towards the leader ------------------------------------------------------------

    async def _keep_joined(self, door: LeaderDoor) -> None:
        """For as long as the sidecar lives: while ranks wait for a decision, ask for it."""
        silent_since, asked_about, patience = None, -1, FIRST_POLL_SECONDS
        while True:
            await self._changes.until(self._asks, SILENT_SECONDS)
            self._drop_silent()
            if not self._asks():
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

    def _asks(self) -> bool:
        desk = self._desk
        return bool(desk.joins) and desk.decision is None and not desk.failure

    def _join_request(self, patience: float) -> JoinRequest:
        return JoinRequest(
            replica=self._pod.replica,
            generation=self._pod.generation,
            current=self._pod.current,
            replaces=self._pod.replaces,
            uid=self._pod.uid,
            address=self._address,
            ranks=tuple(
                _rank_join(joined.request) for _, joined in sorted(self._desk.joins.items())
            ),
            wait_seconds=min(patience, POLL_SECONDS),
        )

    def _take(self, reply: JoinReply) -> bool:
        """Whether the reply moved anything."""
        desk = self._desk
        if reply.status == FAILED:
            desk.failure = reply.message or "the leader gave the restore up"
        elif reply.status == LOAD and reply.decision is not None and self._fits(reply.decision):
            desk.decision, desk.resolved = reply.decision, None
            for joined in desk.joins.values():
                joined.verdict = None
        elif reply.status == WAIT:
            desk.message = reply.message
        else:
            return False
        self._changes.notify()
        return True

    def _fits(self, decision: LeaderDecision) -> bool:
        """A decision counts only for the promise given last and for exactly these processes."""
        state = self._store.state
        return (decision.attempt, decision.round) == (state.promised, state.round) and all(
            decision.nonces.get(rank) == joined.request.nonce
            for rank, joined in self._desk.joins.items()
        )

    def _leader_away(self, error: BackstayError, since: float) -> None:
        desk, barrier = self._desk, self._topology.restore.barrier_seconds
        desk.message = f"the leader can't be reached: {error}"
        if self._clock.monotonic() - since > barrier:
            desk.failure = f"for {barrier:.0f} s {desk.message}"
        self._changes.notify()

    def _drop_silent(self) -> None:
        """A rank that no longer asks for its decision is dead: the leader shall name it missing."""
        desk, oldest = self._desk, self._clock.monotonic() - SILENT_SECONDS
        if desk.decision is not None:
            return
        for rank, joined in list(desk.joins.items()):
            if not joined.open and joined.heard < oldest:
                del desk.joins[rank]
                desk.version += 1
                self._emit("rank_silent", rank=rank, pid=joined.request.pid)

    def _drop_decision(self, why: str) -> None:
        desk = self._desk
        if desk.decision is None:
            return
        desk.decision = desk.resolved = None
        desk.message = why
        desk.version += 1
        for joined in desk.joins.values():
            joined.verdict = None
        self._changes.notify()

    # --- verdicts, towards the leader ---------------------------------------------------------

    async def _keep_verdicts(self, door: LeaderDoor) -> None:
        """For as long as the sidecar lives: once all ranks have confirmed, see it through."""
        silent_since = None
        while True:
            await self._changes.until(lambda: self._verdicts() is not None, SILENT_SECONDS)
            verdicts, version = self._verdicts(), self._desk.version
            if verdicts is None:
                silent_since = None
                continue
            try:
                reply = await self._unless(door.verdict(verdicts), version)
            except (Unreachable, Refused) as error:
                silent_since = silent_since or self._clock.monotonic()
                self._leader_away(error, silent_since)
                await self._pause(version)
                continue
            silent_since = None
            if reply is not None:
                await self._obey(verdicts, reply)

    def _verdicts(self) -> VerdictRequest | None:
        desk = self._desk
        if desk.decision is None or desk.failure or not desk.joins:
            return None
        verdicts = [joined.verdict for _, joined in sorted(desk.joins.items())]
        told = tuple(verdict for verdict in verdicts if verdict is not None)
        if len(told) < len(verdicts):
            return None
        return VerdictRequest(
            replica=self._pod.replica,
            round=desk.decision.round,
            serial=desk.decision.serial,
            verdicts=told,
            wait_seconds=POLL_SECONDS,
        )

    async def _obey(self, asked: VerdictRequest, reply: VerdictReply) -> None:
        desk = self._desk
        if reply.status == GO and reply.record is not None and not self.ran(asked.round):
            # A leader that died between the go-ahead's stores left this one out.
            await self.store(StoreRequest(round=asked.round, record=reply.record))
        if reply.status == WAIT:
            desk.message = reply.message
        elif reply.status == FAILED:
            desk.failure = reply.message or "the leader gave the restore up"
        elif reply.status == GO and self.ran(asked.round):
            nonces = {rank: joined.request.nonce for rank, joined in desk.joins.items()}
            desk.ended = _Ended(asked.round, nonces, reply)
            desk.joins.clear()
            desk.loaded, desk.decision, desk.resolved = desk.decision, None, None
            desk.version += 1
            self._emit("restore_done", attempt=self.promised, round=asked.round)
        else:
            self._drop_decision(reply.message or "the leader decides again")
        self._changes.notify()

    async def _unless(self, poll: Coroutine[Any, Any, T], version: int) -> T | None:
        """The poll's answer, or None if the joins or the decision changed meanwhile."""
        asking = asyncio.ensure_future(poll)
        changed = asyncio.ensure_future(
            self._changes.until(lambda: self._desk.version != version, 10 * POLL_SECONDS)
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
        await self._changes.until(lambda: self._desk.version != version, RETRY_SECONDS)

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
            self._drop_decision("a new round has begun")
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


_REPLACED = "this process was replaced by a newer one of the same rank; it must end"


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_SECONDS)


def _known(state: AttemptState) -> int:
    return max(state.promised, state.record.attempt if state.record else 0)


def _rank_join(request: RestoreRequest) -> RankJoin:
    return RankJoin(
        rank=request.rank,
        local_rank=request.local_rank,
        nonce=request.nonce,
        world_size=request.world_size,
        last_step=request.last_step,
        last_attempt=request.last_attempt,
    )


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
