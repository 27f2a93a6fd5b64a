"""Restore rounds with real sidecars, a real S3 server and kill -9 at every named point.

Whatever dies: all ranks end on the same checkpoint of the same attempt, and numbers never repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backstay_protocol.ids import CheckpointId, first_attempt_of
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.messages import JobView
from backstay_protocol.names import ENV_S3_ACCESS_KEY, ENV_S3_SECRET_KEY, URL_JOB
from backstay_protocol.topology import (
    LocalTier,
    NeighborTier,
    RemoteTier,
    RestoreOptions,
    Retention,
    Schedule,
    Tiers,
)
from support.round_ranks import RankThread, restore_all
from support.s3 import S3Server
from support.s3_faults import S3Faults
from support.sidecar import SidecarJob, random_bytes

pytestmark = pytest.mark.timeout(180)

GENERATION = 1_700_000_000
FIRST = first_attempt_of(GENERATION)
SHARD_BYTES = 200_000


class Bucket:
    """What lies in the bucket of one job."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.server = server
        self.name = name
        self.layout = RemoteLayout("", "test/run")

    def tier(self, keep_last: int = 2) -> RemoteTier:
        return RemoteTier(
            endpoint=self.server.endpoint,
            bucket=self.name,
            retention=Retention(keep_last=keep_last),
        )

    @property
    def env(self) -> dict[str, str]:
        return {
            ENV_S3_ACCESS_KEY: self.server.access_key,
            ENV_S3_SECRET_KEY: self.server.secret_key,
        }

    def names(self) -> list[str]:
        found = self.server.client().list_objects(bucket_name=self.name, recursive=True)
        return sorted(str(item.object_name) for item in found)

    def attempts(self, suffix: str) -> list[int]:
        """Numbers of all claims (".json") or bases (".base.json")."""
        names = [k.removeprefix(self.layout.attempts) for k in self.names() if "attempts/" in k]
        parsed = [name.split(".", 1) for name in names]
        return [int(number) for number, rest in parsed if f".{rest}" == suffix]

    def committed(self, checkpoint: CheckpointId) -> bool:
        return self.layout.commit(checkpoint) in self.names()


@pytest.fixture
def remote(s3_server: S3Server, bucket: str) -> Bucket:
    return Bucket(s3_server, bucket)


@pytest.fixture
def job(tmp_path: Path, remote: Bucket) -> Iterator[SidecarJob]:
    """Two replicas of one rank, every tier."""
    with opened(tmp_path, remote) as made:
        yield made


def opened(
    tmp_path: Path,
    remote: Bucket | None,
    replicas: int = 2,
    keep_last: int = 2,
    endpoint: str = "",
    schedule: Schedule | None = None,
) -> SidecarJob:
    """`endpoint`: of a proxy before the store; `schedule`: the remote tier's, by default all."""
    tier = remote.tier(keep_last) if remote else None
    if tier is not None and endpoint:
        tier = dataclasses.replace(tier, endpoint=endpoint)
    if tier is not None and schedule is not None:
        tier = dataclasses.replace(tier, schedule=schedule)
    return SidecarJob(
        tmp_path,
        replicas=replicas,
        tiers=Tiers(
            local=LocalTier(root=str(tmp_path / "disk")),
            neighbor=NeighborTier(),
            remote=tier,
        ),
        generations=dict.fromkeys(range(replicas), GENERATION),
        topology_fields={
            "restore": RestoreOptions(barrier_seconds=30, remote_wait_seconds=10),
            "first_generation": GENERATION,
        },
        env=remote.env if remote else {},
    )


def start_all(job: SidecarJob) -> None:
    for replica in range(job.replicas):
        if not job.alive(replica):
            job.start(replica, wait=False)
    for replica in range(job.replicas):
        job.wait_for(partial(job._answers, replica), f"sidecar {replica}", seconds=90)


def begin(job: SidecarJob) -> tuple[int, int]:
    """A whole undisturbed round; (attempt, step)."""
    return agreed(restore_all(job))


def agreed(ranks: list[RankThread]) -> tuple[int, int]:
    """All ranks ended on the same attempt and base."""
    ends = {rank.join().ended_on for rank in ranks}
    assert len(ends) == 1, ends
    return ends.pop()


