"""Progress, prestop, events and the gate before the remote tier: small loops with fakes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import Unreachable
from backstay_protocol.messages import FlushReply, ProgressReply, ProgressRequest
from backstay_sidecar.events import QUEUED_EVENTS, Events
from backstay_sidecar.replication.gate import Gated
from backstay_sidecar.replication.prestop import Prestop
from backstay_sidecar.replication.progress import Progress
from backstay_sidecar.tiers.disk import DiskStore
from support.byte_shards import RUN, byte_shard


class FakeLeader:
    """Answers progress; each call can be held or fail."""

    def __init__(self) -> None:
        self.requests: list[ProgressRequest] = []
        self.version = 1
        self.failing = False
        self.asked = asyncio.Event()
        self.held: list[asyncio.Future[int]] = []
        self.hold = False

    async def progress(self, request: ProgressRequest) -> ProgressReply:
        self.requests.append(request)
        self.asked.set()
        if self.failing:
            raise Unreachable("the leader is away")
        if self.hold and not request.wait_seconds:
            self.held.append(asyncio.get_running_loop().create_future())
            return ProgressReply(attempt=1, version=await self.held[-1])
        if request.wait_seconds:
            await asyncio.sleep(0.05)
        return ProgressReply(attempt=1, version=self.version)


def build(seen: int, wait: float) -> ProgressRequest:
    return ProgressRequest(replica=0, generation=0, attempt=1, seen_version=seen, wait_seconds=wait)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is anything that can be looked at
            await asyncio.sleep(0.005)


async def test_a_change_is_told_at_once_beside_the_long_poll() -> None:
    leader, taken = FakeLeader(), []
    progress = Progress(send=leader.progress, build=build, take=taken.append, clock=SYSTEM_CLOCK)
    progress.start()
    progress.changed()
    await until(lambda: sum(not r.wait_seconds for r in leader.requests) == 1)
    progress.changed()
    await until(lambda: sum(not r.wait_seconds for r in leader.requests) == 2)
    assert taken
    await progress.close()


async def test_a_leader_that_does_not_answer_is_asked_again() -> None:
    leader = FakeLeader()
    leader.failing = True
    progress = Progress(send=leader.progress, build=build, take=lambda _: None, clock=SYSTEM_CLOCK)
    progress.start()
    await until(lambda: progress.trouble)
    leader.failing = False
    await until(lambda: not progress.trouble)
    await progress.close()


async def test_an_answer_that_was_overtaken_is_not_taken() -> None:
    leader, taken = FakeLeader(), []
    leader.hold = True
    progress = Progress(
        send=leader.progress,
        build=build,
        take=lambda r: taken.append(r.version),
        clock=SYSTEM_CLOCK,
    )
    progress.start()
    progress.changed()
    await until(lambda: leader.held)
    leader.version = 7
    await until(lambda: taken.count(7) >= 2)
    leader.held[0].set_result(3)
    count = len(taken)
    await until(lambda: len(taken) > count)
    assert 3 not in taken
    await progress.close()


def prestop(flush: Any, *, grace: float = 120.0, reached: int = 1) -> Prestop:
    return Prestop(
        flush=flush,
        reached=lambda: reached,
        grace_seconds=grace,
        clock=SYSTEM_CLOCK,
        emit=lambda kind, /, **fields: None,
    )


async def test_prestop_answers_when_the_save_is_safe_and_asks_for_one_only() -> None:
    replies = [FlushReply(step=9, durable=False), FlushReply(step=9, durable=True)]

    async def flush() -> FlushReply:
        return replies.pop(0)

    it = prestop(flush)
    first, second = asyncio.create_task(it.wait()), asyncio.create_task(it.wait())
    await until(lambda: len(replies) == 1)
    it.news()
    assert await first == await second == FlushReply(step=9, durable=True)
    assert await it.wait() == await first


async def test_prestop_does_not_believe_a_leader_that_has_not_heard_of_its_ranks_yet() -> None:
    replies = [FlushReply(step=0, durable=True), FlushReply(step=50, durable=True)]

    async def flush() -> FlushReply:
        return replies.pop(0)

    assert (await prestop(flush, reached=47).wait()).step == 50


async def test_prestop_does_not_wait_beyond_the_grace() -> None:
    async def flush() -> FlushReply:
        raise Unreachable("no leader")

    reply = await prestop(flush, grace=20.0).wait()
    assert not reply.durable
    assert "no leader" in reply.message


async def test_prestop_of_a_pod_that_has_nothing_to_save_answers_at_once() -> None:
    async def flush() -> FlushReply:
        raise AssertionError("nobody needs a save")

    assert (await prestop(flush, reached=0).wait()).durable


async def test_a_prestop_hook_that_hangs_up_does_not_end_the_wait_of_the_other() -> None:
    safe = asyncio.Event()

    async def flush() -> FlushReply:
        await safe.wait()
        return FlushReply(step=1, durable=True)

    it = prestop(flush)
    first, second = asyncio.create_task(it.wait()), asyncio.create_task(it.wait())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    safe.set()
    assert (await second).durable


async def test_events_are_kept_for_those_who_come_later() -> None:
    events = Events(SYSTEM_CLOCK)
    for number in range(3):
        events.emit("thing", value=number)
    listener = events.listen(after=1)
    assert [(await anext(listener)).fields["value"] for _ in range(2)] == [1, 2]
    thread = threading.Thread(target=events.emit, args=("from_a_thread",))
    thread.start()
    assert (await anext(listener)).kind == "from_a_thread"
    thread.join()
    await listener.aclose()


async def test_a_listener_that_is_far_behind_is_told_that_it_missed_some() -> None:
    events = Events(SYSTEM_CLOCK)
    listener = events.listen()
    first = asyncio.ensure_future(anext(listener))
    await asyncio.sleep(0)
    for _ in range(QUEUED_EVENTS + 10):
        events.emit("many")
    await first
    events.emit("last")
    heard = [await anext(listener)]
    while heard[-1].kind != "last":
        heard.append(await anext(listener))
    assert heard[-2].kind == "events_missed"
    assert heard[-2].fields["count"] + len(heard) - 2 == QUEUED_EVENTS + 9
    await listener.aclose()


def test_nothing_goes_to_the_store_before_the_attempt_is_recorded_there(tmp_path: Any) -> None:
    recorded: set[int] = set()
    probes: list[int] = []
    store = DiskStore(str(tmp_path), "local", 0, RUN)
    gate = Gated(
        store,
        attempt=lambda: 5,
        probe=lambda: probes.append(1),
        recorded=lambda attempt: attempt in recorded,
    )
    with pytest.raises(Unreachable, match="attempt 5 has no base record"):
        gate.put(byte_shard(), threading.Event())
    assert list(store.inventory()) == []
    recorded.add(5)
    gate.put(byte_shard(), threading.Event())
    recorded.clear()
    gate.put(byte_shard(rank=1), threading.Event())
    assert len(list(gate.inventory())) == 2
    assert probes == [1]


def test_nothing_goes_to_the_store_while_no_attempt_is_under_way(tmp_path: Any) -> None:
    store = DiskStore(str(tmp_path), "local", 0, RUN)
    gate = Gated(store, attempt=lambda: 0, probe=lambda: None, recorded=lambda _: True)
    with pytest.raises(Unreachable, match="no attempt is under way"):
        gate.put(byte_shard(), threading.Event())
    assert list(store.inventory()) == []
