"""Schedules and retention that change on a running job, and leaders that come and go meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    Placement,
    Policies,
    Policy,
    ProgressReply,
    ProgressRequest,
    RankProgress,
    TierPolicy,
)
from backstay_protocol.policies import NO_STEPS
from backstay_protocol.records import AttemptRecord
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    RemoteTier,
    Retention,
    Schedule,
    Topology,
)
from backstay_sidecar.replication.rules import Rules
from backstay_sidecar.restore.census import FRESH_SECONDS
from backstay_sidecar.restore.duties import Duties
from support.restore_fakes import topology

A = 7_000_002
RECORD = AttemptRecord(
    attempt=A, base=CheckpointId(5, 7_000_001), chain=((7_000_001, 5),), world_size=3, replicas=3
)
LOCAL_RARER = TierPolicy(schedule=Schedule(every_steps=100), retention=Retention(keep_last=7))


def job_of(memory: int = 10) -> Topology:
    return topology(
        3,
        memory=MemoryTier(schedule=Schedule(every_steps=memory)),
        local=LocalTier(root="/x", retention=Retention(keep_last=2)),
    )


class Job:
    """A leader's duties, and sidecars that remember what they were told."""

    def __init__(self, of: Topology | None = None) -> None:
        self.now, self.step, self.every = 1000.0, 20, (10, 0)
        self.told = Policies()
        self.lead(of or job_of())

    def lead(self, of: Topology) -> None:
        """Another process leads, with this topology."""
        self.duties = Duties(of, int(self.now * 1000))
        self.duties.begin(RECORD, self.now)

    def word(self, replicas: tuple[int, ...] = (0, 1, 2)) -> ProgressReply:
        for replica in replicas:
            self.duties.take(self.request(replica), self.now)
        word = self.duties.speak(self.duties.look(self.now))
        if word.policies.entries:
            self.told = word.policies
        return word

    def request(self, replica: int) -> ProgressRequest:
        rank = RankProgress(
            rank=replica,
            step=self.step,
            step_time=self.now,
            published_step=0,
            attempt=A,
            state=State.TRAINING,
            every_steps=self.every[0],
            every_from=self.every[1],
        )
        return ProgressRequest(
            replica=replica,
            generation=7,
            attempt=A,
            ranks=(rank,),
            policies=self.told,
            node=f"node-{replica}",
        )

    def put(self, **tiers: TierPolicy) -> Policy:
        return self.duties.set_policy(Policy(tiers=dict(tiers)), self.duties.look(self.now))


def test_a_change_is_told_to_all_with_a_step_ahead_of_every_rank() -> None:
    job = Job()
    job.word()
    done = job.put(local=LOCAL_RARER)
    assert done.effective_from > job.step
    assert done.tiers["local"] == LOCAL_RARER
    entries = job.word().policies.entries
    assert [policy.effective_from for policy in entries] == [0, done.effective_from]
    assert job.word().orders.every_steps == 10, "the interval did not change"


def test_asked_again_it_changes_nothing() -> None:
    job = Job()
    job.word()
    done = job.put(local=LOCAL_RARER)
    job.step += 50
    job.word()
    assert job.put(local=LOCAL_RARER) == done


def test_interval_and_tiers_change_at_one_step() -> None:
    job = Job()
    job.word()
    memory = TierPolicy(schedule=Schedule(every_steps=50))
    done = job.put(local=LOCAL_RARER, memory=memory)
    orders = job.word().orders
    assert (orders.every_steps, orders.every_from) == (50, done.effective_from)


def test_captures_can_change_to_seconds_and_back() -> None:
    job = Job()
    job.word()
    job.put(memory=TierPolicy(schedule=Schedule(every_seconds=30)))
    assert job.word().orders.every_steps == NO_STEPS
    job.now += 31
    assert job.word().orders.save_at_step > job.step
    job.put(memory=TierPolicy(schedule=Schedule(every_steps=20)))
    assert job.word().orders.every_steps == 20


