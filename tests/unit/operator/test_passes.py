"""Whole passes over a job, against a cluster in memory: order of writes, crashes, recoveries."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_operator.api import Allowances, names, read_job
from backstay_operator.api.names import LABEL_JOB
from backstay_operator.apply.applier import (
    ANNOTATION_STEP,
    APPLY_AGAIN_SECONDS,
    Applier,
    Surroundings,
)
from backstay_operator.cluster import BUDGET
from backstay_operator.errors import Conflict, Refused, Unreachable
from backstay_operator.handlers.queue import WorkQueue
from backstay_operator.handlers.reconcile import Reconciler, Tools, calm_seconds
from backstay_operator.handlers.watch import Hints
from backstay_operator.handlers.workers import Workers
from backstay_operator.manifests import build_policy
from backstay_operator.metrics import Metrics
from backstay_operator.observe.reader import Reader
from backstay_operator.settings import ClusterSettings, SidecarSettings
from backstay_operator.times import text_of
from backstay_protocol.ids import first_attempt_of
from backstay_protocol.messages import TIER_REFUSES, FlushReply, Policy, TierPolicy, TierState
from backstay_protocol.round_events import STOOD_DOWN
from backstay_protocol.topology import Retention, Schedule
from support.fake_api import START, FakeClock, FakeCluster, FakeLeaders, restore_of, view_of

KEY = ("team", "gpt")
FIRST = int(START)
ATTEMPT = first_attempt_of(FIRST)
ALLOW = Allowances()
SIDECAR = SidecarSettings(image="registry/sidecar:1")

JOB: dict[str, Any] = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": "team"},
    "spec": {
        "replicas": 3,
        "podTemplate": {
            "spec": {
                "containers": [
                    {"name": "trainer", "image": "registry/gpt:1", "command": ["torchrun", "a.py"]}
                ]
            }
        },
        "checkpoint": {
            "memory": {"everySteps": 10, "sizeLimit": "1Gi"},
            "local": {},
            "neighbor": {},
            "remote": {
                "endpoint": "https://s3.example.org",
                "bucket": "models",
                "credentialsSecret": "keys",
            },
        },
    },
}


class World:
    """A cluster with three nodes, one job and an operator that can be restarted."""

    def __init__(self, **spec: Any) -> None:
        self.clock = FakeClock()
        self.cluster = FakeCluster(self.clock)
        self.leaders = FakeLeaders()
        for number in range(3):
            self.cluster.add_node(f"node-{number}", zone=f"z{number}")
        manifest = copy.deepcopy(JOB)
        manifest["spec"] |= spec
        self.cluster.add_job(manifest)
        self.restart_operator()

    def restart_operator(self) -> None:
        """All that it remembered is gone."""
        around = Surroundings(
            cluster_name="c1", operator_namespace="backstay", instance="op-0", sidecar=SIDECAR
        )
        cluster, leaders, clock = self.cluster, self.leaders, self.clock
        tools = Tools(
            cluster=cluster,
            reader=Reader(cluster, leaders, ClusterSettings(), clock),
            applier=Applier(cluster, leaders, around, clock),
            leaders=leaders,
            allow=ALLOW,
            sidecar=SIDECAR,
            metrics=Metrics(),
            clock=clock,
        )
        self.reconciler = Reconciler(tools)

    def hint(self, pod: dict[str, Any]) -> None:
        """A watch brings it."""
        queue = WorkQueue(self.clock)
        workers = Workers(queue, self.reconciler, self.cluster, (), Metrics(), self.clock)
        Hints(queue, self.reconciler, workers).pod(pod)

    async def look(self) -> float | None:
        """One pass; then some time passes."""
        self.cluster.calls.clear()
        again = await self.reconciler.look(KEY)
        self.clock.pass_time(3)
        return again

    async def train(self) -> None:
        """Up to a job that trains."""
        await self.look()
        self.cluster.run_pods()
        self.leaders.view = view_of(
            self.cluster, attempt=ATTEMPT, restores=(restore_of(ATTEMPT, self.clock.now),)
        )
        await self.look()
        await self.look()

    @property
    def job(self) -> dict[str, Any]:
        return self.cluster.objects["TrainingJob", "team", "gpt"]

    @property
    def status(self) -> dict[str, Any]:
        return self.job.get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    def writes(self) -> list[str]:
        """Calls that change something, without Events and the job's other objects."""
        return [
            call
            for call in self.cluster.calls
            if not call.startswith(("get", "find", "create Event"))
            and call.split()[1] not in ("Service", "ConfigMap", "PodDisruptionBudget", "Secret")
            and "NetworkPolicy" not in call
        ]


@pytest.fixture
def world() -> World:
    return World()


# --- beginning -----------------------------------------------------------------------------------


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


# --- refusals ------------------------------------------------------------------------------------


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


# --- recoveries ----------------------------------------------------------------------------------


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


# --- draining ------------------------------------------------------------------------------------


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


# --- the end -------------------------------------------------------------------------------------


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


async def test_a_job_that_is_being_deleted_is_left_alone(world: World) -> None:
    await world.train()
    world.job["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert await world.look() is None
    assert world.writes() == []


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


# --- crashes -------------------------------------------------------------------------------------


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
