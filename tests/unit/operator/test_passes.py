"""Whole passes over a job in a cluster in memory: beginning, refusals, conditions, crashes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_operator.api import names
from backstay_operator.apply.applier import ANNOTATION_STEP
from backstay_operator.cluster import BUDGET
from backstay_operator.errors import Conflict, Refused, Unreachable
from backstay_operator.handlers.reconcile import calm_seconds
from backstay_operator.times import text_of
from backstay_protocol.messages import TIER_REFUSES, TierState
from support.fake_api import view_of
from support.operator_world import ATTEMPT, FIRST, World

# --- beginning ------------------------------------------------------------------------------------


async def test_generations_are_persisted_before_the_first_pod_exists(world: World) -> None:
    await world.look()
    assert world.writes() == [
        "apply status of TrainingJob gpt",
        *(f"create Pod gpt-{replica}-{FIRST}" for replica in range(3)),
    ]
    assert world.status["generations"]["first"] == FIRST
    assert world.status["generations"]["pods"] == [f"{i}/{FIRST}/0/0/" for i in range(3)]


async def test_a_job_gets_its_objects_before_its_pods_and_owns_them(world: World) -> None:
    await world.look()
    calls = world.cluster.calls
    pods = calls.index(f"create Pod gpt-0-{FIRST}")
    made = ("create Secret gpt-backstay", "apply Service gpt", "apply ConfigMap gpt-backstay",
            "apply PodDisruptionBudget gpt", "apply NetworkPolicy gpt")  # fmt: skip
    assert all(calls.index(call) < pods for call in made)
    uid = world.job["metadata"]["uid"]
    owned = [t for (kind, space, _), t in world.cluster.objects.items()
             if space == "team" and kind not in ("TrainingJob", "Event")]  # fmt: skip
    assert len(owned) == 8
    assert {t["metadata"]["ownerReferences"][0]["uid"] for t in owned} == {uid}


async def test_the_service_goes_with_the_pod_that_is_the_leader_now(world: World) -> None:
    await world.train()
    for _ in range(2):
        service = world.cluster.objects["Service", "team", "gpt"]
        leader = next(p for p in world.cluster.pods() if p["metadata"]["name"].startswith("gpt-0-"))
        owners = [owner["uid"] for owner in service["metadata"]["ownerReferences"]]
        assert owners == [world.job["metadata"]["uid"], leader["metadata"]["uid"]]
        del world.cluster.objects["Pod", "team", leader["metadata"]["name"]]
        await world.look()
        await world.look()


async def test_the_step_stays_while_a_leader_knows_of_no_rank(world: World) -> None:
    await world.train()
    step = world.status["step"]
    assert step > 0
    view = view_of(world.cluster, attempt=ATTEMPT)
    world.leaders.view = replace(view, step=0)
    world.clock.pass_time(60)
    await world.look()
    assert world.status["step"] == step


async def test_a_job_that_trains_costs_no_write(world: World) -> None:
    await world.train()
    assert world.status["ready"] == "3/3"
    assert world.status["durableStep"] == 40
    assert world.condition(names.RUNNING)["status"] == "True"
    assert world.condition(names.ACCEPTED)["status"] == "True"
    again = await world.look()
    assert world.writes() == []
    assert again == calm_seconds(1)


async def test_the_last_durable_step_is_annotated_for_schedulers(world: World) -> None:
    await world.train()
    assert world.job["metadata"]["annotations"][ANNOTATION_STEP] == "40"


async def test_a_status_that_was_lost_is_read_from_the_pods(world: World) -> None:
    await world.train()
    del world.job["status"]
    world.restart_operator()
    await world.look()
    assert world.status["generations"]["newest"] == FIRST
    assert len(world.cluster.pods()) == 3


async def test_nothing_is_created_on_a_status_that_somebody_changed(world: World) -> None:
    def interfere(call: str) -> None:
        if call.startswith("apply status"):
            world.job["metadata"]["resourceVersion"] = "other"

    world.cluster.before = interfere
    with pytest.raises(Conflict):
        await world.look()
    assert world.cluster.pods() == []


# --- refusals -------------------------------------------------------------------------------------


async def test_an_invalid_job_gets_a_condition_and_no_pods() -> None:
    world = World(replicas=0)
    await world.look()
    accepted = world.condition(names.ACCEPTED)
    assert (accepted["status"], accepted["reason"]) == ("False", names.REASON_INVALID)
    assert "spec.replicas" in accepted["message"]
    assert world.cluster.pods() == []
    assert world.cluster.events()[0]["reason"] == names.REASON_INVALID


async def test_a_limit_that_cannot_hold_the_slots_is_refused_with_the_number() -> None:
    world = World()
    trainer = world.job["spec"]["podTemplate"]["spec"]["containers"][0]
    trainer["resources"] = {"limits": {"memory": "512Mi"}}
    await world.look()
    accepted = world.condition(names.ACCEPTED)
    assert accepted["reason"] == names.REASON_MEMORY_TOO_SMALL
    assert "raise resources.limits.memory to" in accepted["message"]
    assert world.cluster.pods() == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('violates PodSecurity "baseline": hostPath volumes', names.REASON_HOST_PATH_FORBIDDEN),
        ("exceeded quota: compute, requested: pods=1", names.REASON_QUOTA_EXCEEDED),
        ("denied by a policy", names.REASON_POD_REFUSED),
    ],
)
async def test_pods_that_are_refused_are_told_and_tried_again(
    world: World, words: str, reason: str
) -> None:
    def refuse(call: str) -> None:
        if call.startswith("create Pod"):
            raise Refused(f"create Pod: {words}")

    world.cluster.before = refuse
    assert await world.look() == 10.0
    await world.look()
    running = world.condition(names.RUNNING)
    assert (running["status"], running["reason"]) == ("False", reason)
    assert world.status["reason"] == reason
    assert words in running["message"]
    world.cluster.before = lambda call: None
    await world.look()
    assert len(world.cluster.pods()) == 3


# --- conditions -----------------------------------------------------------------------------------


async def test_since_when_a_bucket_refuses_is_told_by_a_restarted_operator_too(
    world: World,
) -> None:
    await world.train()
    view = view_of(world.cluster, attempt=ATTEMPT)
    sick = TierState(tier="remote", ok=False, message="the keys are wrong", code=TIER_REFUSES)
    world.leaders.view = replace(view, tiers=(view.tiers[0], sick), newest_durable=None)
    since = text_of(world.clock.now)
    await world.look()
    world.restart_operator()
    world.clock.pass_time(100)
    await world.look()
    for kind in (names.DURABLE, names.DEGRADED):
        told = world.condition(kind)
        assert told["reason"] == names.REASON_BUCKET_REFUSED
        assert f"since {since} the keys are wrong" in told["message"]
    world.leaders.view = view_of(world.cluster, attempt=ATTEMPT)
    await world.look()
    assert world.condition(names.DEGRADED)["status"] == "False"


async def test_a_second_budget_over_the_pods_is_noticed(world: World) -> None:
    budget = {
        "metadata": {"name": "everything", "namespace": "team"},
        "spec": {"maxUnavailable": 1, "selector": {}},
    }
    await world.cluster.create(BUDGET, budget)
    await world.train()
    told = world.condition(names.DEGRADED)
    assert (told["status"], told["reason"]) == ("True", names.REASON_FOREIGN_BUDGET)
    assert "everything" in told["message"]
    del world.cluster.objects["PodDisruptionBudget", "team", "everything"]
    world.clock.pass_time(60)
    await world.look()
    assert world.condition(names.DEGRADED)["status"] == "False"


async def test_without_the_right_to_list_budgets_the_rest_goes_on(world: World) -> None:
    def refuse(call: str) -> None:
        if call == "find PodDisruptionBudget":
            raise Refused(call)

    world.cluster.before = refuse
    await world.train()
    assert world.status["reason"] == names.REASON_ALL_TRAINING


async def test_a_job_that_is_being_deleted_is_left_alone(world: World) -> None:
    await world.train()
    world.job["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert await world.look() is None
    assert world.writes() == []


# --- crashes --------------------------------------------------------------------------------------


class Killed(Exception):
    """The operator's process is gone."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 25), st.integers(0, 3)), max_size=12))