def test_nothing_changes_while_not_every_rank_trains() -> None:
    job = Job()
    job.word(replicas=(0, 1))
    with pytest.raises(ValueError, match="not every rank trains"):
        job.put(local=LOCAL_RARER)
    assert job.word().policies.entries[-1].tiers["local"].retention == Retention(keep_last=2)


def test_retention_holds_from_the_step_on() -> None:
    job = Job()
    job.word()
    done = job.put(local=LOCAL_RARER)
    assert job.duties.retention("local").keep_last == 2
    job.step = done.effective_from
    job.word()
    assert job.duties.retention("local").keep_last == 7


def test_a_new_leader_says_nothing_before_it_has_heard_all_and_goes_on_with_what_they_know() -> (
    None
):
    job = Job()
    job.word()
    job.put(local=LOCAL_RARER)
    before = job.word().policies
    job.lead(job_of())
    assert job.word(replicas=(0, 1)).policies == Policies()
    assert replace(job.word().policies, over=before.over) == before


def test_a_sidecar_that_is_silent_holds_a_new_leader_up_for_a_while_only() -> None:
    job = Job()
    job.word()
    job.put(local=LOCAL_RARER)
    before = job.word().policies
    job.lead(job_of())
    job.word(replicas=(0, 1))
    job.now += FRESH_SECONDS
    assert job.word(replicas=(0, 1)).policies.entries == before.entries


def test_a_topology_that_was_changed_meanwhile_is_a_change_like_any_other() -> None:
    job = Job()
    job.word()
    job.lead(job_of(memory=40))
    job.duties.standing.hear(job.told)
    orders = job.word().orders
    assert orders.every_steps == 40
    assert orders.every_from > job.step
    assert job.word().policies.entries[0].tiers["memory"].schedule.every_steps == 10


def test_a_change_that_comes_before_the_topologys_own_takes_it_along() -> None:
    job = Job()
    job.word()
    job.lead(job_of(memory=40))
    for replica in range(3):
        job.duties.take(job.request(replica), job.now)
    done = job.put(local=LOCAL_RARER)
    assert done.tiers["local"] == LOCAL_RARER
    assert done.tiers["memory"].schedule.every_steps == 40
    assert job.word().orders.every_steps == 40


def test_the_manifests_change_that_a_leader_was_told_before_is_none_after_its_restart() -> None:
    job = Job()
    job.word()
    job.put(memory=TierPolicy(schedule=Schedule(every_steps=40)))
    before = job.word().policies
    job.every = (40, before.entries[-1].effective_from)
    job.lead(job_of(memory=40))
    assert job.word().policies.entries == before.entries


def test_a_tier_that_the_sidecars_told_nothing_of_goes_by_the_topology() -> None:
    job = Job()
    job.word()
    job.put(memory=TierPolicy(schedule=Schedule(every_steps=40)))
    before = job.word().policies
    job.every = (40, before.entries[-1].effective_from)
    more = topology(
        3,
        memory=job_of().tiers.memory,
        local=job_of().tiers.local,
        remote=RemoteTier(endpoint="http://store", bucket="b", schedule=Schedule(every_steps=80)),
    )
    job.lead(more)
    for step in (0, job.step, job.step + 1000):
        assert job.word().attempt == A, "it speaks"
        assert job.duties.standing.schedule("remote", step).every_steps == 80
    assert job.duties.retention("remote") == Retention()


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (Schedule(every_seconds=30), Schedule(every_steps=20)),
        (Schedule(every_steps=1000), Schedule(every_steps=20)),
        (Schedule(every_steps=10), Schedule(every_seconds=30)),
    ],
)
@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_change_that_a_leader_could_not_tell_every_rank_is_told_by_the_next_one(
    was: Schedule, becomes: Schedule, reached: int
) -> None:
    of = topology(3, memory=MemoryTier(schedule=was), local=LocalTier(root="/x"))
    job = Job(of)
    job.every = (was.every_steps or NO_STEPS, 0)
    job.word()
    start = job.put(memory=TierPolicy(schedule=becomes)).effective_from
    job.duties.speak(job.duties.look(job.now))
    job.told = job.duties.word.policies
    job.lead(of)
    steps = becomes.every_steps or NO_STEPS
    for replica in range(3):
        job.every = (steps, start) if replica < reached else (was.every_steps or NO_STEPS, 0)
        job.duties.take(job.request(replica), job.now)
    orders = job.duties.speak(job.duties.look(job.now)).orders
    assert orders.every_steps == steps
    assert orders.every_from > job.step


