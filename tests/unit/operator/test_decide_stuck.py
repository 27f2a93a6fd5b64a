"""A trainer that hangs in a world that is gone is told from one that is slow, or about to come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_operator.api import TrainingJob, names
from backstay_operator.decide import (
    ContainerState,
    CreatePod,
    DeletePod,
    JobRecord,
    LeaderFacts,
    Observed,
    PodRecord,
    PodState,
    decide,
)
from backstay_operator.decide.stuck import AGENT_SECONDS, STUCK_SECONDS, why_stuck
from backstay_operator.settings import RestartSettings

NOW = 1_800_001_000.0
FIRST = 1_800_000_000
NEW_LEADER_AT = NOW - STUCK_SECONDS - 1
LAST_STEP_AT = NEW_LEADER_AT - 20


def trainer(started_at: float, *, running: bool = True) -> ContainerState:
    return ContainerState(name="trainer", running=running, started_at=started_at)


LEADER_POD = PodState(replica=0, generation=FIRST + 1, node="n3", trainer=trainer(NEW_LEADER_AT))
MEMBER = PodState(replica=1, generation=FIRST, node="n1", trainer=trainer(LAST_STEP_AT - 300))
JOINING = LeaderFacts(phase="Joining", last_steps={1: LAST_STEP_AT})


def test_a_trainer_that_never_leaves_the_old_world_is_stuck() -> None:
    why = why_stuck(MEMBER, LEADER_POD, JOINING, NOW)
    assert "replica 1 hangs in a world that is gone" in why
    assert "81 s ago" in why


@pytest.mark.parametrize(
    ("member", "leader_pod", "leader"),
    [
        ({}, {}, {"phase": "Training"}),
        ({}, {}, {"phase": "Restoring"}),
        ({}, {}, {"last_steps": {}}),
        ({}, {}, {"last_steps": {1: NOW - 5}}),
        ({"trainer": trainer(NEW_LEADER_AT + 30)}, {}, {}),
        ({"trainer": trainer(LAST_STEP_AT - 300, running=False)}, {}, {}),
        ({}, {"trainer": trainer(NOW - 30)}, {}),
        ({}, {"trainer": trainer(NEW_LEADER_AT, running=False)}, {}),
        ({}, {"trainer": trainer(LAST_STEP_AT - 300)}, {}),
    ],
    ids=[
        *("trains", "all joined", "has called restore", "has just made a step"),
        *("its container is new", "its container is down", "the leader is young"),
        *("the leader is down", "only the leader's sidecar is new"),
    ],
)
def test_whoever_may_still_come_is_left_alone(
    member: dict[str, Any], leader_pod: dict[str, Any], leader: dict[str, Any]
) -> None:
    found = why_stuck(
        replace(MEMBER, **member),
        replace(LEADER_POD, **leader_pod),
        replace(JOINING, **leader),
        NOW,
    )
    assert found == ""


def test_a_stuck_replica_is_replaced_by_force_for_it_heeds_no_signal(job: TrainingJob) -> None:
    other = PodState(replica=2, generation=FIRST + 2, node="n2", trainer=trainer(NOW - 50))
    pods = (LEADER_POD, MEMBER, other)
    known = {p.replica: PodRecord(generation=p.generation, created=True, node=p.node) for p in pods}
    record = JobRecord(first_generation=FIRST, generation=FIRST + 2, pods=known)
    observed = Observed(job=job, record=record, pods=pods, leader=JOINING)
    plan = decide(observed, NOW, RestartSettings())
    deleted, created = plan.actions
    assert isinstance(deleted, DeletePod)
    assert isinstance(created, CreatePod)
    assert (deleted.replica, deleted.generation, deleted.graceful) == (1, FIRST, False)
    assert (created.identity.generation, created.near_node) == (FIRST + 3, "n1")
    assert plan.reason == names.REASON_HANG


# --- an order to leave that nobody heeds ----------------------------------------------------------

OLD = trainer(NOW - 3600)


def hanging(
    job: TrainingJob, seconds: float, *, launcher: str = "torchrun", **trainers: ContainerState
) -> Observed:
    """A world that hangs; all were told to leave so long ago. `r1=...`: replica 1's trainer."""
    record = JobRecord(
        first_generation=FIRST,
        generation=FIRST,
        pods={r: PodRecord(generation=FIRST, created=True, node=f"n{r}") for r in range(3)},
    )
    pods = tuple(
        PodState(replica=r, generation=FIRST, node=f"n{r}", trainer=trainers.get(f"r{r}", OLD))
        for r in range(3)
    )
    leader = LeaderFacts(phase="Training", unheeded=(1, 2), unheeded_seconds=seconds)
    return Observed(
        job=replace(job, spec=replace(job.spec, launcher=launcher)),
        record=record,
        pods=pods,
        leader=leader,
    )


def replaced(observed: Observed) -> list[int]:
    plan = decide(observed, NOW, RestartSettings())
    created = [a.identity.replica for a in plan.actions if isinstance(a, CreatePod)]
    deleted = [a for a in plan.actions if isinstance(a, DeletePod)]
    assert [a.replica for a in deleted] == created
    assert not any(a.graceful for a in deleted)
    assert not created or plan.reason == names.REASON_HANG
    return created


def test_without_a_restarting_launcher_each_that_does_not_leave_is_replaced(
    job: TrainingJob,
) -> None:
    left = trainer(NOW - 10)
    assert replaced(hanging(job, 21, launcher="static")) == [1, 2]
    assert replaced(hanging(job, 21, launcher="none", r1=left)) == [2], "1 was started again"


def test_agents_have_their_time_and_are_then_replaced_one_at_a_time(job: TrainingJob) -> None:
    assert replaced(hanging(job, AGENT_SECONDS - 1)) == []
    assert replaced(hanging(job, AGENT_SECONDS)) == [1]
    new = trainer(NOW - 30)
    assert replaced(hanging(job, AGENT_SECONDS + 40, r1=new)) == [], "its successor has its time"
    assert replaced(hanging(job, AGENT_SECONDS + 40, r1=trainer(0.0, running=False))) == []
    new = trainer(NOW - AGENT_SECONDS)
    assert replaced(hanging(job, 2 * AGENT_SECONDS, r1=new)) == [2]


def test_a_hung_pod_is_made_again_near_its_disk(job: TrainingJob) -> None:
    plan = decide(hanging(job, 21, launcher="none"), NOW, RestartSettings())
    near = {a.identity.replica: a.near_node for a in plan.actions if isinstance(a, CreatePod)}
    assert near == {1: "n1", 2: "n2"}
