"""What the replicator offers its neighbour again, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Event

import pytest

from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.names import NEIGHBOR
from backstay_protocol.topology import LocalTier, Schedule, Tiers
from backstay_protocol.topology import NeighborTier as NeighborSettings
from backstay_sidecar.metrics import Metrics
from backstay_sidecar.replication import replicator as module
from backstay_sidecar.replication.replicator import BELIEVE_SECONDS, Replicator
from backstay_sidecar.replication.wanted import LeaderWord
from backstay_sidecar.tiers.base import ShardReader
from backstay_sidecar.tiers.disk import DiskStore
from backstay_sidecar.tiers.memory import MemoryTier
from backstay_sidecar.tiers.neighbor import NeighborTier
from support.byte_shards import RUN, byte_shard
from support.restore_fakes import Events, FakeClock

BASE = byte_shard().checkpoint


class FakeNeighbor(NeighborTier):
    """Takes everything, and counts offers."""

    def __init__(self) -> None:
        self.offers = 0

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        self.offers += 1
        return shard.manifest


class Pod:
    """A replicator with its base on the disk, and a leader's word."""

    def __init__(self, root: Path) -> None:
        local = DiskStore(str(root / "disk"), "local", 0, RUN)
        local.prepare()
        local.put(byte_shard(), Event())
        self.neighbor = FakeNeighbor()
        self.clock = FakeClock()
        self.events = Events()
        self.word = LeaderWord(attempt=9, base=BASE)
        self.replicator = Replicator(
            memory=MemoryTier(MemoryLayout(str(root / "memory")), RUN, 0),
            local=local,
            held=None,
            outer={NEIGHBOR: self.neighbor},
            tiers=Tiers(local=LocalTier(root=str(root / "disk")), neighbor=NeighborSettings()),
            schedule=lambda tier, step: Schedule(),
            word=lambda: self.word,
            changed=lambda: None,
            emit=self.events,
            meter=Metrics(self.clock),
            clock=self.clock,
        )

    async def looks(self) -> None:
        """It looks around a few times."""
        self.replicator.notice()
        await asyncio.sleep(0.2)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is anything that can be looked at
            await asyncio.sleep(0.005)


@pytest.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pod]:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    pod = Pod(tmp_path)
    pod.replicator.start()
    await until(lambda: bool(pod.events.kinds()))
    yield pod
    await pod.replicator.close()


async def test_what_the_leader_does_not_see_at_the_neighbour_is_offered_again(pod: Pod) -> None:
    pod.clock.now += BELIEVE_SECONDS - 1
    await pod.looks()
    assert pod.neighbor.offers == 1, "the word may not have come round yet"
    pod.clock.now += 2
    await until(lambda: pod.neighbor.offers == 2)
    await pod.looks()
    assert pod.neighbor.offers == 2
    assert pod.events.kinds() == ["shard_stored"], "an answer that moved nothing is not told"


async def test_what_is_complete_at_the_neighbour_is_offered_again_only_when_it_is_lost(
    pod: Pod,
) -> None:
    pod.word = LeaderWord(attempt=9, base=BASE, complete={NEIGHBOR: (BASE,)})
    pod.clock.now += 10 * BELIEVE_SECONDS
    await pod.looks()
    assert pod.neighbor.offers == 1
    pod.word = LeaderWord(attempt=9, base=BASE)
    await until(lambda: pod.neighbor.offers == 2)


async def test_a_new_attempt_offers_all_to_the_neighbour_again(pod: Pod) -> None:
    pod.replicator.offer_again()
    await until(lambda: pod.neighbor.offers == 2)


async def test_it_ends_also_when_it_is_woken_in_the_same_moment(pod: Pod) -> None:
    for _ in range(20):  # the loops get round to wait again
        await asyncio.sleep(0)
    pod.replicator.notice()
    async with asyncio.timeout(10):
        await pod.replicator.close()