def test_an_interval_that_was_widened_stays_so_under_the_next_leader() -> None:
    job = Job()
    job.word()
    start = job.put(memory=TierPolicy(schedule=Schedule(every_steps=20))).effective_from
    job.word()
    job.every = (80, start + 7)
    job.lead(job_of())
    assert (job.word().orders.every_steps, job.word().orders.every_from) == (80, start + 7)


def test_the_next_attempt_begins_with_what_was_changed() -> None:
    job = Job()
    job.word()
    job.put(memory=TierPolicy(schedule=Schedule(every_steps=40)))
    assert job.duties.first_interval(RECORD) == 40
    job.duties.begin(RECORD, job.now)
    assert job.duties.standing.at(6)["memory"].schedule.every_steps == 40


def test_a_sidecar_goes_by_the_leaders_word_over_its_own_restart(tmp_path: Path) -> None:
    job = Job()
    job.word()
    start = job.put(local=LOCAL_RARER).effective_from
    tiers = job_of().tiers
    rules = Rules(f"{tmp_path}/policy.json", tiers)
    assert rules.heed(job.word())
    assert not rules.heed(job.word())
    assert not rules.heed(ProgressReply(attempt=A)), "nothing said"
    rules.save()
    again = Rules(f"{tmp_path}/policy.json", tiers)
    again.recall()
    for it in (rules, again):
        assert it.schedule("local", start - 1) == Schedule()
        assert it.schedule("local", start) == LOCAL_RARER.schedule


def test_without_a_word_a_sidecar_goes_by_its_topology(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("{nonsense")
    rules = Rules(f"{tmp_path}/policy.json", job_of().tiers)
    rules.recall()
    assert rules.schedule("memory", 5) == Schedule(every_steps=10)


# --- where pods run -------------------------------------------------------------------------------


def test_neighbours_are_in_another_domain_once_the_operator_has_told_them() -> None:
    job = Job(topology(4, local=LocalTier(root="/x")))
    domains = {0: "a", 1: "a", 2: "b", 3: "b"}
    nodes = {i: f"node-{i}" for i in range(4)}
    for replica in range(4):
        job.duties.take(job.request(replica), job.now)
    ring = job.duties.speak(job.duties.look(job.now)).neighbors
    assert any(domains[a] == domains[b] for a, b in ring.items()), "by nodes alone"
    job.duties.placement = Placement(nodes=nodes, domains=domains)
    ring = job.duties.speak(job.duties.look(job.now)).neighbors
    assert all(domains[a] != domains[b] for a, b in ring.items())
    assert job.duties.ring.same_domain == ()


def test_a_domain_does_not_count_for_a_pod_that_has_moved_since() -> None:
    job = Job()
    job.word()
    stale = Placement(
        nodes=dict.fromkeys(range(3), "elsewhere"), domains=dict.fromkeys(range(3), "a")
    )
    job.duties.placement = stale
    job.word()
    assert job.duties.ring.same_domain == ()
    job.duties.placement = replace(stale, nodes={i: f"node-{i}" for i in range(3)})
    job.word()
    assert job.duties.ring.same_domain == (0, 1, 2)