async def test_an_operator_that_is_killed_at_any_call_reaches_the_same_state(
    kills: list[tuple[int, int]],
) -> None:
    """Whatever call it dies at, and whatever pod or node goes meanwhile."""
    world = World()
    for calls_left, victim in kills:
        left = [calls_left]

        def die(call: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed(call)

        world.cluster.before = die
        try:
            await world.look()
        except Killed:
            world.restart_operator()
        world.cluster.before = lambda call: None
        world.cluster.run_pods()
        if victim < 3 and world.cluster.pods():
            key = ("Pod", "team", world.cluster.pods()[victim % len(world.cluster.pods())])
            world.cluster.objects.pop((*key[:2], key[2]["metadata"]["name"]))
    for _ in range(6):
        await world.look()
        world.cluster.run_pods()
    pods = world.cluster.pods()
    assert len(pods) == 3
    persisted = {text.split("/")[0]: text.split("/")[1]
                 for text in world.status["generations"]["pods"]}  # fmt: skip
    assert {p["metadata"]["name"] for p in pods} == {f"gpt-{r}-{g}" for r, g in persisted.items()}
    generations = [int(g) for g in persisted.values()]
    assert max(generations) == world.status["generations"]["newest"]


async def test_an_api_server_that_is_away_changes_nothing(world: World) -> None:
    await world.train()

    def away(call: str) -> None:
        raise Unreachable(call)

    world.cluster.before = away
    with pytest.raises(Unreachable):
        await world.look()
    world.cluster.before = lambda call: None
    await world.look()
    assert world.writes() == []
