"""Whole passes over a job that ends, is suspended or is cleaned up."""

from __future__ import annotations

import copy

import pytest

from backstay_operator.api import names
from support.fake_api import view_of
from support.operator_world import ATTEMPT, FIRST, World


async def finish(world: World, word: str = "") -> None:
    for replica in range(3):
        world.cluster.finish_pod(world.cluster.pod_of(replica), word)
    world.leaders.view = None


async def test_the_sidecars_last_word_proves_that_all_is_durable(world: World) -> None:
    await world.train()
    await finish(world, '{"newest_step": 50, "durable_step": 50}')
    await world.look()
    assert world.condition(names.SUCCEEDED)["reason"] == names.REASON_ALL_COMPLETED
    assert len(world.cluster.pods()) == 3  # cleanupPodPolicy Running
    assert await world.look() is None


async def test_the_leaders_word_that_all_came_to_a_durable_end_outlives_it(world: World) -> None:
    await world.train()
    world.leaders.view = view_of(
        world.cluster, phase="Finished", attempt=ATTEMPT, step=50, newest=50, durable=50
    )
    await world.look()
    world.restart_operator()
    for replica in range(3):  # their sidecars are just being ended by the kubelet
        world.cluster.end_trainer(world.cluster.pod_of(replica), 0)
    world.leaders.view = None
    await world.look()
    assert world.condition(names.SUCCEEDED)["reason"] == names.REASON_ALL_COMPLETED
    assert not any(p["metadata"].get("deletionTimestamp") for p in world.cluster.pods())


async def test_pods_that_ended_first_are_finished_by_flush_pods_on_their_nodes(
    world: World,
) -> None:
    await world.train()
    await finish(world)
    await world.look()
    flushers = [p for p in world.cluster.pods() if p["metadata"]["name"].endswith("-flush")]
    assert [p["spec"]["nodeName"] for p in flushers] == ["node-0", "node-1", "node-2"]
    assert not any(c["type"] == names.SUCCEEDED for c in world.status["conditions"])
    for pod in flushers:
        world.cluster.set_running(pod, "10.0.0.9")
    await world.look()
    assert world.writes() == []
    for pod in flushers:
        world.cluster.finish_pod(pod, '{"newest_step": 50, "durable_step": 50}')
    await world.look()
    assert world.condition(names.SUCCEEDED)["reason"] == names.REASON_ALL_COMPLETED
    await world.look()
    left = [p["metadata"]["name"] for p in world.cluster.pods()
            if not p["metadata"].get("deletionTimestamp")]  # fmt: skip
    assert len(left) == 3


async def test_the_deadline_of_the_final_save_is_told(world: World) -> None:
    await world.train()
    await finish(world)
    world.clock.pass_time(301)
    await world.look()
    succeeded = world.condition(names.SUCCEEDED)
    assert succeeded["reason"] == names.REASON_NOT_DURABLE
    assert "not known to be durable" in succeeded["message"]


@pytest.mark.parametrize(("policy", "left"), [("All", 0), ("Running", 3), ("None", 3)])
async def test_what_the_end_leaves_is_the_clean_up_policys(policy: str, left: int) -> None:
    world = World(cleanupPodPolicy=policy)
    await world.train()
    await finish(world, '{"newest_step": 50, "durable_step": 50}')
    await world.look()
    world.cluster.run_pods()
    assert len(world.cluster.pods()) == left


async def test_a_job_is_deleted_when_its_time_to_live_is_over() -> None:
    world = World(ttlSecondsAfterFinished=60)
    await world.train()
    await finish(world, '{"newest_step": 50, "durable_step": 50}')
    await world.look()
    again = await world.look()
    assert again is not None
    assert 50 <= again <= 60
    world.clock.pass_time(60)
    await world.look()
    assert ("TrainingJob", "team", "gpt") not in world.cluster.objects
    assert await world.look() is None


async def test_a_suspended_job_has_no_pods_and_goes_on_with_new_generations(world: World) -> None:
    await world.train()
    world.cluster.edit_job("gpt", {"spec": {"suspend": True}})
    await world.look()
    world.cluster.run_pods()
    await world.look()
    assert world.cluster.pods() == []
    assert world.condition(names.SUSPENDED)["status"] == "True"
    world.cluster.edit_job("gpt", {"spec": {"suspend": False}})
    await world.look()
    assert sorted(p["metadata"]["name"] for p in world.cluster.pods()) == [
        f"gpt-{i}-{FIRST + 1 + i}" for i in range(3)
    ]
    assert world.condition(names.SUSPENDED)["status"] == "False"


async def test_the_last_save_of_a_suspended_job_is_in_its_status_though_its_pods_are_gone(
    world: World,
) -> None:
    await world.train()
    world.cluster.edit_job("gpt", {"spec": {"suspend": True}})
    assert await world.look() == 1.0
    world.leaders.view = None
    assert await world.look() == 2.0, "soon again, while pods bring out what they saved"
    pod = world.cluster.pod_of(2)
    world.cluster.finish_pod(pod, '{"newest_step": 60, "durable_step": 60}')
    world.hint(pod)  # a LIST comes too late
    world.cluster.run_pods()
    assert await world.look() == 30.0
    assert world.cluster.pods() == []
    assert world.status["durableStep"] == 60
    assert world.status["step"] == 60
    assert world.condition(names.DURABLE)["message"] == "step 60 is durable"


async def test_a_pod_of_another_job_of_the_name_has_no_last_word(world: World) -> None:
    await world.train()
    pod = world.cluster.pod_of(2)
    world.cluster.finish_pod(pod, '{"newest_step": 90, "durable_step": 90}')
    pod["metadata"]["ownerReferences"][0]["uid"] = "another"
    world.hint(pod)
    del world.cluster.objects["Pod", "team", pod["metadata"]["name"]]
    world.leaders.view = None
    await world.look()
    assert world.status["durableStep"] == 40


async def test_what_a_sidecar_said_before_it_ran_again_is_no_last_word(world: World) -> None:
    await world.train()
    pod = world.cluster.pod_of(2)
    before = copy.deepcopy(pod["status"])
    world.cluster.finish_pod(pod, '{"newest_step": 45, "durable_step": 45}')
    world.hint(pod)
    pod["status"] = before  # the kubelet has started the sidecar again
    world.hint(pod)
    await world.look()
    await finish(world)
    await world.look()
    assert not any(c["type"] == names.SUCCEEDED for c in world.status["conditions"])
    assert any(p["metadata"]["name"].endswith("-flush") for p in world.cluster.pods())
