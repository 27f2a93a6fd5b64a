"""Rounds under random deaths of sidecars, leader and processes: one world, one base a number.

A launcher that restarts one process restarts all, at their own pace, as torchrun does.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ConfirmReply, Decision
from support.restore_fakes import FakeStore, copy, remote_tier
from support.round_world import World

REPLICAS = 3
DISTURBANCES = 6
SETTLE_SECONDS = 8.0
"""Ranks that are split over two rounds for so long are told to leave, and start anew."""


class Launcher:
    """Starts the processes of all ranks, and all of them again when one dies."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.told: dict[int, set[CheckpointId | None]] = defaultdict(set)
        """Attempt -> bases that any rank was told to load for its go-ahead."""
        self.restarts = 0

    async def restart_all(self) -> None:
        self.restarts += 1
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for rank in self.random.sample(range(REPLICAS), REPLICAS):
            self.tasks[rank] = asyncio.create_task(self._process(rank))
            await asyncio.sleep(self.random.choice((0, 0, 0.05)))

    async def _process(self, rank: int) -> tuple[int, CheckpointId | None]:
        ended = await self.world.rank(rank).run(patience=50)
        assert isinstance(ended, tuple), ended
        decision: Decision = ended[0]
        answer: ConfirmReply = ended[1]
        assert answer.status == "go"
        self.told[decision.attempt].add(decision.base)
        return decision.attempt, decision.base

    async def agreed(self) -> tuple[int, CheckpointId | None]:
        """Where all ranks ended."""
        while True:
            done, waiting = await asyncio.wait(self.tasks.values(), timeout=SETTLE_SECONDS)
            ends = {task.result() for task in done}
            if not waiting and len(ends) == 1:
                return ends.pop()
            await self.restart_all()


async def disturb(world: World, launcher: Launcher) -> None:
    """One thing dies, and comes back after a while."""
    chance = launcher.random
    what = chance.choice(("member", "member", "leader", "process", "cut"))
    replica = chance.randrange(REPLICAS)
    pause = chance.choice((0.0, 0.02, 0.2))
    if what == "process":
        await launcher.restart_all()
    elif what == "cut":
        world.wire.cut.add(replica)
        await asyncio.sleep(pause)
        world.wire.cut.discard(replica)
    elif what == "leader" or replica == 0:
        await world.stop_leader()
        if what == "member":
            await world.stop_member(0)
            await asyncio.sleep(pause)
            await world.start_member(0)
        await world.start_leader()
    else:
        await world.stop_member(replica)
        await asyncio.sleep(pause)
        await world.start_member(replica)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_dies_all_ranks_agree_and_no_number_has_two_bases(
    tmp_path: Path, seed: int
) -> None:
    store = FakeStore()
    async with World(tmp_path, REPLICAS, store=store, remote=remote_tier()) as world:
        launcher = Launcher(world, seed)
        newest, last = 0, 0
        for turn in range(2):
            await launcher.restart_all()
            for _ in range(DISTURBANCES):
                await asyncio.sleep(launcher.random.uniform(0, 0.1))
                await disturb(world, launcher)
            attempt, base = await launcher.agreed()
            assert attempt > last
            assert (base.step if base else 0) == newest
            last, newest = attempt, 10 * (turn + 1)
            for replica, shelf in world.shelves.items():
                shelf.copies.append(
                    copy(newest, attempt, replica, "local", replica, world_size=REPLICAS)
                )
                shelf.chains[attempt] = ((base.attempt, base.step),) if base else ()
    assert all(len(bases) == 1 for bases in launcher.told.values()), launcher.told
