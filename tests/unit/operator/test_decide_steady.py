"""What a job is said to wait for: pods that run are no ranks that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_operator.api import TrainingJob, names
from backstay_operator.decide import (
    Condition,
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
    Trouble,
    conditions,
    decide,
)
from backstay_operator.decide.steady import LIBRARY_SECONDS, QUIET_SECONDS
from backstay_operator.settings import RestartSettings
from backstay_protocol.ids import first_attempt_of, generation_of
from backstay_protocol.messages import TIER_AWAY, TIER_OWNED, TIER_REFUSES, LastWord
from backstay_protocol.round_events import BARRIER, REMOTE_AWAY, STOOD_DOWN

NOW = 1_800_001_000.0
FIRST = 1_800_000_000
UP = ContainerState(name="trainer", running=True, started_at=NOW - 300)
ALL = frozenset(range(3))
TRAINING = LeaderFacts(
    phase="Training",
    attempt=first_attempt_of(FIRST),
    step=50,
    newest_step=40,
    durable_step=40,
    step_seconds=0.5,
    last_steps=dict.fromkeys(range(3), NOW - 1),
    heard=ALL,
    spoken=ALL,
)
RECORD = JobRecord(
    first_generation=FIRST,
    generation=FIRST,
    pods={r: PodRecord(generation=FIRST, created=True, node=f"n{r}") for r in range(3)},
)


def pod(replica: int, **changes: Any) -> PodState:
    own: dict[str, Any] = {"generation": FIRST, "node": f"n{replica}", "trainer": UP}
    return PodState(replica=replica, **{**own, **changes})


def seen(job: TrainingJob, leader: LeaderFacts | None = TRAINING, **changes: Any) -> Observed:
    own: dict[str, Any] = {"record": RECORD, "pods": tuple(pod(r) for r in range(3))}
    return Observed(job=job, leader=leader, **{**own, **changes})


def plan_of(what: Observed) -> Plan:
    return decide(what, NOW, RestartSettings())


def told(what: Observed, kind: str) -> Condition:
    found = conditions(what, plan_of(what))
    return next(condition for condition in found if condition.type == kind)


# --- training, or not ----------------------------------------------------------------------------


def test_a_job_that_trains_is_said_to_train(job: TrainingJob) -> None:
    assert plan_of(seen(job)).reason == names.REASON_ALL_TRAINING
    restoring = told(seen(job), names.RESTORING)
    assert (restoring.status, restoring.reason) == (False, names.REASON_NOT_RESTORING)


def test_a_trainer_that_is_down_is_named_though_the_leader_still_speaks_of_training(
    job: TrainingJob,
) -> None:
    ended = ContainerState(name="trainer", running=False, ended=Ended(exit_code=1, at=NOW - 2))
    pods = (pod(0), pod(1, trainer=ended), pod(2))
    what = seen(job, pods=pods)
    assert plan_of(what).reason == names.REASON_WAITING_FOR_RANKS
    running = told(what, names.RUNNING)
    assert not running.status
    assert "the trainers of replica 1 are down" in running.message
    assert told(what, names.RESTORING).status


def test_a_trainer_that_is_younger_than_its_last_step_is_not_training_yet(
    job: TrainingJob,
) -> None:
    young = replace(UP, started_at=NOW - 0.5)
    what = seen(job, pods=(pod(0), pod(1, trainer=young), pod(2)))
    plan = plan_of(what)
    assert plan.reason == names.REASON_WAITING_FOR_RANKS
    assert "replica 1 have started again and not called restore() yet" in plan.message


def test_ranks_that_make_no_step_are_told_with_how_long_and_what_is_usual(
    job: TrainingJob,
) -> None:
    leader = replace(TRAINING, quiet_seconds=QUIET_SECONDS + 20)
    plan = plan_of(seen(job, leader))
    assert plan.reason == names.REASON_NO_STEPS
    assert "no rank has made a step for 30 s (usual: 0.5 s), the last was 50" in plan.message


def test_long_steps_are_no_quiet(job: TrainingJob) -> None:
    leader = replace(TRAINING, quiet_seconds=60.0, step_seconds=20.0)
    assert plan_of(seen(job, leader)).reason == names.REASON_ALL_TRAINING


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ("Joining", names.REASON_WAITING_FOR_RANKS),
        ("Restoring", names.REASON_RESTORING),
        ("Finished", names.REASON_FINISHING),
    ],
)
def test_what_pods_that_run_wait_for_is_the_reason(
    job: TrainingJob, phase: str, reason: str
) -> None:
    words = "2 of 6 ranks have called restore()"
    what = seen(job, replace(TRAINING, phase=phase, message=words))
    running = told(what, names.RUNNING)
    assert (running.status, running.reason) == (False, reason)
    assert words in running.message
    assert told(what, names.RESTORING).status == (phase != "Finished")


def test_pods_that_are_not_up_are_named_before_ranks(job: TrainingJob) -> None:
    down = ContainerState(name="trainer", running=False)
    leader = replace(TRAINING, phase="Joining", message="0 of 6 ranks have called restore()")
    plan = plan_of(seen(job, leader, pods=(pod(0), pod(1, trainer=down), pod(2))))
    assert plan.reason == names.REASON_WAITING
    assert "waiting for the pods of replica 1 to run" in plan.message
    plan = plan_of(seen(job, None))
    assert "the leader (the sidecar of replica 0) does not answer" in plan.message


def test_a_pod_that_cannot_come_up_is_said_before_all_else(job: TrainingJob) -> None:
    trouble = Trouble(reason=names.REASON_IMAGE_PULL_FAILED, message="no such image")
    leader = replace(TRAINING, phase="Joining")
    plan = plan_of(seen(job, leader, pods=(pod(0), pod(1, trouble=trouble), pod(2))))
    assert (plan.reason, plan.message) == (names.REASON_IMAGE_PULL_FAILED, "no such image")


# --- an image without the library ----------------------------------------------------------------


def test_trainers_that_never_spoke_to_their_sidecars_may_lack_the_library(
    job: TrainingJob,
) -> None:
    leader = LeaderFacts(phase="Joining", message="no rank has called restore() yet", heard=ALL)
    old = replace(UP, started_at=NOW - LIBRARY_SECONDS)
    pods = tuple(pod(replica, trainer=old) for replica in range(3))
    plan = plan_of(seen(job, leader, pods=pods))
    assert plan.reason == names.REASON_LIBRARY_MISSING
    assert "replicas 0, 1, 2" in plan.message
    assert "pip install" in plan.message
    young = replace(UP, started_at=NOW - LIBRARY_SECONDS + 1)
    for change in (
        {"leader": replace(leader, spoken=ALL)},
        {"leader": replace(leader, heard=frozenset())},
        {"pods": tuple(pod(replica, trainer=young) for replica in range(3))},
    ):
        plan = plan_of(seen(job, **{"leader": leader, "pods": pods, **change}))  # type: ignore[arg-type]
        assert plan.reason == names.REASON_WAITING_FOR_RANKS


def test_a_script_that_cannot_import_the_library_fails_by_that_name(job: TrainingJob) -> None:
    words = "the trainer ends: ModuleNotFoundError: No module named 'backstay'"
    plan = plan_of(seen(job, None, early_deaths=6, early_death_words=words))
    assert plan.record.outcome_reason == names.REASON_LIBRARY_MISSING
    assert "pip install 'backstay[trainer]'" in plan.record.outcome_message
    plan = plan_of(seen(job, None, early_deaths=6, early_death_words="No module named 'gpt'"))
    assert plan.record.outcome_reason == names.REASON_EARLY_DEATHS


# --- the bucket ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (TIER_REFUSES, names.REASON_BUCKET_REFUSED),
        (TIER_AWAY, names.REASON_BUCKET_UNREACHABLE),
        (TIER_OWNED, names.REASON_RUN_OWNED_ELSEWHERE),
        ("", names.REASON_TIER_TROUBLE),
    ],
)
def test_a_bucket_that_does_not_work_is_told_with_why_and_since_when(
    job: TrainingJob, code: str, reason: str
) -> None:
    words = "leader: bucket 'b': the access key is not known"
    sick = replace(
        TRAINING, durable_step=-1, remote_code=code, remote_trouble=words, tier_troubles=(words,)
    )
    what = seen(job, sick, remote_trouble_since=1_800_000_000.0)
    for kind, status in ((names.DURABLE, False), (names.DEGRADED, True)):
        condition = told(what, kind)
        assert (condition.status, condition.reason) == (status, reason)
        assert f"since 2027-01-15T08:00:00Z {words}" in condition.message
        assert condition.message.count(words) == 1
    durable = told(seen(job, replace(sick, durable_step=40)), names.DURABLE)
    assert (durable.status, durable.reason) == (True, names.REASON_COMMITTED)
    assert f"step 40 is durable; nothing newer is: {words}" in durable.message


def test_a_start_that_waits_for_its_bucket_says_so_in_its_reason(job: TrainingJob) -> None:
    words = "waiting for the remote tier: bucket 'b': there is no such bucket"
    waits = LeaderFacts(
        phase="Restoring", message=words, remote_code=TIER_REFUSES, remote_trouble=words
    )
    plan = plan_of(seen(job, waits))
    assert (plan.reason, plan.message) == (names.REASON_BUCKET_REFUSED, words)


def test_a_start_that_waited_for_its_bucket_in_vain_fails_by_the_buckets_fault(
    job: TrainingJob,
) -> None:
    gave_up = LeaderFacts(
        phase="Failed", message="keys", code=REMOTE_AWAY, remote_code=TIER_REFUSES
    )
    assert plan_of(seen(job, gave_up)).record.outcome_reason == names.REASON_BUCKET_REFUSED
    other = replace(gave_up, code=BARRIER)
    assert plan_of(seen(job, other)).record.outcome_reason == names.REASON_LEADER_GAVE_UP


def test_what_the_sidecars_said_as_they_ended_counts_when_the_leader_is_gone(
    job: TrainingJob,
) -> None:
    suspended = replace(job, spec=replace(job.spec, suspend=True))
    word = LastWord(newest_step=60, durable_step=60)
    durable = told(seen(suspended, None, pods=(), last_word=word), names.DURABLE)
    assert (durable.status, durable.message) == (True, "step 60 is durable")
    word = LastWord(newest_step=60, durable_step=40)
    durable = told(seen(suspended, None, pods=(), last_word=word), names.DURABLE)
    assert durable.message == "step 40 is durable, the newest that was saved is 60"


# --- what else makes a job less safe -------------------------------------------------------------


def test_another_budget_over_the_pods_is_told_with_what_to_do(job: TrainingJob) -> None:
    degraded = told(seen(job, foreign_budgets=("team-wide",)), names.DEGRADED)
    assert degraded.reason == names.REASON_FOREIGN_BUDGET
    assert "PodDisruptionBudget team-wide" in degraded.message


def test_ranks_that_skip_saves_make_a_job_degraded(job: TrainingJob) -> None:
    skips = replace(TRAINING, skipping=("rank 0 skipped 20 of 22 saves",))
    assert told(seen(job, skips), names.DEGRADED).reason == names.REASON_SAVES_SKIPPED


@pytest.mark.parametrize(
    ("domains", "key", "words"),
    [
        (("a", "a", "a"), "zone", "have their neighbor in the same failure domain"),
        (("a", "b", ""), "zone", "nodes without the label zone: n2"),
        (("", "", ""), "zone", "nodes without the label zone: n0, n1, n2"),
        (("", "", ""), "topology.kubernetes.io/zone", ""),
        (("a", "b", "c"), "zone", ""),
    ],
)
def test_neighbours_without_another_failure_domain_are_told(
    job: TrainingJob, domains: tuple[str, ...], key: str, words: str
) -> None:
    neighbor = job.spec.checkpoint.neighbor
    assert neighbor is not None
    checkpoint = replace(job.spec.checkpoint, neighbor=replace(neighbor, topology_key=key))
    keyed = replace(job, spec=replace(job.spec, checkpoint=checkpoint))
    pods = tuple(pod(replica, domain=domain) for replica, domain in enumerate(domains))
    degraded = told(seen(keyed, pods=pods), names.DEGRADED)
    assert degraded.status == bool(words)
    assert words in degraded.message
    assert not words or degraded.reason == names.REASON_NO_NEIGHBOR


def test_everything_that_is_wrong_is_told_at_once(job: TrainingJob) -> None:
    sick = replace(TRAINING, remote_code=TIER_AWAY, remote_trouble="away", tier_troubles=("away",))
    degraded = told(seen(job, sick, foreign_budgets=("team-wide",)), names.DEGRADED)
    assert degraded.reason == names.REASON_BUCKET_UNREACHABLE
    assert "away; PodDisruptionBudget team-wide" in degraded.message


# --- a run with a greater attempt ----------------------------------------------------------------

ABOVE = first_attempt_of(FIRST + 500) + 3
OUTRANKED = LeaderFacts(
    phase="Failed", message="it was replaced and stands down", code=STOOD_DOWN, outranked_by=ABOVE
)


def test_a_run_with_a_greater_attempt_is_taken_over_by_one_pod_above_it(job: TrainingJob) -> None:
    plan = plan_of(seen(job, OUTRANKED))
    assert plan.reason == names.REASON_OUTRANKED
    deletion, creation = plan.actions
    assert isinstance(deletion, DeletePod)
    assert isinstance(creation, CreatePod)
    assert (deletion.replica, deletion.graceful) == (2, True)
    assert creation.identity.generation == generation_of(ABOVE) + 1 == plan.record.generation
    assert (creation.identity.replaces, creation.near_node) == (FIRST, "n2")
    assert creation.identity.current == {0: FIRST, 1: FIRST, 2: generation_of(ABOVE) + 1}


def test_the_take_over_is_made_once_and_waited_for(job: TrainingJob) -> None:
    record = plan_of(seen(job, OUTRANKED)).record
    new = pod(2, generation=record.generation)
    plan = plan_of(seen(job, OUTRANKED, record=record, pods=(pod(0), pod(1), new)))
    assert (plan.actions, plan.reason) == ((), names.REASON_OUTRANKED)
    assert not plan.record.outcome
    plan = plan_of(seen(job, OUTRANKED, record=record, pods=(pod(0), pod(1))))
    (creation,) = plan.actions
    assert isinstance(creation, CreatePod), "it is made, too, when the operator died before it was"
    assert creation.identity.generation == record.generation


def test_a_run_that_another_job_lives_by_is_never_outbid(job: TrainingJob) -> None:
    plan = plan_of(seen(job, OUTRANKED, run_users=("gpt-2",)))
    assert (plan.actions, plan.reason) == ((), names.REASON_RUN_OWNED_ELSEWHERE)
    assert "give this job another spec.checkpoint.runName" in plan.message
    assert not plan.record.outcome
