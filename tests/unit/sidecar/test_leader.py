"""The leader as its routes see it: long polls, take-over after a restart, what people are shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId, first_attempt_of, generation_of
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.messages import (
    GO,
    LOAD,
    TIER_AWAY,
    TIER_OWNED,
    TIER_REFUSES,
    ConfirmRequest,
    FlushReply,
    Inventory,
    JoinRequest,
    Policy,
    ProgressReply,
    ProgressRequest,
    RankJoin,
    RankProgress,
    RestoreRequest,
    TierState,
)
from backstay_protocol.round_events import STOOD_DOWN
from backstay_protocol.topology import MemoryTier, Schedule
from backstay_sidecar.restore import leader as module
from backstay_sidecar.restore.leader import Leader
from backstay_sidecar.restore.member import Member
from backstay_sidecar.restore.peers import HttpPeers
from backstay_sidecar.restore.remote_book import RunOwnedElsewhere, trouble_code
from backstay_sidecar.transfer.s3_errors import (
    MissingBucket,
    NoConditionalWrites,
    Place,
    StoreSilent,
    UnknownAccessKey,
)
from support.restore_fakes import (
    Events,
    FakeShelf,
    FakeStore,
    copy,
    pod,
    remote_tier,
    topology,
)

FIRST = 7_000_001


class Solo:
    """A job of one replica and one rank: its member and its leader in one process."""

    def __init__(self, root: Path, store: FakeStore | None = None) -> None:
        self.root = root
        self.store = store
        self.topology = topology(
            1,
            root=str(root / "disk"),
            remote=remote_tier() if store is not None else None,
            memory=MemoryTier(schedule=Schedule(every_steps=10)),
            neighbor=False,
        )
        self.pod = pod(0, replicas=1)
        self.events = Events()
        self.shelf = FakeShelf()
        self.peers = HttpPeers(self.topology, "token")
        self.nonces = 0

    async def start(self) -> Solo:
        memory = self.root / "memory"
        memory.mkdir(parents=True, exist_ok=True)
        common: dict[str, Any] = {
            "topology": self.topology,
            "pod": self.pod,
            "peers": self.peers,
            "remote": self.store,
            "clock": SYSTEM_CLOCK,
            "emit": self.events,
        }
        self.member = Member(
            memory=MemoryLayout(str(memory)),
            disk=DiskLayout(str(self.root / "disk"), self.topology.run, 0),
            address="127.0.0.1:7070",
            shelf=self.shelf,
            **common,
        )
        self.member.prepare()
        self.leader = Leader(own=self.member, **common)
        self.leader.start()
        self.member.start(self.leader)
        return self

    async def stop(self) -> None:
        await self.member.close()
        await self.leader.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def begin(self) -> int:
        """The rank restores; the attempt that begins."""
        self.nonces += 1
        nonce = f"nonce-{self.nonces}"
        async with asyncio.timeout(20):
            while True:
                reply = await self.member.restore(
                    RestoreRequest(
                        rank=0, local_rank=0, world_size=1, nonce=nonce, pid=1, wait_seconds=1.0
                    )
                )
                assert reply.status in (LOAD, "wait"), reply
                if reply.decision is not None:
                    break
            confirm = ConfirmRequest(
                rank=0,
                nonce=nonce,
                round=reply.decision.round,
                serial=reply.decision.serial,
                ok=True,
                bytes_by_tier={"local": 7},
            )
            answer = await self.member.confirm(confirm)
        assert answer.status == GO, answer
        return reply.decision.attempt

    def report(self, step: int = 0, attempt: int = FIRST, **more: Any) -> ProgressRequest:
        rank = RankProgress(
            rank=0,
            step=step,
            step_time=SYSTEM_CLOCK.time(),
            published_step=0,
            attempt=attempt,
            state=State.TRAINING,
        )
        given = {"replica": 0, "generation": 7, "attempt": attempt, "ranks": (rank,), **more}
        return ProgressRequest(**given)

    async def told(self, step: int, **more: Any) -> ProgressReply:
        """Report, and hear the word that follows from it."""
        before = await self.leader.progress(self.report(step, **more))
        return await self.leader.progress(
            self.report(step, seen_version=before.version, wait_seconds=1.0, **more)
        )


@pytest.fixture
async def solo(tmp_path: Path) -> AsyncIterator[Solo]:
    job = await Solo(tmp_path).start()
    yield job
    await job.stop()
    await job.peers.close()


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Solo]:
    job = await Solo(tmp_path, FakeStore()).start()
    yield job
    await job.stop()
    await job.peers.close()


async def test_before_anything_the_job_is_joining(solo: Solo) -> None:
    view = solo.leader.job()
    assert (view.phase, view.attempt, view.step) == ("Joining", 0, 0)
    assert any("no remote tier" in warning for warning in view.warnings)


async def test_a_published_checkpoint_reaches_every_sidecar_at_once(solo: Solo) -> None:
    attempt = await solo.begin()
    version = (await solo.told(10)).version
    listening = asyncio.create_task(
        solo.leader.progress(solo.report(10, seen_version=version, wait_seconds=20.0))
    )
    await asyncio.sleep(0.05)
    published = {0: (CheckpointId(10, attempt),)}
    await solo.leader.progress(solo.report(10, published=published))
    async with asyncio.timeout(5):
        assert (await listening).complete_step == 10


async def test_the_word_tells_the_complete_step(solo: Solo) -> None:
    attempt = await solo.begin()
    word = await solo.told(10, published={0: (CheckpointId(10, attempt),)})
    assert word.complete_step == 10
    assert word.record is not None
    assert word.record.ran
    assert word.orders.every_steps == 10


async def test_a_pod_that_was_replaced_is_told_nothing(solo: Solo) -> None:
    await solo.begin()
    await solo.leader.progress(solo.report())
    reply = await solo.leader.progress(solo.report(generation=6))
    assert (reply.attempt, "replaced" in reply.message) == (0, True)


async def test_a_pod_that_was_replaced_opens_no_round_and_moves_no_address(solo: Solo) -> None:
    """It may live on behind a network that was cut: its trainer starts again and calls restore."""
    await solo.begin()
    await solo.told(10)
    old = JoinRequest(
        replica=0,
        generation=6,
        current={0: 6},
        replaces=0,
        uid="old",
        address="10.9.9.9:7070",
        ranks=(RankJoin(rank=0, local_rank=0, nonce="old", world_size=1),),
        wait_seconds=1.0,
    )
    reply = await solo.leader.join(old)
    assert (reply.status, "was replaced by generation 7" in reply.message) == ("failed", True)
    assert solo.leader.job().phase == "Training"
    assert (await solo.told(11)).addresses[0] != "10.9.9.9:7070"


async def test_a_leader_that_restarts_takes_the_running_attempt_over(solo: Solo) -> None:
    attempt = await solo.begin()
    before = await solo.told(10, published={0: (CheckpointId(10, attempt),)})
    await solo.restart()
    after = await solo.told(10, published={0: (CheckpointId(10, attempt),)})
    assert (after.attempt, after.complete_step) == (attempt, 10)
    assert after.version > before.version
    assert solo.leader.job().phase == "Training"


async def test_the_job_view_tells_phase_step_tiers_and_restores(solo: Solo) -> None:
    attempt = await solo.begin()
    shard = copy(10, attempt, 0, "local", 0, world_size=1)
    sick = TierState(tier="local", ok=False, message="disk full", backlog=2)
    await solo.told(12, inventory=Inventory(copies=(shard,)), tiers=(sick,))
    view = solo.leader.job()
    assert (view.phase, view.attempt, view.step) == ("Training", attempt, 12)
    assert [r.bytes_by_tier for r in view.restores] == [{"local": 7}]
    (local,) = [tier for tier in view.tiers if tier.tier == "local"]
    assert (local.ok, local.message) == (False, "replica 0: disk full")
    assert (local.newest, local.backlog) == (CheckpointId(10, attempt), 2)
    assert view.replicas[0].ranks[0].step == 12
    rank = RankProgress(
        rank=0, step=12, step_time=1.0, published_step=12, attempt=attempt, state=State.FINISHED
    )
    await solo.told(12, ranks=(rank,))
    assert solo.leader.job().phase == "Finished"


async def test_checkpoints_are_listed_newest_first_and_found_by_step_and_name(solo: Solo) -> None:
    attempt = await solo.begin()
    copies = (
        copy(10, attempt, 0, "local", 0, world_size=1),
        copy(20, attempt, 0, "local", 0, world_size=1),
        copy(99, 5_000_001, 0, "local", 0, world_size=1),
    )
    await solo.told(20, inventory=Inventory(copies=copies))
    found = solo.leader.checkpoints()
    assert [c.checkpoint.step for c in found.checkpoints] == [99, 20, 10]
    off, newest, _ = found.checkpoints
    assert (off.on_lineage, newest.on_lineage) == (False, True)
    assert (newest.complete_in, newest.present_in, newest.size) == (("local",), {"local": 1}, 100)
    assert solo.leader.find("latest") == CheckpointId(20, attempt)
    assert solo.leader.find("10") == CheckpointId(10, attempt)
    assert solo.leader.find("99-5000001") == CheckpointId(99, 5_000_001)
    with pytest.raises(ValueError, match="step 99 is on the lineage"):
        solo.leader.find("99")


async def test_nothing_to_find_is_said_so(solo: Solo) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint"):
        solo.leader.find("latest")


async def test_what_people_pin_is_in_the_word(solo: Solo) -> None:
    attempt = await solo.begin()
    pinned = CheckpointId(10, attempt)
    solo.leader.request(f"pin {pinned}")
    assert (await solo.told(5)).pinned == (pinned,)


async def test_a_delete_outlives_the_leader_in_what_sidecars_remember(solo: Solo) -> None:
    attempt = await solo.begin()
    gone = CheckpointId(10, attempt)
    solo.leader.request(f"delete {gone}")
    assert (await solo.told(5)).unwanted == (gone,)
    await solo.restart()
    assert (await solo.told(6, unwanted=(gone,))).unwanted == (gone,)


async def test_the_only_complete_checkpoint_is_not_deleted_for_people(solo: Solo) -> None:
    attempt = await solo.begin()
    only = CheckpointId(10, attempt)
    await solo.told(10, published={0: (only,)})
    with pytest.raises(ValueError, match="the only one that is complete"):
        solo.leader.request(f"delete {only}")


async def test_a_protected_checkpoint_is_not_deleted_for_people(solo: Solo) -> None:
    attempt = await solo.begin()
    solo.leader.request(f"pin {CheckpointId(10, attempt)}")
    with pytest.raises(ValueError, match="can't be deleted"):
        solo.leader.request(f"delete {CheckpointId(10, attempt)}")


async def test_a_policy_before_any_attempt_is_refused(solo: Solo) -> None:
    with pytest.raises(ValueError, match="no attempt has begun"):
        solo.leader.set_policy(Policy(every_steps=5))


async def test_what_is_uploaded_becomes_durable_and_stays_so_over_a_restart(stored: Solo) -> None:
    attempt = await stored.begin()
    checkpoint = CheckpointId(10, attempt)
    shard = copy(10, attempt, 0, "remote", -1, world_size=1)
    layout = RemoteLayout("p", stored.topology.run)
    assert stored.store is not None
    stored.store.objects[layout.shard(checkpoint, 0)] = b"x" * 100
    stored.store.objects[layout.manifest(checkpoint, 0)] = b"{}"
    async with asyncio.timeout(10):
        while layout.commit(checkpoint) not in stored.store.objects:
            await stored.told(10, uploaded=(shard,))
    await stored.restart()
    async with asyncio.timeout(10):
        while (await stored.told(11)).durable != (checkpoint,):
            pass
    assert stored.leader.job().newest_durable == checkpoint


async def test_a_store_that_goes_away_is_told_and_training_goes_on(stored: Solo) -> None:
    attempt = await stored.begin()
    assert stored.store is not None
    stored.store.away = "bucket 'b' at http://s3: refused"
    async with asyncio.timeout(40):
        while "refused" not in (await stored.told(5)).message:
            pass
    view = stored.leader.job()
    (remote,) = [tier for tier in view.tiers if tier.tier == "remote"]
    assert (remote.ok, view.phase, view.attempt) == (False, "Training", attempt)
    assert remote.code == TIER_AWAY
    stored.store.away = ""
    async with asyncio.timeout(40):
        while "refused" in (await stored.told(5)).message:
            pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownAccessKey(Place("http://s3", "b")), TIER_REFUSES),
        (MissingBucket(Place("http://s3", "b")), TIER_REFUSES),
        (NoConditionalWrites(Place("http://s3", "b")), TIER_REFUSES),
        (StoreSilent(Place("http://s3", "b")), TIER_AWAY),
        (TimeoutError(), TIER_AWAY),
        (RunOwnedElsewhere("by c2/u2"), TIER_OWNED),
        (OSError(5, "disk"), ""),
    ],
)
def test_why_the_remote_tier_does_not_work_is_told_for_programs(
    error: Exception, code: str
) -> None:
    assert trouble_code(error) == code


async def test_a_start_that_waits_for_its_run_tells_who_has_it(stored: Solo) -> None:
    assert stored.store is not None
    assert stored.topology.tiers.remote is not None
    root = RemoteLayout(stored.topology.tiers.remote.prefix, stored.topology.run).root
    stored.store.objects[f"{root}owners/{int(SYSTEM_CLOCK.time()):012d}-c2_u2"] = b"{}"
    join = RestoreRequest(rank=0, local_rank=0, world_size=1, nonce="n", pid=1, wait_seconds=0.2)
    async with asyncio.timeout(20):
        while stored.leader.job().tiers[-1].ok:
            assert (await stored.member.restore(join)).status == "wait"
    remote = stored.leader.job().tiers[-1]
    assert (remote.tier, remote.code) == ("remote", TIER_OWNED)
    assert "in use by job c2_u2" in remote.message


async def test_a_world_below_what_its_disks_know_stands_down_until_it_is_numbered_above(
    solo: Solo,
) -> None:
    """As when a clock went back, or the run was moved here: the operator takes it over."""

    async def become(generation: int) -> None:
        await solo.stop()
        solo.pod = pod(0, generation, replicas=1)
        await solo.start()

    await become(12)
    above = await solo.begin()
    await become(7)
    join = RestoreRequest(rank=0, local_rank=0, world_size=1, nonce="n", pid=1, wait_seconds=5.0)
    reply = await solo.member.restore(join)
    assert reply.status == "failed"
    view = solo.leader.job()
    assert (view.phase, view.code, view.outranked_by) == ("Failed", STOOD_DOWN, above)
    await become(generation_of(above) + 1)
    assert await solo.begin() == first_attempt_of(generation_of(above) + 1)


async def test_a_restore_tells_when_training_stopped_and_when_all_had_joined(solo: Solo) -> None:
    await solo.begin()
    await solo.told(10)
    await asyncio.sleep(0.2)
    await solo.begin()
    first, second = solo.leader.job().restores
    assert first.stopped == 0.0
    assert second.finished - second.stopped >= 0.2
    assert second.stopped < second.joined <= second.finished


class PausedClock:
    """The system's, but for a pause."""

    paused = 0.0

    def time(self) -> float:
        return SYSTEM_CLOCK.time() + self.paused

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.paused

    def sleep(self, seconds: float) -> None:
        SYSTEM_CLOCK.sleep(seconds)