def save(job: SidecarJob, step: int, attempt: int, slot: int = 0) -> CheckpointId:
    """All ranks save, and every tier gets it."""
    checkpoint = CheckpointId(step, attempt)
    for rank in range(job.topology.world_size):
        job.save(
            rank=rank,
            step=step,
            attempt=attempt,
            slot=slot,
            data=random_bytes(SHARD_BYTES, rank),
            plan="plan",
        )
        job.train(rank, attempt, step)
    return checkpoint


def is_local(job: SidecarJob, checkpoint: CheckpointId) -> bool:
    replicas = range(job.replicas)
    return all(checkpoint in {c for c, _ in job.on_disk(r)} for r in replicas)


def view(job: SidecarJob) -> JobView:
    found: JobView = job.request(0, "GET", URL_JOB).read(JobView)
    return found


def test_all_ranks_begin_together_and_the_remote_tier_knows(
    job: SidecarJob, remote: Bucket
) -> None:
    start_all(job)
    assert begin(job) == (FIRST, 0)
    assert remote.attempts(".json") == remote.attempts(".base.json") == [FIRST]
    checkpoint = save(job, 10, FIRST)
    job.wait_for(lambda: remote.committed(checkpoint), "a commit record")
    ranks = restore_all(job)
    assert agreed(ranks) == (FIRST + 1, 10)
    for rank in ranks:
        assert rank.answer is not None
        assert sum(rank.answer.bytes_by_tier.values()) == 4 * SHARD_BYTES
    restores = view(job).restores
    assert [r.base for r in restores] == [None, checkpoint]
    assert view(job).newest_durable == checkpoint


ROUND_POINTS = [
    ("promise.before", 1, 1),
    ("promise.after", 1, 1),
    ("promise.after", 0, 1),
    ("claim.after", 0, 1),
    ("base.after", 0, 1),
    ("store.before", 1, 1),
    ("store.after", 1, 1),
    ("store.after", 0, 1),
    ("store.before", 1, 2),
    ("store.after", 1, 2),
    ("store.after", 0, 2),
    ("go.before", 0, 1),
]


@pytest.fixture(scope="module")
def long_job(
    tmp_path_factory: pytest.TempPathFactory,
    s3_server: S3Server,
) -> Iterator[tuple[SidecarJob, Bucket]]:
    """One job that goes through all the deaths below, one after the other."""
    remote = Bucket(s3_server, s3_server.make_bucket())
    with opened(tmp_path_factory.mktemp("long"), remote) as made:
        yield made, remote


