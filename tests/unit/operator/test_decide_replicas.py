"""Which pods a job needs: every state of a job, and long random histories of failures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_operator.api import TrainingJob, names
from backstay_operator.decide import (
    ContainerState,
    CreatePod,
    DeletePod,
    Ended,
    JobRecord,
    LeaderFacts,
    Observed,
    Plan,
    PodRecord,
    PodState,
    conditions,
    decide,
)
from backstay_operator.settings import RestartSettings

NOW = 1_800_000_000.7
FIRST = 1_800_000_000
SETTINGS = RestartSettings()
REPLICAS = 3
RUNNING = ContainerState(name="trainer", running=True, started_at=NOW - 5)
COMPLETED = ContainerState(name="trainer", running=False, ended=Ended(exit_code=0, at=NOW - 1))
FAILED = ContainerState(name="trainer", running=False, ended=Ended(exit_code=1, at=NOW - 1))
TRAINING = LeaderFacts(phase="Training", attempt=7, step=50, newest_step=40, durable_step=40)


def pods(**changes: Any) -> tuple[PodState, ...]:
    return tuple(pod(replica, **changes) for replica in range(REPLICAS))


def pod(replica: int, **changes: Any) -> PodState:
    default: dict[str, Any] = {"generation": FIRST, "node": f"n{replica}", "trainer": RUNNING}
    return PodState(replica=replica, **{**default, **changes})


def record(**changes: Any) -> JobRecord:
    each = {
        replica: PodRecord(generation=FIRST, created=True, node=f"n{replica}")
        for replica in range(REPLICAS)
    }
    default = JobRecord(first_generation=FIRST, generation=FIRST, pods=each)
    return replace(default, **changes)


def observed(job: TrainingJob, **changes: Any) -> Observed:
    default: dict[str, Any] = {"record": record(), "pods": pods(), "leader": TRAINING}
    return Observed(job=job, **{**default, **changes})


def plan_for(what: Observed, now: float = NOW) -> Plan:
    return decide(what, now, SETTINGS)


def created(plan: Plan) -> list[int]:
    return [a.identity.replica for a in plan.actions if isinstance(a, CreatePod)]


def deleted(plan: Plan) -> list[tuple[int, bool]]:
    return [(a.replica, a.graceful) for a in plan.actions if isinstance(a, DeletePod)]


def without_remote(job: TrainingJob) -> TrainingJob:
    checkpoint = replace(job.spec.checkpoint, remote=None)
    return replace(job, spec=replace(job.spec, checkpoint=checkpoint))


# --- beginning -----------------------------------------------------------------------------------


def test_the_first_pods_share_the_creation_time_as_their_generation(job: TrainingJob) -> None:
    plan = plan_for(observed(job, record=None, pods=(), leader=None))
    assert plan.record.first_generation == plan.record.generation == FIRST
    assert created(plan) == [0, 1, 2]
    for action in plan.actions:
        assert isinstance(action, CreatePod)
        assert action.identity.generation == FIRST
        assert action.identity.current == {0: FIRST, 1: FIRST, 2: FIRST}
        assert action.identity.replaces == 0


def test_the_record_is_there_before_the_pods_and_names_them_uncreated(job: TrainingJob) -> None:
    plan = plan_for(observed(job, record=None, pods=(), leader=None))
    assert all(not pod.created for pod in plan.record.pods.values())


@pytest.mark.parametrize("there", list(itertools.product([False, True], repeat=REPLICAS)))
def test_a_crash_between_record_and_creation_finishes_the_same_creation(
    job: TrainingJob, there: tuple[bool, ...]
) -> None:
    begun = plan_for(observed(job, record=None, pods=(), leader=None)).record
    exist = tuple(pod(replica) for replica, is_there in enumerate(there) if is_there)
    plan = plan_for(observed(job, record=begun, pods=exist, leader=None))
    assert created(plan) == [replica for replica, is_there in enumerate(there) if not is_there]
    assert plan.record.generation == FIRST
    assert deleted(plan) == []


def test_pods_that_were_seen_are_noted_as_created(job: TrainingJob) -> None:
    begun = plan_for(observed(job, record=None, pods=(), leader=None)).record
    plan = plan_for(observed(job, record=begun, leader=None))
    assert plan.actions == ()
    assert all(pod.created for pod in plan.record.pods.values())
    assert plan.reason == names.REASON_WAITING


def test_a_job_that_grew_gets_its_newcomers_with_numbers_of_their_own(job: TrainingJob) -> None:
    grown = replace(job, spec=replace(job.spec, replicas=5))
    plan = plan_for(observed(grown))
    assert created(plan) == [3, 4]
    assert plan.record.generations == {0: FIRST, 1: FIRST, 2: FIRST, 3: FIRST + 1, 4: FIRST + 2}


# --- losing ---------------------------------------------------------------------------------------


def test_nothing_is_done_while_all_is_well(job: TrainingJob) -> None:
    plan = plan_for(observed(job))
    assert plan.actions == ()
    assert plan.record == record()
    assert (plan.reason, plan.message) == (
        names.REASON_ALL_TRAINING,
        "all replicas train, attempt 7, step 50",
    )


@pytest.mark.parametrize(
    "lost", [c for n in (1, 2, 3) for c in itertools.combinations(range(REPLICAS), n)]
)
@pytest.mark.parametrize("how", ["gone", "node", "failed"])
def test_each_lost_pod_gets_a_number_of_its_own_and_knows_whom_it_replaces(
    job: TrainingJob, lost: tuple[int, ...], how: str
) -> None:
    change = {"node": {"node_alive": False}, "failed": {"failed": "Evicted"}}.get(how)
    exist = tuple(
        pod(replica, **(change or {})) if replica in lost else pod(replica)
        for replica in range(REPLICAS)
        if change or replica not in lost
    )
    plan = plan_for(observed(job, pods=exist))
    assert created(plan) == list(lost)
    numbers = [a.identity.generation for a in plan.actions if isinstance(a, CreatePod)]
    assert numbers == [FIRST + 1 + i for i in range(len(lost))]
    assert plan.record.generation == FIRST + len(lost)
    for action in plan.actions:
        if isinstance(action, CreatePod):
            assert action.identity.replaces == FIRST
            assert action.identity.current == plan.record.generations
            near = "" if how == "node" else f"n{action.identity.replica}"
            assert action.near_node == near
    graceful = how == "failed"
    assert deleted(plan) == ([] if how == "gone" else [(r, graceful) for r in lost])
    expected = {
        "gone": names.REASON_POD_GONE,
        "node": names.REASON_NODE_LOST,
        "failed": names.REASON_EVICTED,
    }
    assert plan.reason == expected[how]


def test_pods_are_deleted_before_their_successors_are_created(job: TrainingJob) -> None:
    plan = plan_for(observed(job, pods=pods(node_alive=False)))
    kinds = [type(action) for action in plan.actions]
    assert kinds == [DeletePod] * 3 + [CreatePod] * 3


def test_a_failed_trainer_alone_is_the_kubelets_business(job: TrainingJob) -> None:
    exist = (pod(0), pod(1, trainer=FAILED), pod(2))
    assert plan_for(observed(job, pods=exist)).actions == ()


def test_an_old_pod_that_lives_on_is_not_mistaken_for_the_current_one(job: TrainingJob) -> None:
    newer = record().with_pod(1, PodRecord(generation=FIRST + 1, replaces=FIRST, created=True))
    newer = replace(newer, generation=FIRST + 1)
    plan = plan_for(observed(job, record=newer))
    assert created(plan) == [1]
    assert plan.record.pods[1].generation == FIRST + 2


# --- ending ---------------------------------------------------------------------------------------


def test_all_completed_and_durable_is_success(job: TrainingJob) -> None:
    plan = plan_for(observed(job, pods=pods(trainer=COMPLETED)))
    assert plan.outcome is not None
    assert plan.outcome.succeeded
    assert plan.record.outcome == names.SUCCEEDED
    assert "step 40, is durable" in plan.message
    assert deleted(plan) == [(0, True), (1, True), (2, True)]


def test_without_a_remote_tier_completed_is_success_and_says_what_that_means(
    job: TrainingJob,
) -> None:
    plan = plan_for(observed(without_remote(job), pods=pods(trainer=COMPLETED), leader=None))
    assert plan.outcome is not None
    assert plan.outcome.succeeded
    assert "nothing is durable" in plan.message


@pytest.mark.parametrize("leader", [None, replace(TRAINING, newest_step=50)])
def test_success_waits_for_durability_with_the_pods_kept_then_says_so(
    job: TrainingJob, leader: LeaderFacts | None
) -> None:
    what = observed(job, pods=pods(trainer=COMPLETED), leader=leader)
    waiting = plan_for(what)
    assert waiting.outcome is None
    assert waiting.actions == ()
    assert waiting.reason == names.REASON_NOT_DURABLE
    late = plan_for(what, now=NOW + SETTINGS.flush_seconds)
    assert late.outcome is not None
    assert late.outcome.succeeded
    assert "not known to be durable" in late.message


def test_some_completed_is_not_success(job: TrainingJob) -> None:
    exist = (pod(0, trainer=COMPLETED), pod(1), pod(2))
    plan = plan_for(observed(job, pods=exist))
    assert plan.outcome is None
    assert plan.actions == ()


def test_a_peer_that_fails_after_the_others_completed_takes_them_along(job: TrainingJob) -> None:
    exist = (pod(0, trainer=COMPLETED), pod(1, trainer=FAILED), pod(2, trainer=COMPLETED))
    plan = plan_for(observed(job, pods=exist))
    assert deleted(plan) == [(0, True), (2, True)]
    assert created(plan) == [0, 2]
    assert plan.record.generations == {0: FIRST + 1, 1: FIRST, 2: FIRST + 2}
    assert plan.reason == names.REASON_PEER_FAILED_AFTER_END
    assert [a.near_node for a in plan.actions if isinstance(a, CreatePod)] == ["n0", "n2"]


def test_the_leaders_refusal_ends_the_job_with_its_words(job: TrainingJob) -> None:
    refused = LeaderFacts(phase="Failed", message="no checkpoint in sight can be restored")
    plan = plan_for(observed(job, leader=refused))
    assert plan.outcome is not None
    assert not plan.outcome.succeeded
    assert plan.message == "no checkpoint in sight can be restored"
    assert plan.reason == names.REASON_LEADER_GAVE_UP
    assert len(deleted(plan)) == 3


def test_a_job_that_completed_is_not_failed_by_what_the_leader_says_later(
    job: TrainingJob,
) -> None:
    refused = LeaderFacts(phase="Failed", newest_step=5, durable_step=5)
    plan = plan_for(observed(job, pods=pods(trainer=COMPLETED), leader=refused))
    assert plan.outcome is not None
    assert plan.outcome.succeeded


@pytest.mark.parametrize(("deaths", "ends"), [(SETTINGS.early_deaths - 1, False), (6, True)])
def test_starts_that_come_to_nothing_end_the_job_with_the_last_words(
    job: TrainingJob, deaths: int, ends: bool
) -> None:
    words = "the trainer ends before it calls restore(): ImportError: no module named x"
    plan = plan_for(observed(job, early_deaths=deaths, early_death_words=words))
    assert (plan.outcome is not None) is ends
    if ends:
        assert plan.message == f"{words} (6 times in a row)"


@pytest.mark.parametrize("outcome", [names.SUCCEEDED, names.FAILED])
def test_what_is_over_stays_over_and_leftover_pods_go(job: TrainingJob, outcome: str) -> None:
    over = record(outcome=outcome, outcome_reason="X", outcome_message="why")
    plan = plan_for(observed(job, record=over, pods=(pod(1, node_alive=False),)))
    assert (plan.reason, plan.message, plan.outcome) == ("X", "why", None)
    assert deleted(plan) == [(1, False)]


def test_suspended_means_no_pods_and_resuming_raises_every_generation(job: TrainingJob) -> None:
    suspended = replace(job, spec=replace(job.spec, suspend=True))
    plan = plan_for(observed(suspended))
    assert deleted(plan) == [(0, True), (1, True), (2, True)]
    assert created(plan) == []
    resumed = plan_for(observed(job, record=plan.record, pods=()))
    assert resumed.record.generations == {0: FIRST + 1, 1: FIRST + 2, 2: FIRST + 3}


# --- conditions -----------------------------------------------------------------------------------


def test_conditions_tell_what_is_true_in_sentences(job: TrainingJob) -> None:
    what = observed(job)
    told = {c.type: c for c in conditions(what, plan_for(what))}
    assert told[names.RUNNING].status
    assert not told[names.RESTORING].status
    assert told[names.DURABLE].status
    assert told[names.DURABLE].message == "step 40 is durable"
    assert not told[names.DEGRADED].status
    assert names.SUCCEEDED not in told
    assert names.FAILED not in told


def test_nothing_is_claimed_of_tiers_while_the_leader_is_silent(job: TrainingJob) -> None:
    what = observed(job, leader=None)
    assert {c.type for c in conditions(what, plan_for(what))} == {names.RUNNING}


def test_troubled_tiers_and_an_absent_remote_tier_are_told(job: TrainingJob) -> None:
    ill = replace(TRAINING, phase="Joining", tier_troubles=("remote: connection refused",))
    what = observed(without_remote(job), leader=ill)
    told = {c.type: c for c in conditions(what, plan_for(what))}
    assert told[names.DEGRADED].message == "remote: connection refused"
    assert told[names.DEGRADED].status
    assert told[names.RESTORING].status
    assert "no remote tier" in told[names.DURABLE].message
    young = observed(job, leader=replace(TRAINING, durable_step=-1))
    told = {c.type: c for c in conditions(young, plan_for(young))}
    assert not told[names.DURABLE].status


def test_suspension_and_outcome_are_conditions_of_their_own(job: TrainingJob) -> None:
    suspended = observed(replace(job, spec=replace(job.spec, suspend=True)))
    assert names.SUSPENDED in {c.type for c in conditions(suspended, plan_for(suspended))}
    done = observed(job, pods=pods(trainer=COMPLETED))
    told = {c.type: c for c in conditions(done, plan_for(done))}
    assert told[names.SUCCEEDED].status
    assert not told[names.RUNNING].status


# --- long histories -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["node", "gone", "failed", "trainer", "end", "crash", "nothing"]),
        st.sets(st.integers(0, REPLICAS - 1), min_size=1),
    ),
    max_size=25,
)


class World:
    """A cluster that does as the plan says; a crash stops it between record and creation."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.record: JobRecord | None = None
        self.pods: dict[tuple[int, int], PodState] = {}
        self.ever: set[tuple[int, int]] = set()
        self.born: list[CreatePod] = []
        self.nodes = itertools.count()

    def turn(self, *, crash: bool = False) -> Plan:
        plan = decide(self.seen(), NOW, SETTINGS)
        if self.record is not None:
            assert plan.record.generation >= self.record.generation
        self.record = plan.record
        if crash:
            return plan
        for action in plan.actions:
            self.carry_out(action)
        return plan

    def seen(self) -> Observed:
        return Observed(job=self.job, record=self.record, pods=tuple(self.pods.values()))

    def carry_out(self, action: CreatePod | DeletePod) -> None:
        if isinstance(action, DeletePod):
            del self.pods[action.replica, action.generation]
            return
        name = (action.identity.replica, action.identity.generation)
        assert name not in self.ever, "a name is used for one pod only"
        self.ever.add(name)
        self.born.append(action)
        self.pods[name] = PodState(
            replica=name[0], generation=name[1], node=f"n{next(self.nodes)}", trainer=RUNNING
        )

    def break_something(self, what: str, replicas: set[int]) -> None:
        for name, state in list(self.pods.items()):
            if name[0] not in replicas:
                continue
            if what == "gone":
                del self.pods[name]
            elif what == "node":
                self.pods[name] = replace(state, node_alive=False)
            elif what == "failed":
                self.pods[name] = replace(state, failed="Evicted")
            elif what == "trainer":
                self.pods[name] = replace(state, trainer=FAILED)
            elif what == "end":
                self.pods[name] = replace(state, trainer=COMPLETED)


@given(steps=STEPS)
@settings(max_examples=300, deadline=None)
def test_no_history_of_failures_uses_a_generation_twice_or_leaves_a_replica_without_a_pod(
    job: TrainingJob, steps: list[tuple[str, set[int]]]
) -> None:
    world = World(job)
    world.turn()
    world.turn()  # notes them as created
    for what, replicas in steps:
        world.break_something(what, replicas)
        plan = world.turn(crash=what == "crash")
        if plan.outcome is not None:
            break
        world.turn()
    else:
        assert {replica for replica, _ in world.pods} == set(range(REPLICAS))
    replaced = [born.identity.generation for born in world.born if born.identity.replaces]
    assert len(replaced) == len(set(replaced)), "replaced pods share no generation"
    assert replaced == sorted(replaced)
    for born in world.born:
        assert born.identity.current[born.identity.replica] == born.identity.generation
        assert max(born.identity.current.values()) <= (world.record or record()).generation