async def test_a_leader_that_was_paused_announces_nothing_from_words_that_waited(
    solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await solo.begin()
    clock = PausedClock()
    monkeypatch.setattr(solo.leader, "_clock", clock)
    await solo.told(10, attempt=attempt)
    assert solo.leader.set_policy(Policy(every_steps=20)).every_steps == 20
    clock.paused = 600.0
    await solo.leader.progress(solo.report(10, attempt=attempt))  # it waited in the socket
    with pytest.raises(ValueError, match="no word from the sidecar of replica 0"):
        solo.leader.set_policy(Policy(every_steps=30))


async def test_pods_that_end_together_hear_of_one_flush_and_a_later_one_is_another(
    solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pod's trainer has ended when the second asks: nobody could save once more."""
    replies = [
        FlushReply(step=5, durable=False),
        FlushReply(step=5, durable=True),
        FlushReply(step=0, durable=False),
    ]
    monkeypatch.setattr(solo.leader._duties, "flush", lambda: replies.pop(0))
    monkeypatch.setattr(module, "SAME_FLUSH_SECONDS", 0.2)
    assert not solo.leader.flush().durable
    assert [solo.leader.flush() for _ in range(3)] == [FlushReply(step=5, durable=True)] * 3
    await asyncio.sleep(0.3)
    assert not solo.leader.flush().durable
