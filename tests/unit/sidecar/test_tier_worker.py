"""One tier's worker: what it tries first, what it sets aside, what it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import CorruptData, Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import SCHEDULE, Manifest
from backstay_sidecar.replication import worker as module
from backstay_sidecar.replication.wanted import Shard, ShardKey
from backstay_sidecar.replication.worker import TierWorker
from backstay_sidecar.tiers.base import ShardReader, TierFull
from backstay_sidecar.tiers.remote import DeletionIntended, NameTaken
from support.byte_shards import byte_shard


def shard(step: int) -> Shard:
    return Shard(
        checkpoint=CheckpointId(step, 1),
        rank=0,
        reason=SCHEDULE,
        size=1,
        in_memory=True,
        in_local=False,
    )


class FakeTier:
    """Takes shards, or fails for those in `errors`."""

    name = "remote"

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors = errors
        self.tried: list[int] = []

    def put(self, source: ShardReader, cancel: Event) -> Manifest:
        step = source.manifest.step
        self.tried.append(step)
        if step in self.errors:
            raise self.errors[step]
        return source.manifest


class FakeMoves:
    """A replicator that only keeps the queue."""

    def __init__(self, *steps: int) -> None:
        self.queue = [shard(step) for step in steps]
        self.told: list[tuple[int, bool]] = []
        self.changed = asyncio.Event()

    @contextmanager
    def source(self, tier: str, shard: Shard) -> Iterator[Any]:
        yield byte_shard(step=shard.checkpoint.step)

    def moved(self, tier: str, shard: Shard, manifest: Manifest, seconds: float) -> None:
        self.queue.remove(shard)
        self.changed.set()

    def failed(self, tier: str, shard: Shard, error: Exception, *, first: bool) -> None:
        self.told.append((shard.checkpoint.step, first))
        self.changed.set()

    def source_bad(self, tier: str, shard: Shard, error: CorruptData) -> None:
        raise AssertionError("no source is bad here")

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


def made(errors: dict[int, Exception], moves: FakeMoves) -> TierWorker:
    tier: Any = FakeTier(errors)
    return TierWorker(tier, lambda: list(moves.queue), moves, SYSTEM_CLOCK, Event())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(NameTaken("other bytes lie there"), id="name taken"),
        pytest.param(DeletionIntended("under an intent"), id="intent"),
    ],
)
async def test_a_shard_that_a_tier_never_takes_holds_up_no_other_and_is_told_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASIDE_SECONDS", 0.02)
    moves = FakeMoves(9, 8, 7)
    worker = made({9: error}, moves)
    running = asyncio.create_task(worker.run())
    await moves.until(lambda: len(moves.told) >= 3 and len(moves.queue) == 1)
    running.cancel()
    worker.close()
    assert [step for step, first in moves.told if first] == [9]
    assert not worker.degraded
    assert not worker.message, "the tier itself is well"


async def test_a_tier_is_full_only_while_a_disk_says_so_and_something_waits() -> None:
    moves = FakeMoves(9)
    errors: dict[int, Exception] = {9: Unreachable("away")}
    worker = made(errors, moves)
    running = asyncio.create_task(worker.run())
    await moves.until(lambda: len(moves.told) == 1)
    assert not worker.full
    errors[9] = TierFull("no room")
    await moves.until(lambda: len(moves.told) == 2)
    assert worker.full
    key: ShardKey = moves.queue[0].key
    assert key[0].step == 9
    errors.clear()
    await moves.until(lambda: not moves.queue)
    assert not worker.full
    running.cancel()
    worker.close()