@pytest.mark.parametrize(
    ("point", "replica", "passage"),
    ROUND_POINTS,
    ids=[f"{point}@{passage}-replica-{replica}" for point, replica, passage in ROUND_POINTS],
)
def test_all_ranks_end_on_the_same_checkpoint_whatever_sidecar_dies_where(
    long_job: tuple[SidecarJob, Bucket], point: str, replica: int, passage: int
) -> None:
    job, remote = long_job
    start_all(job)
    first, base = begin(job)
    checkpoint = save(job, base + 10, first, slot=(base // 10) % 2)
    job.wait_for(lambda: is_local(job, checkpoint), "local copies")
    job.kill(replica)
    job.start(replica, faults=f"{point}=kill@{passage}")
    ranks = restore_all(job)
    job.wait_dead(replica)
    job.start(replica)
    attempt, step = agreed(ranks)
    assert step == checkpoint.step
    assert attempt > first
    claims = remote.attempts(".json")
    assert len(claims) == len(set(claims))
    assert attempt == max(claims)


def test_a_leader_killed_around_a_commit_leaves_it_whole(job: SidecarJob, remote: Bucket) -> None:
    start_all(job)
    attempt, _ = begin(job)
    job.kill(0)
    job.start(0, faults="commit.before=kill")
    first = save(job, 10, attempt)
    job.wait_dead(0)
    assert not remote.committed(first)
    job.start(0, faults="commit.after=kill")
    job.wait_dead(0)
    assert remote.committed(first)
    job.start(0)
    second = save(job, 20, attempt, slot=1)
    job.wait_for(lambda: remote.committed(second), "the next commit record")
    job.wait_for(lambda: view(job).newest_durable == second, "the leader to know")


def test_a_leader_killed_within_a_delete_is_followed_by_one_that_finishes_it(
    tmp_path: Path, remote: Bucket
) -> None:
    with opened(tmp_path, remote, replicas=1, keep_last=1) as job:
        start_all(job)
        attempt, _ = begin(job)
        older = save(job, 10, attempt)
        job.wait_for(lambda: remote.committed(older), "the first commit record")
        job.kill(0)
        job.start(0, faults="delete.after_intent=kill")
        newer = save(job, 20, attempt, slot=1)
        job.wait_dead(0)
        assert remote.committed(older)
        job.start(0, faults="delete.after_commit=kill")
        job.wait_dead(0)
        assert not remote.committed(older)
        job.start(0, faults="delete.mid_shards=kill")
        job.wait_dead(0)
        job.start(0)
        folder = remote.layout.folder(older)
        job.wait_for(lambda: not any(k.startswith(folder) for k in remote.names()), "the delete")
        assert remote.committed(newer)
        assert remote.layout.deletion(older) in remote.names()
        job.wait_for(lambda: view(job).newest_durable == newer, "the leader to know")
        assert begin(job) == (attempt + 1, 20)


def test_a_rank_that_dies_while_the_others_wait_is_replaced_and_all_agree(
    job: SidecarJob,
) -> None:
    start_all(job)
    begin(job)
    waiting = RankThread(job, 0).start()
    dying = RankThread(job, 1)
    reply = job.join(1, nonce=dying.nonce, wait_seconds=5)
    assert reply.status == "load"
    other = RankThread(job, 1).start()
    agreed([waiting, other])


def test_every_sidecar_killed_at_once_in_the_middle_of_a_round(
    job: SidecarJob, remote: Bucket
) -> None:
    start_all(job)
    first, _ = begin(job)
    checkpoint = save(job, 10, first)
    job.wait_for(lambda: is_local(job, checkpoint), "local copies")
    job.kill(0)
    job.start(0, faults="claim.after=kill")
    ranks = restore_all(job)
    job.wait_dead(0)
    job.kill(1)
    start_all(job)
    attempt, step = agreed(ranks)
    assert step == 10
    assert attempt == max(remote.attempts(".json")) > first


def test_a_wiped_memory_restores_from_local_and_a_lost_disk_from_the_neighbour(
    job: SidecarJob, remote: Bucket
) -> None:
    start_all(job)
    first, _ = begin(job)
    checkpoint = save(job, 10, first)
    job.wait_for(lambda: remote.committed(checkpoint), "a commit record")
    job.wait_for(lambda: _held(job, checkpoint), "neighbour copies")
    job.kill(1)
    job.wipe_memory(1)
    job.start(1)
    ranks = restore_all(job)
    second, step = agreed(ranks)
    assert step == 10
    assert _nearest(ranks[1], shard=1) == ("local", 1)
    job.kill(1)
    job.wipe_memory(1)
    job.wipe_disk(1)
    job.start(1)
    ranks = restore_all(job)
    third, step = agreed(ranks)
    assert (step, third > second) == (10, True)
    assert _nearest(ranks[1], shard=1)[0] == "neighbor"


def test_every_node_lost_restores_from_the_remote_tier(job: SidecarJob, remote: Bucket) -> None:
    start_all(job)
    first, _ = begin(job)
    checkpoint = save(job, 10, first)
    job.wait_for(lambda: remote.committed(checkpoint), "a commit record")
    for replica in range(2):
        job.kill(replica)
        job.wipe_memory(replica)
        job.wipe_disk(replica)
    start_all(job)
    ranks = restore_all(job)
    attempt, step = agreed(ranks)
    assert (attempt, step) == (FIRST + 1, 10)
    assert _nearest(ranks[0], shard=1) == ("remote", -1)


def test_a_first_start_without_its_store_waits_bounded_and_names_it(
    tmp_path: Path, remote: Bucket
) -> None:
    with S3Faults(remote.server.address) as faults, behind(tmp_path, remote, faults) as job:
        faults.refuse()
        start_all(job)
        (rank,) = restore_all(job)
        rank.join()
        assert rank.decision is None
        assert faults.endpoint in rank.failure
        assert view(job).phase == "Failed"


def test_a_store_without_conditional_create_is_refused_before_any_number_is_claimed(
    tmp_path: Path, remote: Bucket
) -> None:
    with S3Faults(remote.server.address) as faults, behind(tmp_path, remote, faults) as job:
        faults.without_conditional_writes()
        start_all(job)
        (rank,) = restore_all(job)
        rank.join()
        assert "conditional" in rank.failure
        assert remote.attempts(".json") == []


def test_a_world_in_line_begins_without_its_store_and_claims_late(
    tmp_path: Path, remote: Bucket
) -> None:
    with S3Faults(remote.server.address) as faults, behind(tmp_path, remote, faults) as job:
        start_all(job)
        first, _ = begin(job)
        checkpoint = save(job, 10, first)
        job.wait_for(lambda: remote.committed(checkpoint), "a commit record")
        faults.refuse()
        second, step = begin(job)
        assert (second, step) == (first + 1, 10)
        newer = save(job, 20, second, slot=1)
        job.wait_for(lambda: is_local(job, newer), "local copies")
        assert remote.attempts(".json") == [first]
        job.wait_for(lambda: faults.endpoint in view(job).message, "the trouble to be told")
        assert view(job).phase == "Training"
        faults.heal()
        job.wait_for(lambda: remote.committed(newer), "the backlog to drain")
        assert remote.attempts(".json") == remote.attempts(".base.json") == [first, second]


def behind(tmp_path: Path, remote: Bucket, faults: S3Faults) -> SidecarJob:
    """One replica whose store is reached through a proxy."""
    tier = RemoteTier(endpoint=faults.endpoint, bucket=remote.name)
    return SidecarJob(
        tmp_path,
        replicas=1,
        tiers=Tiers(local=LocalTier(root=str(tmp_path / "disk")), remote=tier),
        generations={0: GENERATION},
        topology_fields={"restore": RestoreOptions(barrier_seconds=30, remote_wait_seconds=2)},
        env=remote.env,
    )


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(every_steps=1000)], ids=["due", "not"])
def test_what_dead_pods_left_on_their_disks_is_brought_out_by_sidecars_alone(
    tmp_path: Path, remote: Bucket, schedule: Schedule
) -> None:
    with (
        S3Faults(remote.server.address) as faults,
        opened(tmp_path, remote, endpoint=faults.endpoint, schedule=schedule) as job,
    ):
        start_all(job)
        attempt, _ = begin(job)
        faults.refuse()
        last = save(job, 10, attempt)
        job.wait_for(lambda: is_local(job, last), "local copies")
        for replica in range(2):
            job.kill(replica)
            job.wipe_memory(replica)
        faults.heal()
        for replica in range(2):
            job.start(replica, wait=False, arguments=("--flush",))
        job.wait_for(lambda: remote.committed(last), "the commit record")
        assert [job.wait_dead(replica) for replica in range(2)] == [0, 0]


