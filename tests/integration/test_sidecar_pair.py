"""Two real sidecars, no store: copies at the neighbour, orders, thinning, whatever dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backstay_protocol import codec, slots
from backstay_protocol.control import State, Word
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout
from backstay_protocol.manifest import FORCED
from backstay_protocol.messages import (
    AgentStatus,
    FlushReply,
    Policy,
    ReplicaOffer,
    ReplicaReply,
    TierState,
)
from backstay_protocol.names import LOCAL, NEIGHBOR, PORT_API, URL_REPLICAS, URL_STATUS
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    NeighborTier,
    Retention,
    Schedule,
    Tiers,
)
from support.round_ranks import restore_all
from support.sidecar import SidecarJob, random_bytes

pytestmark = pytest.mark.timeout(150)
SIZE = 400_000


def tiers(folder: Path, **local: Schedule | Retention) -> Tiers:
    return Tiers(
        memory=MemoryTier(schedule=Schedule(every_steps=10)),
        local=LocalTier(root=str(folder / "disk"), **local),  # type: ignore[arg-type]
        neighbor=NeighborTier(),
    )


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SidecarJob]:
    with SidecarJob(tmp_path, replicas=2, tiers=tiers(tmp_path)) as job:
        yield job


def start(job: SidecarJob, faults: str = "") -> None:
    """Both; the faults are the neighbour's (replica 1's)."""
    job.start(0, wait=False)
    job.start(1, wait=False, faults=faults)
    for replica in range(2):
        job.wait_for(lambda r=replica: job._answers(r), "the sidecars")  # type: ignore[misc]


def save(job: SidecarJob, step: int, attempt: int, reason: str = "schedule") -> CheckpointId:
    for rank in range(2):
        data = random_bytes(SIZE, step + rank)
        job.save(
            rank=rank,
            step=step,
            attempt=attempt,
            data=data,
            slot=(step // 10) % 2,
            reason=reason,
            plan="plan",
        )
        job.train(rank, attempt, step)
    return CheckpointId(step, attempt)


def held(job: SidecarJob, replica: int) -> list[int]:
    return [checkpoint.step for checkpoint, _ in job.on_disk(replica, "replicas")]


def state(job: SidecarJob, replica: int, tier: str) -> TierState:
    status: AgentStatus = job.request(replica, "GET", URL_STATUS).read(AgentStatus)
    return next(state for state in status.tiers if state.tier == tier)


def test_each_keeps_the_others_shards_and_the_trainers_are_told(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    save(job, 10, attempt)
    for replica in range(2):
        job.wait_for(lambda r=replica: held(job, r) == [10], "neighbour copies")  # type: ignore[misc]
        ((_, rank),) = job.on_disk(replica, "replicas")
        assert rank == 1 - replica
    for rank in range(2):
        for word in (Word.COMPLETE_STEP, Word.SAFE_STEP):
            job.wait_for(lambda r=rank, w=word: job.word(r, w) == 10, word.name)  # type: ignore[misc]
        assert job.word(rank, Word.EVERY_STEPS) == 10


@pytest.mark.parametrize("point", ["neighbor.mid_pull", "neighbor.before_publish"])
def test_a_neighbour_killed_while_it_pulls_holds_nothing_half_and_finishes_later(
    job: SidecarJob, point: str
) -> None:
    start(job, faults=f"{point}=kill")
    attempt = job.begin().attempt
    save(job, 10, attempt)
    assert job.wait_dead(1) == -9
    assert held(job, 1) == []
    job.start(1)
    job.wait_for(lambda: held(job, 1) == [10] and held(job, 0) == [10], "both copies")
    names = [path.name for path in Path(job.disk(1).replicas).rglob("*") if path.is_file()]
    assert sorted(names) == ["00000.json", "00000.safetensors"]


def test_a_neighbour_that_is_away_degrades_that_tier_alone_and_gets_what_it_missed(
    job: SidecarJob,
) -> None:
    start(job)
    attempt = job.begin().attempt
    job.kill(1)
    for step in (10, 20):
        save(job, step, attempt)
        job.wait_for(lambda s=step: s in [c.step for c, _ in job.on_disk(0)], "local goes on")  # type: ignore[misc]
    job.wait_for(lambda: not state(job, 0, NEIGHBOR).ok, "neighbor to be degraded", 60)
    assert "connection refused" in state(job, 0, NEIGHBOR).message
    assert state(job, 0, NEIGHBOR).backlog == 2
    assert state(job, 0, LOCAL).ok
    job.start(1)
    job.wait_for(lambda: 20 in held(job, 1), "the newest first", 60)
    job.wait_for(lambda: state(job, 0, NEIGHBOR).ok, "neighbor to recover")


def test_offers_under_a_smaller_attempt_than_promised_are_refused(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    checkpoint = save(job, 10, attempt)
    job.wait_for(lambda: held(job, 1) == [10], "the copy")
    with (Path(job.disk(0).shards) / str(checkpoint) / "00000.json").open() as file:
        manifest = codec.json.load(file)

    def offer(**changes: object) -> ReplicaReply:
        fields = {
            "checkpoint": checkpoint,
            "rank": 0,
            "owner": 0,
            "address": f"{job.host(0)}:{PORT_API}",
            "attempt": attempt,
            "manifest": manifest,
            **changes,
        }
        message = ReplicaOffer(**fields)  # type: ignore[arg-type]
        reply: ReplicaReply = job.request(1, "POST", URL_REPLICAS, message).read(ReplicaReply)
        return reply

    assert offer().status == "complete"
    assert "is promised here" in offer(attempt=attempt - 1).why
    assert "keeps no copies for itself" in offer(owner=1).why
    assert "not sealed" in offer(manifest={**manifest, "digests": None}).why
    assert "of run" in offer(manifest={**manifest, "run": "test/other"}).why
    assert "of rank" in offer(rank=1).why
    assert job.request(1, "POST", URL_REPLICAS, {"rank": 0}).status == 422


def test_a_slot_that_went_bad_after_sealing_is_struck_when_the_neighbour_finds_out(
    tmp_path: Path,
) -> None:
    seldom = tiers(tmp_path, schedule=Schedule(every_steps=1000))
    with SidecarJob(tmp_path, replicas=2, tiers=seldom) as job:
        start(job)
        attempt = job.begin().attempt
        job.kill(1)
        job.save(rank=0, step=10, attempt=attempt, data=random_bytes(SIZE, 1), plan="plan")
        memory = job.memory(0)
        job.wait_for(lambda: (m := slots.peek(memory, 0, 0)) and m.sealed, "sealing")
        with open(memory.slot(0, 0), "r+b") as slot:
            slot.seek(200_000)
            slot.write(b"!")
        job.start(1)
        job.wait_for(lambda: slots.peek(memory, 0, 0) is None, "the slot to be struck", 60)
        assert "copy_struck tier=memory" in job.log(0)
        assert held(job, 1) == []


def test_a_bad_slot_does_not_keep_the_neighbour_from_the_good_copy_on_the_disk(
    job: SidecarJob,
) -> None:
    start(job)
    attempt = job.begin().attempt
    job.kill(1)
    checkpoint = save(job, 10, attempt)
    job.wait_for(lambda: job.on_disk(0) == [(checkpoint, 0)], "the local copy")
    with open(job.memory(0).slot(0, 1), "r+b") as slot:
        slot.seek(200_000)
        slot.write(b"!")
    job.start(1)
    job.wait_for(lambda: held(job, 1) == [10], "the neighbour's copy", 60)
    assert slots.peek(job.memory(0), 0, 1) is None, "the slot was struck"
    assert job.on_disk(0) == [(checkpoint, 0)]


def test_copies_of_the_base_that_a_lost_disk_took_are_made_again(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    checkpoint = save(job, 10, attempt)
    for replica in range(2):
        job.wait_for(lambda r=replica: held(job, r) == [10], "neighbour copies")  # type: ignore[misc]
    job.kill(1)
    job.wipe_memory(1)
    job.wipe_disk(1)
    job.start(1)
    ranks = [rank.join() for rank in restore_all(job)]
    assert {rank.ended_on[1] for rank in ranks} == {10}
    job.wait_for(lambda: job.on_disk(1) == [(checkpoint, 1)], "the local copy of rank 1")
    job.wait_for(lambda: held(job, 1) == [10], "the copy of rank 0 held for replica 0")
    assert "base_copied" in job.log(1)


def test_old_checkpoints_leave_local_and_neighbor_by_the_leaders_word(tmp_path: Path) -> None:
    few = tiers(tmp_path, retention=Retention(keep_last=2, keep_every=40))
    with SidecarJob(tmp_path, replicas=2, tiers=few) as job:
        start(job)
        attempt = job.begin().attempt
        for step in range(10, 80, 10):
            save(job, step, attempt)
            for rank in range(2):
                job.wait_for(lambda r=rank, s=step: job.word(r, Word.SAFE_STEP) == s, "safe")  # type: ignore[misc]
        expected = [40, 60, 70]
        for replica in range(2):
            kept = lambda r=replica: [c.step for c, _ in job.on_disk(r)]  # type: ignore[misc]  # noqa: E731
            job.wait_for(lambda: kept() == expected, "local to be thinned")  # noqa: B023
            job.wait_for(lambda r=replica: held(job, r) == expected, "held to be thinned")  # type: ignore[misc]


def test_a_leader_that_was_killed_speaks_again_and_nothing_is_lost(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    save(job, 10, attempt)
    job.wait_for(lambda: job.word(1, Word.SAFE_STEP) == 10, "the first save to be safe")
    job.kill(0)
    save(job, 20, attempt)
    job.start(0)
    for rank in range(2):
        job.wait_for(lambda r=rank: job.word(r, Word.SAFE_STEP) == 20, "the second to be safe")  # type: ignore[misc]


@contextmanager
def training(job: SidecarJob, attempt: int) -> Iterator[list[int]]:
    """Two ranks that step on and save when they are told to. Yields the forced steps."""
    stop, forced = threading.Event(), list[int]()

    def run() -> None:
        step = 0
        while not stop.wait(0.05):
            step += 1
            for rank in range(2):
                job.train(rank, attempt, step)
            order = job.word(0, Word.SAVE_AT_STEP)
            if abs(order) == step:
                assert order == job.word(1, Word.SAVE_AT_STEP)
                forced.append(order)
                save(job, step, attempt, FORCED)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield forced
    finally:
        stop.set()
        thread.join()


def test_prestop_makes_all_save_at_one_step_and_answers_when_it_is_safe(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    with training(job, attempt) as forced:
        job.wait_for(lambda: job.word(1, Word.STEP) > 1, "the training to begin")
        reply: FlushReply = job.request(1, "GET", "/prestop", port="health").read(FlushReply)
        again: FlushReply = job.request(1, "POST", "/prestop", port="health").read(FlushReply)
    assert reply.durable
    assert again == reply, "a hook that comes twice asks for one save only"
    assert forced == [-reply.step]
    for replica in range(2):
        assert reply.step in held(job, replica)


def test_prestop_of_a_finished_pod_answers_at_once(job: SidecarJob) -> None:
    start(job)
    job.begin()
    with job.block(1) as block:
        block[Word.STEP], block[Word.STATE] = 9, State.FINISHED
    answer = job.request(1, "GET", "/prestop", port="health", timeout=10)
    assert answer.json["durable"] is True


def test_a_new_interval_reaches_all_ranks_with_the_step_from_which_it_holds(
    job: SidecarJob,
) -> None:
    start(job)
    attempt = job.begin().attempt
    for rank in range(2):
        job.train(rank, attempt, 3)

    def known() -> bool:
        replicas = job.request(0, "GET", "/v1/job").json["replicas"]
        return [rank["step"] for replica in replicas for rank in replica["ranks"]] == [3, 3]

    job.wait_for(known, "the leader to know")
    assert job.request(0, "PUT", "/v1/policy", Policy()).status == 409
    answer = job.request(0, "PUT", "/v1/policy", Policy(every_steps=50))
    policy: Policy = answer.read(Policy)
    for rank in range(2):
        job.wait_for(lambda r=rank: job.word(r, Word.EVERY_STEPS) == 50, "the interval")  # type: ignore[misc]
        assert job.word(rank, Word.EVERY_FROM) == policy.effective_from > 3
        assert job.word(rank, Word.PREVIOUS_EVERY_STEPS) == 10
    assert job.request(1, "PUT", "/v1/policy", Policy(every_steps=5)).status == 409


def test_a_person_may_pin_and_delete_through_any_sidecar(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    for step in (10, 20, 30):
        save(job, step, attempt, FORCED if step == 20 else "schedule")
        job.wait_for(lambda s=step: job.word(0, Word.SAFE_STEP) == s, "safe")  # type: ignore[misc]
    name = f"/v1/checkpoints/{CheckpointId(20, attempt)}"
    assert job.request(1, "POST", f"{name}/pin").status == 202
    job.wait_for(lambda: job.request(1, "GET", name).json["pinned"], "the pin")
    for replica in range(2):
        refused = job.request(replica, "DELETE", name)
        assert (refused.status, refused.json["error"]["code"]) == (409, "Conflict")
    assert job.request(1, "DELETE", f"{name}/pin").status == 202
    job.wait_for(lambda: not job.request(0, "GET", name).json["pinned"], "the pin to go")
    assert job.request(1, "DELETE", name).status == 202

    def gone() -> bool:
        return all(
            20 not in [c.step for c, _ in job.on_disk(replica, area)]
            for replica in range(2)
            for area in ("shards", "replicas")
        )

    job.wait_for(gone, "the checkpoint to leave every disk")
    job.wait_for(lambda: job.request(1, "GET", name).status == 404, "the slots to be emptied")
    # A disk that was away comes back with it, and meanwhile every sidecar was another process.
    for replica in range(2):
        job.kill(replica)
    save(job, 20, attempt, FORCED)
    start(job)
    job.wait_for(lambda: slots.peek(job.memory(1), 1, 0) is None, "the slot to be emptied again")
    job.wait_for(gone, "nothing of it to be left")
    assert (
        job.request(0, "GET", "/v1/checkpoints/latest").json["checkpoint"].startswith(f"{30:012d}")
    )
    assert job.request(1, "DELETE", "/v1/checkpoints/7-7").status == 404
    assert job.request(1, "GET", "/v1/checkpoints/latest").json["checkpoint"].startswith("0000")


def test_a_read_of_a_shard_by_step_or_latest_gives_the_one_on_the_lineage(job: SidecarJob) -> None:
    start(job)
    attempt = job.begin().attempt
    checkpoint = save(job, 10, attempt)
    job.wait_for(lambda: held(job, 1) == [10], "the copy")
    path = DiskLayout.shard(job.disk(0).shards, checkpoint, 0)
    job.wait_for(lambda: job.word(0, Word.SAFE_STEP) == 10, "the leader to know")
    for name in ("latest", "10", str(checkpoint)):
        for replica in range(2):
            answer = job.request(replica, "GET", f"/v1/checkpoints/{name}/shards/0")
            assert (answer.status, answer.body) == (200, Path(path).read_bytes())
    assert job.request(1, "GET", "/v1/checkpoints/11/shards/0").status == 404
