"""Members and a round driver in one process: how attempts begin, whatever dies in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import BadSource, Decision
from backstay_protocol.topology import RestoreOptions
from backstay_sidecar.restore.member import Member
from support.restore_fakes import FakeStore, copy, remote_tier
from support.round_world import Rank, World

FIRST = 7_000_001


def _ran(member: Member) -> bool:
    return member.record is not None and member.record.ran


def on_all(world: World, step: int, attempt: int) -> CheckpointId:
    """Every replica holds its own shard in memory and local."""
    for replica, shelf in world.shelves.items():
        for tier in ("memory", "local"):
            shelf.copies.append(copy(step, attempt, replica, tier, replica))
        shelf.chains[attempt] = ()
    return CheckpointId(step, attempt)


async def test_a_world_without_checkpoints_starts_from_nothing(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        results = await world.restore()
    assert {decision.base for decision, _ in results} == {None}
    assert {decision.attempt for decision, _ in results} == {FIRST}
    assert [begun.record.ran for begun in world.begun] == [True]


async def test_every_rank_gets_the_same_newest_checkpoint(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.restore()
        on_all(world, 5, FIRST)
        newest = on_all(world, 8, FIRST)
        world.shelves[0].copies.append(copy(9, FIRST, 0, "memory", 0))  # not on replica 1
        results = await world.restore()
    assert {decision.base for decision, _ in results} == {newest}
    assert {decision.attempt for decision, _ in results} == {FIRST + 1}
    assert all(decision.chain == ((FIRST, 8),) for decision, _ in results)


async def test_the_go_ahead_tells_bytes_by_tier_and_lost_steps(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.restore()
        on_all(world, 5, FIRST)
        ranks = [world.rank(r, last_step=9 + r, last_attempt=FIRST) for r in range(2)]
        results = await world.restore(*ranks)
    for _, answer in results:
        assert answer.bytes_by_tier == {"memory": 20}
        assert answer.lost_steps == 5


async def test_a_copy_proven_bad_is_struck_out_for_everyone(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.restore()
        on_all(world, 5, FIRST)
        bad = BadSource(shard_rank=1, tier="memory", holder=1, proven=True, detail="wrong digest")
        ranks = [world.rank(0), world.rank(1, bad)]
        results = await world.restore(*ranks)
    assert [decision.serial for decision, _ in results] == [2, 2]
    for decision, answer in results:
        tiers = {s.tier for shard in decision.shards if shard.rank == 1 for s in shard.sources}
        assert tiers == {"local"}
        assert "wrong digest" in answer.bad[0]


async def test_the_last_copy_proven_bad_sends_everyone_to_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        await world.restore()
        older = on_all(world, 5, FIRST)
        for replica, shelf in world.shelves.items():
            shelf.copies.append(copy(8, FIRST, replica, "memory", replica))
        bad = BadSource(shard_rank=1, tier="memory", holder=1, proven=True, detail="wrong digest")

        rank = world.rank(1)
        first = asyncio.create_task(world.rank(0).run())
        reply = await rank.until_load()
        assert reply.decision is not None
        assert reply.decision.base == CheckpointId(8, FIRST)
        rank.bad = [bad]
        answer = await rank.confirm(reply.decision)
        assert answer.status == "again"
        rank.bad = []
        results = [await rank.run(), await first]
    assert {decision.base for decision, _ in results} == {older}


async def test_a_rank_that_cannot_load_fails_the_restore_for_all_and_says_why(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        results = await world.restore(world.rank(0), world.rank(1, error="no entry `ema`"))
    assert [reply.status for reply in results] == ["failed", "failed"]
    assert all("rank 1: no entry `ema`" in reply.message for reply in results)


async def test_the_wait_names_the_missing_ranks(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        rank = world.rank(0)
        with pytest.raises(TimeoutError):
            await rank.run(patience=1.0)
    assert any("rank 1" in message for message in rank.messages)


async def test_a_shifted_world_is_refused_by_name(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        rank = world.rank(0)
        request = rank.request()
        shifted = type(request)(**{**request.__dict__, "rank": 1, "wait_seconds": 5.0})
        reply = await world.members[0].restore(shifted)
    assert reply.status == "failed"
    assert "rank 1 runs in replica 0" in reply.message


async def test_a_new_process_of_a_rank_restarts_the_round(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.restore()
        on_all(world, 5, FIRST)
        other = asyncio.create_task(world.rank(0).run())
        dying = world.rank(1)
        reply = await dying.until_load()
        assert reply.decision is not None
        answered = await world.rank(1).run()
        decision, _ = await other
    assert isinstance(answered, tuple)
    assert answered[0].attempt == decision.attempt > reply.decision.attempt
    assert answered[0].base == decision.base == CheckpointId(5, FIRST)


async def test_a_replaced_process_that_asks_again_is_told_to_end(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        old = world.rank(1)
        with pytest.raises(TimeoutError):
            await old.run(patience=0.5)
        younger = asyncio.create_task(world.rank(1).run())
        await asyncio.sleep(0.05)
        reply = await world.members[1].restore(old.request())
        await world.rank(0).run()
        await younger
    assert (reply.status, "replaced" in reply.message) == ("failed", True)


async def test_a_confirm_whose_answer_was_lost_is_answered_again(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        ranks = [world.rank(0), world.rank(1)]
        results = await world.restore(*ranks)
        answer = await ranks[1].confirm(results[1][0])
    assert answer.status == "go"


async def test_a_sidecar_that_restarts_after_the_go_ahead_still_answers_go(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        ranks = [world.rank(0), world.rank(1)]
        results = await world.restore(*ranks)
        await world.stop_member(1)
        await world.start_member(1)
        answer = await ranks[1].confirm(results[1][0])
        assert world.members[1].attempt == FIRST
    assert answer.status == "go"


async def _stored_by_one_only(world: World) -> tuple[Rank, Decision]:
    """Replicas 0 and 1 have stored the go-ahead, 2 has not; then the sidecar of 1 restarts."""
    world.wire.refuse_ran = {2}
    world.running = [asyncio.create_task(world.rank(r).run()) for r in (0, 2)]
    rank = world.rank(1)
    reply = await rank.until_load()
    assert reply.decision is not None
    asking = asyncio.create_task(rank.confirm(reply.decision))
    while not _ran(world.members[1]):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    asking.cancel()
    await world.stop_member(1)
    await world.start_member(1)
    return rank, reply.decision


async def test_after_a_restart_nobody_goes_before_the_go_ahead_is_stored_everywhere(
    tmp_path: Path,
) -> None:
    async with World(tmp_path, 3) as world:
        rank, decision = await _stored_by_one_only(world)
        asking = asyncio.create_task(rank.confirm(decision))
        await asyncio.sleep(0.3)
        assert not asking.done()
        world.wire.refuse_ran = set()
        assert (await asking).status == "go"
        assert {answer.status for _, answer in [await task for task in world.running]} == {"go"}


async def test_a_round_given_up_after_a_restart_leaves_no_rank_to_train_alone(
    tmp_path: Path,
) -> None:
    async with World(tmp_path, 3) as world:
        rank, decision = await _stored_by_one_only(world)
        asking = asyncio.create_task(rank.confirm(decision))
        newcomer = asyncio.create_task(world.rank(2).run())  # rank 2's process was restarted
        assert (await asking).status == "again"
        world.wire.refuse_ran = set()
        results = [await rank.run(), await newcomer, await world.running[0]]
        world.running[1].cancel()
    assert {decision.attempt for decision, _ in results} == {FIRST + 1}


async def test_after_a_restart_a_leader_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async with World(tmp_path, 3) as world:
        rank, decision = await _stored_by_one_only(world)
        world.wire.cut = {1}
        answer = asyncio.create_task(rank.confirm(decision))
        await asyncio.sleep(0.7)
        world.wire.cut, world.wire.refuse_ran = set(), set()
        assert (await answer).status == "go"
        assert {reply.status for _, reply in [await task for task in world.running]} == {"go"}


async def test_after_a_restart_a_leader_that_is_gone_for_good_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    async with World(tmp_path, 3, restore=RestoreOptions(barrier_seconds=1)) as world:
        rank, decision = await _stored_by_one_only(world)
        world.wire.cut = {0}
        async with asyncio.timeout(10):
            answer = await rank.confirm(decision)
        for task in world.running:
            task.cancel()
        await asyncio.gather(*world.running, return_exceptions=True)
    assert answer.status == "failed"
    assert "for 1 s the leader can't be reached" in answer.message


async def test_a_sidecar_that_restarts_while_its_ranks_load_takes_them_back_in(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        on_all(world, 5, FIRST)
        first = asyncio.create_task(world.rank(0).run())
        rank = world.rank(1)
        reply = await rank.until_load()
        assert reply.decision is not None
        await world.stop_member(1)
        await world.start_member(1)
        answer = await rank.confirm(reply.decision)
        assert answer.status == "again"
        results = [await rank.run(), await first]
    assert len({(decision.base, decision.attempt) for decision, _ in results}) == 1


async def test_a_leader_that_restarts_while_ranks_load_leads_another_round(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        on_all(world, 5, FIRST)
        first = asyncio.create_task(world.rank(0).run())
        rank = world.rank(1)
        reply = await rank.until_load()
        assert reply.decision is not None
        await world.stop_leader()
        await world.start_leader()
        answer = await rank.confirm(reply.decision)
        assert answer.status == "again"
        results = [await rank.run(), await first]
    assert {decision.attempt for decision, _ in results} == {reply.decision.attempt + 1}
    assert {decision.base for decision, _ in results} == {CheckpointId(5, FIRST)}


async def test_a_sidecar_that_restarts_before_its_rank_heard_of_the_go_ahead_rejoins(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        first = asyncio.create_task(world.rank(0).run())
        rank = world.rank(1)
        reply = await rank.until_load()
        assert reply.decision is not None
        world.wire.cut_verdicts = {1}
        answer = asyncio.create_task(rank.confirm(reply.decision))
        await asyncio.sleep(0.1)
        answer.cancel()
        await world.stop_member(1)
        world.wire.cut_verdicts = set()
        await world.start_member(1)
        results = [await rank.run(), await first]
        assert world.members[1].attempt == FIRST
    assert {decision.attempt for decision, _ in results} == {FIRST}


async def test_a_rank_that_asks_again_after_its_go_ahead_gets_the_same_attempt(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        ranks = [world.rank(0), world.rank(1)]
        await world.restore(*ranks)
        decision, answer = await ranks[1].run()  # type: ignore[misc]
        assert (decision.attempt, answer.status) == (FIRST, "go")
        assert world.members[1].attempt == FIRST
        assert world.members[1].joined == ()


async def test_a_leader_that_dies_between_the_stores_of_the_go_ahead_leaves_nobody_behind(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        world.wire.refuse_ran = {1}
        ranks = [asyncio.create_task(world.rank(r).run()) for r in range(2)]
        while not _ran(world.members[0]):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        await world.stop_leader()
        assert not _ran(world.members[1])
        world.wire.refuse_ran = set()
        await world.start_leader()
        results = [await rank for rank in ranks]
        assert {world.members[r].attempt for r in range(2)} == {FIRST}
    assert {decision.attempt for decision, _ in results} == {FIRST}


async def test_a_cut_off_leader_is_waited_for_and_named(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.wire.cut = {0}
        rank = world.rank(1)
        with pytest.raises(TimeoutError):
            await rank.run(patience=1.2)
        assert any("leader can't be reached" in message for message in rank.messages)
        world.wire.cut = set()
        results = await world.restore(world.rank(0), rank)
    assert len(results) == 2


async def test_two_ranks_of_a_pod_go_together(tmp_path: Path) -> None:
    async with World(tmp_path, processes=2) as world:
        results = await world.restore()
    assert len(results) == 4
    assert {answer.status for _, answer in results} == {"go"}


async def test_while_ranks_restore_no_attempt_counts_here(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.restore()
        assert world.members[1].attempt == FIRST
        waiting = asyncio.create_task(world.rank(1).run())
        await asyncio.sleep(0.05)
        assert world.members[1].attempt == 0
        await world.rank(0).run()
        await waiting
        assert world.members[1].attempt == FIRST + 1


async def test_the_claim_and_the_base_stand_in_the_remote_tier_before_anybody_goes(
    tmp_path: Path,
) -> None:
    store = FakeStore()
    async with World(tmp_path, store=store, remote=remote_tier()) as world:
        results = await world.restore()
    assert {answer.status for _, answer in results} == {"go"}
    attempts = [key for key in store.objects if "/attempts/" in key]
    assert len(attempts) == 2
    assert world.begun[0].summary is not None
    assert world.begun[0].summary.claimed
    assert world.begun[0].summary.base_recorded


async def test_a_first_start_without_its_remote_tier_fails_and_names_the_cause(
    tmp_path: Path,
) -> None:
    store = FakeStore()
    store.away = "connection refused by http://s3"
    async with World(tmp_path, store=store, remote=remote_tier()) as world:
        results = await world.restore()
    assert [reply.status for reply in results] == ["failed", "failed"]
    assert all("connection refused by http://s3" in reply.message for reply in results)


async def test_a_world_in_line_begins_without_its_remote_tier(tmp_path: Path) -> None:
    store = FakeStore()
    async with World(tmp_path, store=store, remote=remote_tier()) as world:
        await world.restore()
        base = on_all(world, 5, FIRST)
        store.away = "away"
        results = await world.restore()
        assert {decision.base for decision, _ in results} == {base}
        assert not any(str(FIRST + 1) in key for key in store.objects)


async def test_a_replaced_pod_on_the_same_disk_is_in_line(tmp_path: Path) -> None:
    store = FakeStore()
    async with World(tmp_path, store=store, remote=remote_tier()) as world:
        await world.restore()
        on_all(world, 5, FIRST)
        await world.stop_member(1)
        world.replace_pod(1, 8)
        await world.start_member(1)
        store.away = "away"
        results = await world.restore()
    assert {decision.attempt for decision, _ in results} == {8_000_001}


async def test_numbers_never_repeat_over_many_restarts(tmp_path: Path) -> None:
    seen = []
    async with World(tmp_path) as world:
        for _ in range(4):
            results = await world.restore()
            seen.append(results[0][0].attempt)
            await world.stop_leader()
            await world.stop_member(1)
            await world.start_member(1)
            await world.start_leader()
    assert seen == [FIRST + i for i in range(4)]
