"""A small world inside one process: real members, one real round driver, no HTTP between them.

Calls from leader to member pass through `Wire`, which can lose, delay or count them.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import Unreachable
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.messages import (
    AGAIN,
    GO,
    LOAD,
    WAIT,
    BadSource,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    JoinReply,
    JoinRequest,
    PromiseReply,
    PromiseRequest,
    RestoreReply,
    RestoreRequest,
    StoreReply,
    StoreRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.topology import PodIdentity, Topology
from backstay_sidecar.restore.member import Member
from backstay_sidecar.restore.remote_book import RemoteBook
from backstay_sidecar.restore.round_driver import Begun, RoundDriver
from support.restore_fakes import Events, FakeShelf, FakeStore, pod, topology

_nonces = itertools.count(1)


class Wire:
    """Implements Peers and LeaderDoor between the members of one World."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cut: set[int] = set()
        """Replicas that can't be reached."""
        self.cut_verdicts: set[int] = set()
        """Replicas whose verdicts reach the leader while the answers are lost."""
        self.refuse_ran: set[int] = set()
        """Replicas that the go-ahead's store does not reach."""

    headers = {"Authorization": "Bearer t"}  # noqa: RUF012 - constant

    def url(self, replica: int) -> str:
        return f"http://host-{replica}:7070"

    def moved(self, replica: int, address: str) -> None:
        pass

    async def promise(
        self, replica: int, request: PromiseRequest, timeout_seconds: float
    ) -> PromiseReply:
        return await self._member(replica).promise(request)

    async def store(
        self, replica: int, request: StoreRequest, timeout_seconds: float
    ) -> StoreReply:
        if request.record.ran and replica in self.refuse_ran:
            raise Unreachable(f"replica {replica} is cut off")
        return await self._member(replica).store(request)

    async def join(self, request: JoinRequest) -> JoinReply:
        return await self._leader(request.replica).join(request)

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        reply = await self._leader(request.replica).verdict(request)
        if request.replica in self.cut_verdicts:
            raise Unreachable("the answer was lost")
        return reply

    def _member(self, replica: int) -> Member:
        if replica in self.cut or replica not in self._world.members:
            raise Unreachable(f"replica {replica} is cut off")
        return self._world.members[replica]

    def _leader(self, replica: int) -> RoundDriver:
        if 0 in self.cut or replica in self.cut or self._world.leader is None:
            raise Unreachable("the leader is cut off")
        return self._world.leader


@dataclass
class Rank:
    """A trainer process that restores: it follows the protocol of POST /v1/restore."""

    world: World
    rank: int
    nonce: str
    loads: list[Decision]
    bad: list[BadSource]
    """Reported once, at the first load that uses the copy."""
    error: str = ""
    last_step: int = -1
    last_attempt: int = 0
    messages: list[str] = None  # type: ignore[assignment]

    async def run(self, patience: float = 20.0) -> tuple[Decision, ConfirmReply] | RestoreReply:
        """Until go or failed."""
        self.messages = []
        async with asyncio.timeout(patience):
            while True:
                reply = await self.until_load()
                if reply.status != LOAD:
                    return reply
                assert reply.decision is not None
                self.loads.append(reply.decision)
                answer = await self.confirm(reply.decision)
                if answer.status == AGAIN:
                    continue
                if answer.status == GO:
                    return reply.decision, answer
                return RestoreReply(status=answer.status, message=answer.message)

    async def until_load(self) -> RestoreReply:
        while True:
            member = self.world.member_of(self.rank)
            if member is None:
                await asyncio.sleep(0.02)
                continue
            reply = await member.restore(self.request())
            if reply.status != WAIT:
                return reply
            self.messages.append(reply.message)

    async def confirm(self, decision: Decision) -> ConfirmReply:
        hit = [b for b in self.bad if _uses(decision, b)]
        while True:
            member = self.world.member_of(self.rank)
            if member is None:
                await asyncio.sleep(0.02)
                continue
            answer = await member.confirm(
                ConfirmRequest(
                    rank=self.rank,
                    nonce=self.nonce,
                    round=decision.round,
                    serial=decision.serial,
                    ok=not hit and not self.error,
                    bad=tuple(hit),
                    error=self.error,
                    bytes_by_tier={"memory": 10},
                    wait_seconds=0.3,
                )
            )
            if answer.status != WAIT:
                return answer

    def request(self) -> RestoreRequest:
        return RestoreRequest(
            rank=self.rank,
            local_rank=self.rank % self.world.topology.processes_per_replica,
            world_size=self.world.topology.world_size,
            nonce=self.nonce,
            pid=1,
            last_step=self.last_step,
            last_attempt=self.last_attempt,
            wait_seconds=0.3,
        )


