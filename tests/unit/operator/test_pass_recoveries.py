"""Whole passes over a job that loses processes, pods and nodes, or is drained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_operator.api import names
from backstay_operator.api.names import LABEL_JOB
from backstay_protocol.ids import first_attempt_of
from backstay_protocol.messages import FlushReply
from support.fake_api import START, restore_of, view_of
from support.operator_world import ATTEMPT, FIRST, World


async def test_a_pod_that_is_gone_is_replaced_near_its_disk(world: World) -> None:
    await world.train()
    del world.cluster.objects["Pod", "team", f"gpt-1-{FIRST}"]
    await world.look()
    assert world.writes() == [
        "apply status of TrainingJob gpt",
        f"create Pod gpt-1-{FIRST + 1}",
    ]
    pod = world.cluster.pod_of(1)
    term = pod["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ][0]
    assert term["preference"]["matchExpressions"][0]["values"] == ["node-1"]


async def test_a_lost_node_is_fenced_then_released_then_deleted_by_force(world: World) -> None:
    await world.train()
    world.cluster.lose_node("node-1")
    await world.look()
    assert world.writes() == []  # not Ready for a moment only
    world.clock.pass_time(60)
    old = world.cluster.pod_of(1)
    await world.look()
    assert world.writes() == [
        "apply status of TrainingJob gpt",
        f"merge Pod gpt-1-{FIRST}",
        f"delete Pod gpt-1-{FIRST} within 0 s",
        f"create Pod gpt-1-{FIRST + 1}",
    ]
    assert f"1/{FIRST + 1}/{FIRST}/0/" in world.status["generations"]["pods"][1]
    note = next(e for e in world.cluster.events() if e["action"] == "DeletePod")["note"]
    assert "node-1" in note
    assert "Ready=Unknown for" in note
    assert old["metadata"]["labels"][LABEL_JOB] == "gpt"


async def test_a_node_that_is_not_ready_and_missed_by_the_leader_is_lost_at_once(
    world: World,
) -> None:
    await world.train()
    world.cluster.lose_node("node-2")
    world.clock.pass_time(8)
    world.leaders.view = view_of(world.cluster, attempt=ATTEMPT, silent={2: 12.0})
    await world.look()
    assert f"create Pod gpt-2-{FIRST + 1}" in world.writes()


async def test_the_leaders_own_node_is_missed_by_the_operator_itself(world: World) -> None:
    await world.train()
    world.cluster.lose_node("node-0")
    world.leaders.view = None
    await world.look()
    assert world.writes() == ["apply status of TrainingJob gpt"]
    world.clock.pass_time(10)
    await world.look()
    assert f"create Pod gpt-0-{FIRST + 1}" in world.writes()


async def test_who_was_lost_with_the_leader_is_replaced_with_it(world: World) -> None:
    await world.train()
    world.cluster.pod_of(2)["spec"]["nodeName"] = "node-0"
    world.cluster.lose_node("node-0")
    world.leaders.view = None
    await world.look()
    world.clock.pass_time(10)
    await world.look()
    created = [call for call in world.writes() if call.startswith("create Pod")]
    assert sorted(created) == [f"create Pod gpt-0-{FIRST + 1}", f"create Pod gpt-2-{FIRST + 2}"]


async def test_a_recovery_is_told_with_its_phases_and_tier(world: World) -> None:
    await world.train()
    world.cluster.lose_node("node-1")
    world.clock.pass_time(60)
    world.leaders.view = view_of(world.cluster, attempt=ATTEMPT, silent={1: 61.0})
    noticed = world.clock.now
    await world.look()
    world.cluster.run_pods()
    attempt = first_attempt_of(FIRST + 1)
    world.clock.pass_time(5)
    restores = (
        restore_of(ATTEMPT, START),
        restore_of(attempt, world.clock.now, base=40, memory=200, neighbor=100),
    )
    world.leaders.view = view_of(world.cluster, attempt=attempt, restores=restores)
    await world.look()
    assert world.status["restarts"] == 1
    assert world.status["attemptName"] == "2.1"
    recovery = world.status["recoveries"][-1]
    assert recovery["reason"] == names.REASON_NODE_LOST
    assert recovery["replicas"] == [1]
    assert recovery["tier"] == "neighbor"
    assert recovery["detectSeconds"] == 61.0
    assert recovery["restoreSeconds"] == 2.0
    assert recovery["scheduleSeconds"] == world.clock.now - 3 - 2 - noticed
    assert world.status["lastRestore"]["step"] == 40


async def recovered(world: World, **when: float) -> dict[str, Any]:
    """The world restores in place now; what status tells of it."""
    restores = (
        restore_of(ATTEMPT, START),
        restore_of(ATTEMPT + 1, world.clock.now, base=40, memory=200, **when),  # type: ignore[arg-type]
    )
    world.leaders.view = view_of(world.cluster, attempt=ATTEMPT + 1, restores=restores)
    await world.look()
    found: dict[str, Any] = world.status["recoveries"][-1]
    return found


async def test_a_process_that_ended_is_told_from_the_last_step_on(world: World) -> None:
    await world.train()
    stopped = world.clock.now
    world.leaders.view = view_of(world.cluster, phase="Joining", attempt=ATTEMPT)
    world.clock.pass_time(27)
    await world.look()
    joined = world.clock.now
    world.clock.pass_time(0.5)
    recovery = await recovered(world, stopped=stopped, joined=joined)
    assert recovery["reason"] == names.REASON_PROCESS_ENDED
    assert (recovery["scheduleSeconds"], recovery["restoreSeconds"]) == (30.0, 0.5)
    assert "detectSeconds" not in recovery, "only its launcher knows when it noticed"


async def test_ranks_that_were_told_to_leave_a_hang_are_told_by_that_name() -> None:
    world = World(hangSeconds=600)
    await world.train()
    stopped = world.clock.now
    world.clock.pass_time(620)
    view = view_of(world.cluster, phase="Joining", attempt=ATTEMPT)
    world.leaders.view = replace(view, quiet_seconds=620.0)
    await world.look()
    joined = world.clock.now
    recovery = await recovered(world, stopped=stopped, joined=joined)
    assert recovery["reason"] == names.REASON_HANG
    assert "no rank had made a step for 620 s" in recovery["message"]
    assert recovery["detectSeconds"] == 620.0


async def test_a_container_that_ended_is_told_in_three_phases(world: World) -> None:
    await world.train()
    stopped = world.clock.now
    world.cluster.end_trainer(world.cluster.pod_of(1), 137, restarts=1)
    world.clock.pass_time(2)
    await world.look()
    world.cluster.set_running(world.cluster.pod_of(1), "10.0.0.2")
    world.clock.pass_time(17)
    joined = world.clock.now
    world.clock.pass_time(1)
    recovery = await recovered(world, stopped=stopped, joined=joined)
    assert (recovery["reason"], recovery["replicas"]) == (names.REASON_CONTAINER_ENDED, [1])
    seconds = [recovery[f"{phase}Seconds"] for phase in ("detect", "schedule", "restore")]
    assert seconds == [2.0, 20.0, 1.0]


async def test_the_last_pod_of_a_replica_that_failed_stays_for_its_logs(world: World) -> None:
    await world.train()

    def names_of(replica: int) -> list[str]:
        found = (p["metadata"]["name"] for p in world.cluster.pods())
        return [name for name in found if name.startswith(f"gpt-{replica}-")]

    world.cluster.fail_pod(world.cluster.pod_of(2), "Evicted")
    await world.look()
    assert world.writes() == [
        "apply status of TrainingJob gpt",
        f"create Pod gpt-2-{FIRST + 1}",
    ]
    world.cluster.run_pods()
    await world.look()
    assert names_of(2) == [f"gpt-2-{FIRST}", f"gpt-2-{FIRST + 1}"]
    assert (world.status["replicas"], world.status["ready"]) == (3, "3/3")
    world.cluster.fail_pod(world.cluster.pod_of(2), "Evicted")
    await world.look()
    await world.look()
    world.cluster.run_pods()
    assert names_of(2) == [f"gpt-2-{FIRST + 1}", f"gpt-2-{FIRST + 2}"], "one of each, not more"
    world.cluster.edit_job("gpt", {"spec": {"suspend": True}})
    await world.look()
    world.cluster.run_pods()
    assert world.cluster.pods() == []


@pytest.mark.parametrize(("policy", "left"), [("All", 0), ("Running", 4), ("None", 4)])
async def test_what_failed_stays_over_the_end_as_the_clean_up_policy_says(
    policy: str, left: int
) -> None:
    world = World(cleanupPodPolicy=policy)
    await world.train()
    world.cluster.fail_pod(world.cluster.pod_of(2), "Evicted")
    await world.look()
    world.cluster.run_pods()
    await world.look()
    for replica in range(3):
        word = '{"newest_step": 50, "durable_step": 50}'
        world.cluster.finish_pod(world.cluster.pod_of(replica), word)
    world.leaders.view = None
    await world.look()
    world.cluster.run_pods()
    await world.look()
    assert len(world.cluster.pods()) == left


@pytest.mark.parametrize("whose", ["checkpoint", "template"])
async def test_a_failed_pod_is_not_kept_where_a_disk_lives_as_long_as_it(whose: str) -> None:
    world = World()
    if whose == "checkpoint":
        local = {"volume": "ephemeral", "path": None, "size": "10Gi"}
        world.cluster.edit_job("gpt", {"spec": {"checkpoint": {"local": local}}})
    else:
        scratch = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}
        template = {"spec": {"volumes": [scratch]}}
        world.cluster.edit_job("gpt", {"spec": {"podTemplate": template}})
    await world.train()
    world.cluster.fail_pod(world.cluster.pod_of(2), "Evicted")
    await world.look()
    assert world.writes()[-2:] == [
        f"delete Pod gpt-2-{FIRST}",
        f"create Pod gpt-2-{FIRST + 1}",
    ]


async def test_a_failed_pod_on_a_lost_node_is_not_kept(world: World) -> None:
    await world.train()
    world.cluster.fail_pod(world.cluster.pod_of(2), "Evicted")
    world.cluster.lose_node("node-2")
    world.clock.pass_time(60)
    await world.look()
    assert f"delete Pod gpt-2-{FIRST} within 0 s" in world.writes()


async def test_a_trainer_that_never_comes_up_ends_the_job_with_its_last_words(
    world: World,
) -> None:
    await world.look()
    world.cluster.run_pods()
    await world.look()
    pod = world.cluster.pod_of(0)
    world.cluster.end_trainer(pod, 1, restarts=6)
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = "No module named gpt"
    await world.look()
    failed = world.condition(names.FAILED)
    assert failed["reason"] == names.REASON_EARLY_DEATHS
    assert "No module named gpt" in failed["message"]


async def test_restarts_before_the_operator_came_do_not_count(world: World) -> None:
    await world.train()
    world.restart_operator()
    pod = world.cluster.pod_of(0)
    world.cluster.end_trainer(pod, 1, restarts=60)
    world.leaders.view = None
    await world.look()
    assert not any(c["type"] == names.FAILED for c in world.status["conditions"])


# --- draining -------------------------------------------------------------------------------------


async def test_a_drained_node_is_left_after_one_common_save(world: World) -> None:
    await world.train()
    world.cluster.taint_node("node-1", "node.kubernetes.io/unschedulable")
    world.leaders.flush_reply = FlushReply(step=60, durable=False, message="step 40 is the newest")
    world.clock.pass_time(3)
    await world.look()
    await world.look()
    assert world.leaders.flushes == 2
    assert world.status["reason"] == names.REASON_DRAINING
    assert len(world.cluster.pods()) == 3
    world.leaders.flush_reply = FlushReply(step=60, durable=True)
    await world.look()
    await world.look()
    assert world.cluster.pod_of(1)["metadata"]["deletionTimestamp"]
    world.cluster.run_pods()
    await world.look()
    world.cluster.run_pods()
    assert world.cluster.pod_of(1)["spec"]["nodeName"] != "node-1"


async def test_a_drain_is_held_only_so_long() -> None:
    world = World(drainHoldSeconds=20)
    await world.train()
    world.cluster.taint_node("node-1", "ToBeDeletedByClusterAutoscaler")
    world.leaders.flush_reply = None
    world.clock.pass_time(3)
    await world.look()
    world.restart_operator()  # when it was begun is persisted
    world.clock.pass_time(20)
    await world.look()
    assert world.status["reason"] == names.REASON_DRAIN_TOO_SLOW
    assert world.cluster.pod_of(1)["metadata"]["deletionTimestamp"]
