"""Whole passes over a job that is changed while it runs, or whose place or history changes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

from backstay_operator.api import names, read_job
from backstay_operator.manifests import build_policy
from backstay_protocol.ids import first_attempt_of
from backstay_protocol.messages import Policy, TierPolicy
from backstay_protocol.round_events import STOOD_DOWN
from backstay_protocol.topology import Retention, Schedule
from support.fake_api import view_of
from support.operator_world import ALLOW, FIRST, World


async def test_a_greater_attempt_in_the_bucket_is_outbid_once_unless_its_job_lives(
    world: World,
) -> None:
    await world.train()
    view = view_of(world.cluster, phase="Failed", attempt=0)
    world.leaders.view = replace(
        view, code=STOOD_DOWN, outranked_by=first_attempt_of(FIRST + 9), message="stands down"
    )
    other = copy.deepcopy(world.job)
    other["metadata"]["name"], other["metadata"]["uid"] = "other", "another"
    other["spec"]["checkpoint"]["runName"] = "gpt"
    world.cluster.objects["TrainingJob", "team", "other"] = other
    await world.look()
    assert world.status["reason"] == names.REASON_RUN_OWNED_ELSEWHERE
    assert "job other" in world.condition(names.RUNNING)["message"]
    del world.cluster.objects["TrainingJob", "team", "other"]
    await world.look()
    assert world.writes() == [
        "apply status of TrainingJob gpt",
        f"delete Pod gpt-2-{FIRST}",
        f"create Pod gpt-2-{FIRST + 10}",
    ]
    await world.look()
    assert not any(" Pod " in call for call in world.writes()), "once is enough"
    assert not any(c["type"] == names.FAILED for c in world.status["conditions"])


async def test_a_changed_choice_of_what_to_restore_makes_a_new_leaders_pod_once(
    world: World,
) -> None:
    await world.train()
    world.cluster.edit_job("gpt", {"spec": {"restore": {"step": 20}}})
    await world.look()
    assert world.status["reason"] == names.REASON_RESTORE_CHOSEN
    ending = [p for p in world.cluster.pods() if p["metadata"].get("deletionTimestamp")]
    assert [p["metadata"]["name"] for p in ending] == [f"gpt-0-{FIRST}"]
    await world.look()
    world.cluster.run_pods()
    world.restart_operator()
    for _ in range(3):
        await world.look()
    pods = [f"gpt-0-{FIRST + 1}", f"gpt-1-{FIRST}", f"gpt-2-{FIRST}"]
    assert sorted(p["metadata"]["name"] for p in world.cluster.pods()) == pods, "once"
    tree = world.cluster.objects["ConfigMap", "team", "gpt-backstay"]
    choice = json.loads(tree["data"]["topology.json"])["restore"]["choice"]
    noted = world.cluster.pod_of(0)["metadata"]["annotations"]["backstay.dev/restore-choice"]
    assert choice["token"] == noted != ""
    world.cluster.edit_job("gpt", {"spec": {"restore": None}})
    await world.look()
    assert sorted(p["metadata"]["name"] for p in world.cluster.pods()) == pods, "nothing to apply"


async def test_a_pod_that_does_not_tell_its_choice_is_left_alone(world: World) -> None:
    await world.train()
    for pod in world.cluster.pods():
        del pod["metadata"]["annotations"]["backstay.dev/restore-choice"]
    world.cluster.edit_job("gpt", {"spec": {"restore": {"step": 20}}})
    await world.look()
    assert not any(p["metadata"].get("deletionTimestamp") for p in world.cluster.pods())


async def test_a_changed_template_makes_new_pods_when_all_old_ones_are_gone(world: World) -> None:
    await world.train()
    world.cluster.edit_job(
        "gpt",
        {
            "spec": {
                "podTemplate": {
                    "spec": {
                        "containers": [
                            {"name": "trainer", "image": "registry/gpt:2", "command": ["a"]}
                        ]
                    }
                }
            }
        },
    )
    await world.look()
    assert world.status["reason"] == names.REASON_TEMPLATE_CHANGED
    assert all(p["metadata"].get("deletionTimestamp") for p in world.cluster.pods())
    await world.look()
    assert len(world.cluster.pods()) == 3
    world.cluster.run_pods()
    await world.look()
    images = {p["spec"]["containers"][0]["image"] for p in world.cluster.pods()}
    assert images == {"registry/gpt:2"}


async def test_a_leader_of_an_older_minor_is_told_a_changed_interval_once(world: World) -> None:
    await world.train()
    assert world.leaders.policies == []
    world.cluster.edit_job("gpt", {"spec": {"checkpoint": {"memory": {"everySteps": 20}}}})
    await world.look()
    await world.look()
    assert world.leaders.policies == [Policy(every_steps=20)]


def shows_policy(world: World) -> None:
    """The leader goes by the manifest as it is now."""
    assert world.leaders.view is not None
    policy = build_policy(
        read_job({k: v for k, v in world.job.items() if k != "status"}, ALLOW).spec.checkpoint
    )
    world.leaders.view = replace(world.leaders.view, policy=policy)


async def test_changed_schedules_and_retention_are_told_and_no_pod_ends(world: World) -> None:
    await world.train()
    shows_policy(world)
    await world.look()
    assert world.leaders.policies == []
    change = {"local": {"everySteps": 50, "keepLast": 5}, "remote": {"everySeconds": 600}}
    world.cluster.edit_job("gpt", {"spec": {"checkpoint": change}})
    await world.look()
    assert not any(" Pod " in call for call in world.writes())
    await world.look()
    (told,) = world.leaders.policies
    assert told.tiers == {
        "local": TierPolicy(schedule=Schedule(every_steps=50), retention=Retention(keep_last=5)),
        "remote": TierPolicy(schedule=Schedule(every_seconds=600), retention=Retention()),
    }


async def test_a_leader_that_shows_another_policy_is_told_again(world: World) -> None:
    await world.train()
    shows_policy(world)
    old = world.leaders.view
    world.cluster.edit_job("gpt", {"spec": {"checkpoint": {"local": {"keepLast": 5}}}})
    await world.look()
    world.leaders.view = old  # another process leads, that knows of nothing
    world.restart_operator()
    await world.look()
    assert len(world.leaders.policies) == 2
    assert world.leaders.policies[0] == world.leaders.policies[1]


async def test_the_leader_is_told_where_pods_run_until_it_shows_it(world: World) -> None:
    await world.train()
    (told,) = world.leaders.placements
    assert set(told.domains.values()) == {"z0", "z1", "z2"}
    assert told.nodes.keys() == told.domains.keys() == {0, 1, 2}
    await world.look()
    assert len(world.leaders.placements) == 1
    assert world.leaders.view is not None
    world.leaders.view = replace(world.leaders.view, placement=None)
    await world.look()
    assert world.leaders.placements == [told, told]
