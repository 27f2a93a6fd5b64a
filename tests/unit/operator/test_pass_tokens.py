"""Whole passes over a job whose Secret or token is lost, old or another one's."""

from __future__ import annotations

import copy

from backstay_operator.api import names
from backstay_operator.apply.applier import APPLY_AGAIN_SECONDS
from backstay_operator.errors import Refused
from support.operator_world import FIRST, JOB, World


async def test_a_secret_of_an_earlier_job_of_this_name_is_replaced(world: World) -> None:
    await world.look()
    secret = world.cluster.objects["Secret", "team", "gpt-backstay"]
    secret["metadata"]["ownerReferences"][0]["uid"] = "another job"
    token = secret["data"]["token"] = "b3RoZXI="
    world.restart_operator()
    del world.cluster.objects["Pod", "team", f"gpt-0-{FIRST}"]
    world.job["status"]["generations"]["pods"] = [f"{i}/{FIRST}/0/1/" for i in range(3)]
    await world.look()
    assert world.cluster.objects["Secret", "team", "gpt-backstay"]["data"]["token"] != token


async def test_a_secret_that_was_deleted_is_made_again_with_the_token_that_pods_go_by(
    world: World,
) -> None:
    await world.train()
    place = ("Secret", "team", "gpt-backstay")
    token = world.cluster.objects.pop(place)["data"]["token"]
    world.clock.now += APPLY_AGAIN_SECONDS + 1
    await world.look()
    assert world.cluster.objects[place]["data"]["token"] == token


async def test_a_lost_secret_is_made_again_with_the_same_token_by_a_restarted_operator_too(
    world: World,
) -> None:
    await world.train()
    place = ("Secret", "team", "gpt-backstay")
    token = world.cluster.objects.pop(place)["data"]["token"]
    world.restart_operator()
    await world.look()
    assert world.cluster.objects[place]["data"]["token"] == token
    other = copy.deepcopy(JOB)
    other["metadata"]["name"] = "bert"
    world.cluster.add_job(other)
    await world.reconciler.look(("team", "bert"))
    assert world.cluster.objects["Secret", "team", "bert-backstay"]["data"]["token"] != token


async def test_with_rights_of_an_older_chart_a_token_is_made_by_chance(world: World) -> None:
    def refuse(call: str) -> None:
        if call == "get Secret backstay-operator-key":
            raise Refused(call)

    world.cluster.before = refuse
    await world.look()
    assert len(world.cluster.pods()) == 3
    assert world.cluster.objects["Secret", "team", "gpt-backstay"]["data"]["token"]


async def test_pods_that_go_by_another_token_end_with_a_save_and_are_made_anew(
    world: World,
) -> None:
    await world.train()
    view, world.leaders.view = world.leaders.view, None
    world.leaders.refused.add("10.0.0.1")
    await world.look()
    assert world.status["reason"] == names.REASON_TOKEN_CHANGED
    assert all(pod["metadata"].get("deletionTimestamp") for pod in world.cluster.pods())
    world.cluster.run_pods()
    world.leaders.refused.clear()
    world.leaders.view = view
    await world.look()
    assert len(world.cluster.pods()) == 3
    assert world.status["generations"]["newest"] == FIRST + 3