def test_a_sidecar_that_brings_out_what_is_left_does_not_end_before_all_were_heard(
    tmp_path: Path, remote: Bucket
) -> None:
    with opened(tmp_path, remote) as job:
        start_all(job)
        attempt, _ = begin(job)
        first = save(job, 10, attempt)
        job.wait_for(lambda: remote.committed(first), "the first commit record")
        for replica in range(2):
            job.kill(replica)
            job.wipe_memory(replica)
        job.start(0, arguments=("--flush",))
        job.wait_for(lambda: view(job).newest_durable == first, "what is durable to be known")
        job.wait_for(lambda: view(job).replicas[0].seen_seconds_ago < 1, "its own word")
        assert job.alive(0)
        job.start(1, arguments=("--flush",))
        assert job.wait_dead(0) == 0


def test_the_job_view_names_who_is_missing(tmp_path: Path) -> None:
    with opened(tmp_path, None) as job:
        start_all(job)
        rank = RankThread(job, 0).start()
        job.wait_for(lambda: "rank 1" in view(job).message, "the missing rank's name")
        assert view(job).phase == "Joining"
        rank.kill()
        rank.join()


def _held(job: SidecarJob, checkpoint: CheckpointId) -> bool:
    replicas = range(job.replicas)
    return all(checkpoint in {c for c, _ in job.on_disk(r, "replicas")} for r in replicas)


def _nearest(rank: RankThread, shard: int) -> tuple[str, int]:
    assert rank.decision is not None
    source: Any = rank.decision.shards[shard].sources[0]
    return source.tier, source.holder


def test_numbers_grow_over_many_restarts_of_everything(tmp_path: Path) -> None:
    seen: list[int] = []
    with opened(tmp_path, None) as job:
        for turn in range(3):
            start_all(job)
            attempt, _ = begin(job)
            seen.append(attempt)
            checkpoint = save(job, 10 * (turn + 1), attempt, slot=turn % 2)
            job.wait_for(partial(is_local, job, checkpoint), "local copies")
            for replica in range(2):
                job.kill(replica)
            job.wipe_memory(turn % 2)
    assert seen == [FIRST, FIRST + 1, FIRST + 2]
