"""Real sidecars whose schedules, retention and neighbours change while ranks train."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay_protocol.control import Word
from backstay_protocol.messages import JobView, Placement, Policy, TierPolicy
from backstay_protocol.names import ENV_NODE, URL_JOB, URL_PLACEMENT, URL_POLICY
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    NeighborTier,
    Retention,
    Schedule,
    Tiers,
)
from support.sidecar import SidecarJob, random_bytes

pytestmark = pytest.mark.timeout(180)
KEEP = Retention(keep_last=9)


def opened(folder: Path, replicas: int = 2) -> SidecarJob:
    return SidecarJob(
        folder,
        replicas=replicas,
        tiers=Tiers(
            memory=MemoryTier(schedule=Schedule(every_steps=10), slots=3),
            local=LocalTier(root=str(folder / "disk"), retention=KEEP),
            neighbor=NeighborTier(),
        ),
    )


def start(job: SidecarJob) -> None:
    for replica in range(job.replicas):
        if not job.alive(replica):
            job.start(replica, wait=False, env={ENV_NODE: f"node-{replica}"})
    for replica in range(job.replicas):
        job.wait_for(lambda r=replica: job._answers(r), "the sidecars")  # type: ignore[misc]


def view(job: SidecarJob) -> JobView:
    found: JobView = job.request(0, "GET", URL_JOB).read(JobView)
    return found


def steps_heard(job: SidecarJob) -> set[int]:
    return {rank.step for replica in view(job).replicas for rank in replica.ranks}


def at_step(job: SidecarJob, attempt: int, step: int) -> None:
    for rank in range(job.topology.world_size):
        job.train(rank, attempt, step)
    job.wait_for(lambda: steps_heard(job) == {step}, "the leader to know")


def save(job: SidecarJob, step: int, attempt: int) -> None:
    for rank in range(job.topology.world_size):
        data = random_bytes(200_000, step + rank)
        slot = (step // 10) % 3
        job.save(rank=rank, step=step, attempt=attempt, data=data, slot=slot, plan="plan")
    at_step(job, attempt, step)


def in_memory(job: SidecarJob, step: int) -> None:
    job.wait_for(
        lambda: any(
            t.tier == "memory" and t.newest is not None and t.newest.step == step
            for t in view(job).tiers
        ),
        f"step {step} in memory",
    )


def on_disks(job: SidecarJob, area: str = "shards") -> list[set[int]]:
    return [{c.step for c, _ in job.on_disk(r, area)} for r in range(job.replicas)]


def test_all_sidecars_change_at_one_step_and_stay_with_it_whoever_is_killed(tmp_path: Path) -> None:
    with opened(tmp_path) as job:
        start(job)
        attempt = job.begin().attempt
        save(job, 10, attempt)
        job.wait_for(lambda: on_disks(job) == [{10}, {10}], "a local copy")
        rarer = {
            "memory": TierPolicy(schedule=Schedule(every_steps=20)),
            "local": TierPolicy(schedule=Schedule(every_steps=100), retention=KEEP),
        }
        asked = Policy(tiers=rarer, effective_from=30)
        done: Policy = job.request(0, "PUT", URL_POLICY, asked).read(Policy)
        assert done.effective_from == 30
        for rank in range(2):
            job.wait_for(lambda r=rank: job.word(r, Word.EVERY_STEPS) == 20, "the interval")  # type: ignore[misc]
            assert job.word(rank, Word.EVERY_FROM) == 30
        save(job, 20, attempt)
        job.wait_for(lambda: on_disks(job) == [{10, 20}, {10, 20}], "the old schedule below")
        save(job, 40, attempt)
        in_memory(job, 40)
        job.kill(0)
        job.kill(1)
        start(job)
        save(job, 60, attempt)
        in_memory(job, 60)
        job.wait_for(lambda: view(job).policy is not None, "the leader to know what stands")
        shown = view(job).policy
        assert shown is not None
        assert (shown.tiers, shown.effective_from) == (done.tiers, 30)
        save(job, 100, attempt)
        job.wait_for(lambda: on_disks(job) == [{10, 20, 100}] * 2, "the new schedule's step alone")
        assert job.word(0, Word.EVERY_STEPS) == 20


def test_an_attempt_after_a_change_begins_with_it_also_on_a_pod_that_is_new(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as job:
        start(job)
        attempt = job.begin().attempt
        at_step(job, attempt, 3)
        change = {"memory": TierPolicy(schedule=Schedule(every_steps=70))}
        assert job.request(0, "PUT", URL_POLICY, Policy(tiers=change)).status == 200
        job.wait_for(lambda: job.word(1, Word.EVERY_STEPS) == 70, "the interval")
        job.kill(1)
        job.wipe_memory(1)
        start(job)
        job.begin()
        assert [job.word(rank, Word.EVERY_STEPS) for rank in range(2)] == [70, 70]


def test_stricter_retention_lets_go_what_newer_ones_have_made_superfluous(tmp_path: Path) -> None:
    with opened(tmp_path) as job:
        start(job)
        attempt = job.begin().attempt
        for step in (10, 20, 30):
            save(job, step, attempt)
            job.wait_for(lambda s=step: all(s in d for d in on_disks(job, "replicas")), "copies")  # type: ignore[misc]
        strict = {"local": TierPolicy(retention=Retention(keep_last=1))}
        done: Policy = job.request(0, "PUT", URL_POLICY, Policy(tiers=strict)).read(Policy)
        assert on_disks(job) == [{10, 20, 30}] * 2
        at_step(job, attempt, done.effective_from)
        job.wait_for(lambda: on_disks(job) == [{30}] * 2, "the older ones to go")
        job.wait_for(lambda: on_disks(job, "replicas") == [{30}] * 2, "their copies, too")


def test_neighbours_follow_the_domains_and_the_old_copy_stays_until_the_new_one_is_whole(
    tmp_path: Path,
) -> None:
    domains = {0: "a", 1: "a", 2: "b", 3: "b"}
    with opened(tmp_path, replicas=4) as job:
        start(job)
        attempt = job.begin().attempt
        save(job, 10, attempt)
        job.wait_for(lambda: on_disks(job, "replicas") == [{10}] * 4, "copies")
        before = view(job).neighbors
        assert any(domains[a] == domains[b] for a, b in before.items())
        placement = Placement(nodes={i: f"node-{i}" for i in range(4)}, domains=domains)
        for _ in range(2):
            assert job.request(0, "PUT", URL_PLACEMENT, placement).status == 200
        job.wait_for(
            lambda: all(domains[a] != domains[b] for a, b in view(job).neighbors.items()),
            "another ring",
        )
        after = view(job).neighbors
        assert view(job).same_domain == ()

        def holders(rank: int) -> set[int]:
            return {r for r in range(4) if rank in {k for _, k in job.on_disk(r, "replicas")}}

        for rank in range(4):
            job.wait_for(
                lambda r=rank: {before[r], after[r]} <= holders(r),  # type: ignore[misc]
                "a copy at the new neighbour, beside the old one",
            )
        job.kill(0)
        start(job)
        job.wait_for(lambda: view(job).neighbors == after, "the same ring of a new leader")
        assert view(job).placement == placement
        assert job.request(1, "PUT", URL_PLACEMENT, placement).status == 409
