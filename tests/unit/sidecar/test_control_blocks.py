"""The leader's word in the control blocks: who gets it, and in which order it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.control import ControlBlock, State, Word
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.messages import Orders, ProgressReply
from backstay_protocol.names import LOCAL, NEIGHBOR
from backstay_protocol.topology import LocalTier, MemoryTier, NeighborTier, Schedule, Tiers
from backstay_sidecar.replication.control import ControlBlocks

ATTEMPT = 9
TIERS = Tiers(
    memory=MemoryTier(schedule=Schedule(every_steps=10)),
    local=LocalTier(root="/d"),
    neighbor=NeighborTier(),
)
REPLY = ProgressReply(attempt=ATTEMPT)


@pytest.fixture
def memory(tmp_path: Path) -> MemoryLayout:
    layout = MemoryLayout(str(tmp_path))
    for rank in (2, 3):
        os.makedirs(layout.rank_folder(rank))
    return layout


@pytest.fixture
def block(memory: MemoryLayout) -> Iterator[ControlBlock]:
    block = ControlBlock(memory.control(2), create=True, rank=2)
    block[Word.ATTEMPT] = ATTEMPT
    yield block
    block.close()


def blocks(memory: MemoryLayout, tiers: Tiers = TIERS) -> ControlBlocks:
    return ControlBlocks(memory, range(2, 4), tiers, 1, SYSTEM_CLOCK)


def at(step: int) -> CheckpointId:
    return CheckpointId(step, ATTEMPT)


def test_steps_are_written_for_the_trainer(memory: MemoryLayout, block: ControlBlock) -> None:
    reply = replace(
        REPLY,
        complete={LOCAL: (at(40), at(30)), NEIGHBOR: (at(50),)},
        durable=(at(20),),
        complete_step=60,
    )
    blocks(memory).apply(reply)
    words = (Word.COMPLETE_STEP, Word.SAFE_STEP, Word.DURABLE_STEP)
    assert [block[word] for word in words] == [60, 50, 20]
    assert block[Word.SIDECAR_TIME]


def test_without_local_and_neighbor_only_what_is_durable_is_safe(memory: MemoryLayout) -> None:
    reply = replace(REPLY, complete={LOCAL: (at(40),)}, durable=(at(20),))
    assert blocks(memory, Tiers()).safe_step(reply) == 20


def test_a_rank_of_another_attempt_gets_no_orders(
    memory: MemoryLayout, block: ControlBlock
) -> None:
    block[Word.ATTEMPT] = ATTEMPT - 1
    blocks(memory).apply(replace(REPLY, orders=Orders(save_at_step=-70)))
    block[Word.ATTEMPT] = 0
    blocks(memory).apply(replace(REPLY, attempt=0, orders=Orders(save_at_step=-70)))
    assert block[Word.SAVE_AT_STEP] == 0


def test_orders_pass_through_sign_and_all(memory: MemoryLayout, block: ControlBlock) -> None:
    blocks(memory).apply(replace(REPLY, orders=Orders(save_at_step=-70, replan_at_step=80)))
    assert (block[Word.SAVE_AT_STEP], block[Word.REPLAN_AT_STEP]) == (-70, 80)


@pytest.mark.parametrize(("replica", "told"), [(1, ATTEMPT), (-1, ATTEMPT), (0, 0)])
def test_only_the_replica_that_is_meant_is_told_to_leave(
    memory: MemoryLayout, block: ControlBlock, replica: int, told: int
) -> None:
    orders = Orders(leave_attempt=ATTEMPT, leave_replica=replica)
    blocks(memory).apply(replace(REPLY, orders=orders))
    assert block[Word.LEAVE_ATTEMPT] == told


def test_a_rank_begins_with_the_configured_interval(
    memory: MemoryLayout, block: ControlBlock
) -> None:
    blocks(memory).begin(2)
    assert (block[Word.EVERY_STEPS], block[Word.EVERY_FROM]) == (10, 0)


def test_a_new_interval_keeps_the_old_one_in_force_until_its_step(
    memory: MemoryLayout, block: ControlBlock
) -> None:
    it = blocks(memory)
    it.begin(2)
    wider = replace(REPLY, orders=Orders(every_steps=20, every_from=400))
    it.apply(wider)
    it.apply(wider)
    words = (Word.PREVIOUS_EVERY_STEPS, Word.EVERY_FROM, Word.EVERY_STEPS)
    assert [block[word] for word in words] == [10, 400, 20]
    it.apply(REPLY)
    assert block[Word.EVERY_STEPS] == 20, "no word about it changes nothing"


def test_a_restarted_sidecar_takes_the_intervals_from_the_block(
    memory: MemoryLayout, block: ControlBlock
) -> None:
    blocks(memory).begin(2)
    wider = replace(REPLY, orders=Orders(every_steps=20, every_from=400))
    blocks(memory).apply(wider)
    blocks(memory).apply(wider)
    assert block[Word.PREVIOUS_EVERY_STEPS] == 10


def test_progress_is_read_from_those_that_have_attached(
    memory: MemoryLayout, block: ControlBlock
) -> None:
    block[Word.STEP], block[Word.STATE] = 17, State.TRAINING
    block[Word.STALL_NS], block[Word.STEP_TIME] = 2_500_000_000, 1_000_000_000
    (progress,) = blocks(memory).progress()
    assert (progress.rank, progress.step, progress.attempt) == (2, 17, ATTEMPT)
    assert (progress.stall_seconds, progress.step_time) == (2.5, 1.0)
    assert blocks(memory).states() == {2: State.TRAINING}
    assert not progress.leaving
    block[Word.LEAVE_SEEN] = ATTEMPT
    assert blocks(memory).progress()[0].leaving


def test_a_volume_that_was_emptied_and_filled_anew_is_mapped_anew(
    memory: MemoryLayout, block: ControlBlock
) -> None:
    it = blocks(memory)
    assert it.progress()[0].attempt == ATTEMPT
    os.unlink(memory.control(2))
    fresh = ControlBlock(memory.control(2), create=True, rank=2)
    fresh[Word.STEP] = 5
    assert it.progress()[0].step == 5
    fresh.close()
    it.close()