def _uses(decision: Decision, bad: BadSource) -> bool:
    return any(
        shard.rank == bad.shard_rank and (source.tier, source.holder) == (bad.tier, bad.holder)
        for shard in decision.shards
        for source in shard.sources
    )


class World:
    """Members 0..n-1 on folders below `root`, and a leader beside member 0."""

    def __init__(
        self,
        root: Path,
        replicas: int = 2,
        *,
        store: FakeStore | None = None,
        clock: Any = SYSTEM_CLOCK,
        **more: Any,
    ) -> None:
        self.root = root
        self.topology: Topology = topology(replicas, root=str(root / "disks"), **more)
        self.clock = clock
        self.store = store
        self.events = Events()
        self.wire = Wire(self)
        self.pods: dict[int, PodIdentity] = {i: pod(i, replicas=replicas) for i in range(replicas)}
        self.shelves: dict[int, FakeShelf] = {i: FakeShelf() for i in range(replicas)}
        self.members: dict[int, Member] = {}
        self.leader: RoundDriver | None = None
        self.begun: list[Begun] = []
        self.running: list[asyncio.Task[Any]] = []
        """Ranks that a test started and looks at later."""
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> World:
        for replica in range(self.topology.replicas):
            await self.start_member(replica)
        await self.start_leader()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_leader()
        for replica in list(self.members):
            await self.stop_member(replica)

    def member_of(self, rank: int) -> Member | None:
        return self.members.get(rank // self.topology.processes_per_replica)

    def rank(self, rank: int, *bad: BadSource, **more: Any) -> Rank:
        """A new process of that rank."""
        return Rank(self, rank, f"nonce-{next(_nonces)}", [], list(bad), **more)

    async def restore(self, *ranks: Rank) -> list[Any]:
        """All ranks of the world (or these) restore together."""
        everybody = ranks or tuple(self.rank(r) for r in range(self.topology.world_size))
        return list(await asyncio.gather(*(rank.run() for rank in everybody)))

    async def start_member(self, replica: int) -> Member:
        memory = self.root / f"memory-{replica}"
        memory.mkdir(parents=True, exist_ok=True)
        disk = DiskLayout(str(self.root / f"disk-{replica}"), self.topology.run, replica)
        member = Member(
            topology=self.topology,
            pod=self.pods[replica],
            memory=MemoryLayout(str(memory)),
            disk=disk,
            address=f"host-{replica}:7070",
            shelf=self.shelves[replica],
            peers=self.wire,
            remote=self.store,
            clock=self.clock,
            emit=self.events,
        )
        member.prepare()
        member.start(self.wire)
        self.members[replica] = member
        return member

    async def stop_member(self, replica: int) -> None:
        """As kill -9 does: nothing is told to anybody; files stay."""
        await self.members.pop(replica).close()

    async def start_leader(self) -> RoundDriver:
        book = None
        if self.store is not None and self.topology.tiers.remote is not None:
            layout = RemoteLayout(self.topology.tiers.remote.prefix, self.topology.run)
            book = RemoteBook(
                self.store, layout, self.topology.run, self.topology.owner, self.clock
            )
        self._book = book
        self.leader = RoundDriver(
            topology=self.topology,
            pod=self.pods[0],
            own=self.members[0],
            peers=self.wire,
            book=book,
            clock=self.clock,
            emit=self.events,
            begun=self.begun.append,
        )
        self._ticking = asyncio.create_task(self.leader.run())
        return self.leader

    async def stop_leader(self) -> None:
        """As kill -9 does."""
        if self.leader is None or self._ticking is None:
            return
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await self.leader.close()
        if self._book is not None:
            self._book.close()
        self.leader = None

    def replace_pod(self, replica: int, generation: int) -> None:
        """The operator's record of a newer pod; start it with start_member."""
        before = self.pods[replica]
        current = {**before.current, replica: generation}
        self.pods[replica] = replace(
            before, generation=generation, current=current, replaces=before.generation
        )
