"""TrainingJobs that really train, on three nodes, and come back from whatever ends them.

One long job is broken in every way, one after the other: each test finds it training and leaves it
so. The expected tier and the phases of each recovery are read from its status.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.kube import is_true
from cluster.object_store import Store
from cluster.training import RECOVER_SECONDS, START_SECONDS, Job, last_recovery

NEAR = {"memory", "local", "neighbor"}
"""Each rank reads the shards of all: its own pod's from memory, others' where they lie nearest."""


@pytest.mark.smoke
def test_a_job_trains_to_its_end_and_its_last_step_lies_in_the_store(
    make_job: Callable[..., Job], store: Store
) -> None:
    job = make_job("short", num_steps=120)
    job.apply()
    job.wait("it succeeds", lambda: is_true(job.tree, "Succeeded"), START_SECONDS)
    status = job.status
    assert status["durableStep"] == 120
    assert status["restarts"] == 0
    committed = [n for n in store.names(f"{job.namespace}/short/") if n.endswith("/commit.json")]
    assert any("/000000000120-" in name for name in committed)
    assert "AllReplicasCompleted" in job.kube.run("get", "tj", "short", "-n", job.namespace)
    job.delete()
    job.wait("nothing of it is left", lambda: not job.objects(), RECOVER_SECONDS)


def test_a_rank_that_is_killed_comes_back_without_a_container_restart(long_job: Job) -> None:
    before = long_job.status
    containers = [long_job.restarts(replica, "trainer") for replica in range(3)]
    long_job.kill_rank(1)
    status = long_job.wait_training(before["attempt"])
    assert [long_job.restarts(replica, "trainer") for replica in range(3)] == containers
    assert {"memory"} <= set(status["lastRestore"]["tiers"]) <= NEAR
    last_recovery(status, "ProcessEnded", "ContainerEnded")


def test_a_trainer_container_that_ends_starts_again_in_its_pod(long_job: Job) -> None:
    before, pod = long_job.status, long_job.pod_name(2)
    long_job.end_container(2, "trainer")
    status = long_job.wait_training(before["attempt"])
    assert long_job.pod_name(2) == pod
    assert {"memory"} <= set(status["lastRestore"]["tiers"]) <= NEAR
    last_recovery(status, "ProcessEnded", "ContainerEnded")


def test_training_goes_on_while_a_sidecar_starts_again(long_job: Job) -> None:
    before = long_job.status
    restarts = long_job.restarts(1, "backstay-sidecar")
    long_job.end_container(1, "backstay-sidecar")
    long_job.wait(
        "the sidecar is back",
        lambda: long_job.restarts(1, "backstay-sidecar") > restarts,
        RECOVER_SECONDS,
    )
    long_job.wait(
        "a newer step is durable",
        lambda: long_job.status["durableStep"] > before["durableStep"] + 50,
        RECOVER_SECONDS,
    )
    assert long_job.status["attempt"] == before["attempt"]


@pytest.mark.smoke
@pytest.mark.parametrize("replica", [2, 0], ids=["a-member", "the-leader"])
def test_a_pod_that_is_deleted_comes_back_near_its_disk(long_job: Job, replica: int) -> None:
    before, node = long_job.status, long_job.node(replica)
    old = long_job.pod_name(replica)
    long_job.kube.delete("pod", old, long_job.namespace, "--wait=false")
    status = long_job.wait_training(before["attempt"])
    assert long_job.pod_name(replica) != old
    assert long_job.node(replica) == node
    assert status["restarts"] > before["restarts"]
    last_recovery(status, "PodGone", "PodFailed", "ProcessEnded", "ContainerEnded")
    assert "remote" not in status["lastRestore"]["tiers"]


def test_a_rank_that_stands_still_is_noticed_and_the_world_begins_again(
    make_job: Callable[..., Job],
) -> None:
    job = make_job("hangs", hangSeconds=20)
    job.apply()
    before = job.wait_training(timeout=START_SECONDS)
    job.kill_rank(1, "STOP")
    status = job.wait_training(before["attempt"])
    assert status["lastRestore"]["step"] >= before["durableStep"]
    assert "remote" not in status["lastRestore"]["tiers"]
    last_recovery(status, "Hang", "ProcessEnded", "ContainerEnded", "PodGone")
    job.delete()
    job.wait("its pods are gone", lambda: not job.pods(), RECOVER_SECONDS)
