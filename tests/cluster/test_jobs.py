"""TrainingJobs that really train, on three nodes, and come back from whatever ends them.

One long job is broken in every way, one after the other: each test finds it training and leaves it
so. The expected tier and the phases of each recovery are read from its status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.built_images import Image
from cluster.installed_chart import Chart
from cluster.kube import Kube, Object, is_true
from cluster.machine import Cluster
from cluster.object_store import Store

KIND = "trainingjob"
START_SECONDS = 240
RECOVER_SECONDS = 240
PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}
SMALL = ("--width=64", "--num-layers=2", "--num-heads=2", "--context-length=32")


@dataclass(frozen=True)
class Job:
    """A TrainingJob in the cluster."""

    kube: Kube
    namespace: str
    name: str

    @property
    def tree(self) -> Object:
        found = self.kube.get(KIND, self.name, self.namespace)
        assert found is not None
        return found

    @property
    def status(self) -> Object:
        return self.tree.get("status") or {}

    def pods(self) -> list[Object]:
        return self.kube.list("pods", self.namespace, f"backstay.dev/job={self.name}")

    def pod(self, replica: int) -> Object:
        """The current pod of a replica."""
        found = [
            pod
            for pod in self.pods()
            if pod["metadata"]["labels"]["backstay.dev/replica-index"] == str(replica)
        ]
        return max(found, key=lambda pod: int(pod["metadata"]["labels"]["backstay.dev/generation"]))

    def pod_name(self, replica: int) -> str:
        return str(self.pod(replica)["metadata"]["name"])

    def node(self, replica: int) -> str:
        return str(self.pod(replica)["spec"]["nodeName"])

    def restarts(self, replica: int, container: str) -> int:
        status = self.pod(replica)["status"]
        every = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
        return next(int(one["restartCount"]) for one in every if one["name"] == container)

    def wait(self, what: str, condition: Callable[[], Any], timeout: float) -> Any:
        return self.kube.wait(what, condition, timeout=timeout, namespace=self.namespace)

    def wait_training(self, after_attempt: int = 0, timeout: float = RECOVER_SECONDS) -> Object:
        """Until a newer attempt trains and has made a checkpoint durable; its status."""

        def trains() -> Object | None:
            status = self.status
            newer = status.get("attempt", 0) > after_attempt
            going = is_true({"status": status}, "Running") and is_true(
                {"status": status}, "Durable"
            )
            return status if newer and going and status.get("ready") == "3/3" else None

        found: Object = self.wait(f"{self.name} trains anew", trains, timeout)
        return found

    def kill_rank(self, replica: int) -> None:
        """SIGKILL to the rank's process, which is torchrun's child."""
        self.kube.exec(
            self.namespace, self.pod_name(replica), "sh", "-c",
            "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | "
            "grep -q '[-]u -m examples' && kill -9 ${p#/proc/}; done; true",
            container="trainer",
        )  # fmt: skip

    def end_container(self, replica: int, container: str) -> None:
        """SIGTERM to its first process."""
        pod = self.pod_name(replica)
        self.kube.exec(self.namespace, pod, "sh", "-c", "kill -TERM 1", container=container)


def manifest(name: str, image: Image, store: Store, torch: str, num_steps: int) -> Object:
    """A job of three replicas that trains the small char_gpt."""
    together = {
        "labelSelector": {"matchLabels": {"backstay.dev/job": name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    trainer = {
        "name": "trainer",
        "image": image.reference,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "torchrun",
            "-m",
            "examples.char_gpt.train",
            f"--num-steps={num_steps}",
            *SMALL,
        ],
        "volumeMounts": [{"name": "torch", "mountPath": torch, "readOnly": True}],
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    template = {
        "securityContext": {"runAsUser": 0},
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 50, "podAffinityTerm": together}
                ]
            }
        },
        "volumes": [{"name": "torch", "hostPath": {"path": torch}}],
        "containers": [trainer],
    }
    return {
        "apiVersion": "backstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "replicas": 3,
            "podTemplate": {"spec": template},
            "checkpoint": {
                "memory": {"everySteps": 5, "sizeLimit": "64Mi"},
                "local": {"everySteps": 10},
                "neighbor": {"everySteps": 10},
                "remote": {
                    "endpoint": store.endpoint,
                    "bucket": store.bucket,
                    "credentialsSecret": "store-keys",
                    "everySteps": 50,
                },
            },
        },
    }


@pytest.fixture(scope="module")
def place(kube: Kube, chart: Chart, store: Store) -> Iterator[str]:
    """A namespace with the store's keys, and an operator that works."""
    with kube.namespace("test-jobs", PRIVILEGED) as name:
        kube.apply(store.secret("store-keys"), namespace=name)
        yield name


@pytest.fixture(scope="module")
def long_job(
    kube: Kube, place: str, store: Store, images: dict[str, Image], torch_folder: str
) -> Iterator[Job]:
    """A job that trains for as long as the tests of this module."""
    image = images["backstay-example-trainer"]
    kube.apply(manifest("long", image, store, torch_folder, 1_000_000), namespace=place)
    job = Job(kube, place, "long")
    job.wait_training(timeout=START_SECONDS)
    yield job
    kube.delete(KIND, "long", place)


def last_recovery(job: Job, reason: str) -> Object:
    """The newest recovery, which must be of this kind and tell its phases."""
    recovery: Object = job.status["recoveries"][-1]
    assert recovery["reason"] in (reason, "ProcessEnded"), recovery
    assert recovery["restoreSeconds"] > 0
    return recovery


def test_a_job_trains_to_its_end_and_its_last_step_lies_in_the_store(
    kube: Kube, place: str, store: Store, images: dict[str, Image], torch_folder: str
) -> None:
    image = images["backstay-example-trainer"]
    kube.apply(manifest("short", image, store, torch_folder, 120), namespace=place)
    job = Job(kube, place, "short")
    job.wait("it succeeds", lambda: is_true(job.tree, "Succeeded"), START_SECONDS)
    status = job.status
    assert status["durableStep"] == 120
    assert status["restarts"] == 0
    committed = [n for n in store.names(f"{place}/short/") if n.endswith("/commit.json")]
    assert any("/000000000120-" in name for name in committed)
    shown = kube.run("get", "tj", "short", "-n", place)
    assert "AllReplicasCompleted" in shown
    kube.delete(KIND, "short", place)
    job.wait("its pods are gone", lambda: not job.pods(), 60)


def test_a_rank_that_is_killed_comes_back_without_a_container_restart(long_job: Job) -> None:
    before = long_job.status
    containers = [long_job.restarts(replica, "trainer") for replica in range(3)]
    long_job.kill_rank(1)
    status = long_job.wait_training(before["attempt"])
    assert [long_job.restarts(replica, "trainer") for replica in range(3)] == containers
    assert set(status["lastRestore"]["tiers"]) == {"memory"}
    assert last_recovery(long_job, "ProcessEnded")["tier"] == "memory"


def test_a_trainer_container_that_ends_starts_again_in_its_pod(long_job: Job) -> None:
    before, pod = long_job.status, long_job.pod_name(2)
    long_job.end_container(2, "trainer")
    status = long_job.wait_training(before["attempt"])
    assert long_job.pod_name(2) == pod
    assert set(status["lastRestore"]["tiers"]) == {"memory"}


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


@pytest.mark.parametrize("replica", [2, 0], ids=["a-member", "the-leader"])
def test_a_pod_that_is_deleted_comes_back_near_its_disk(long_job: Job, replica: int) -> None:
    before, node = long_job.status, long_job.node(replica)
    old = long_job.pod_name(replica)
    long_job.kube.delete("pod", old, long_job.namespace, "--wait=false")
    status = long_job.wait_training(before["attempt"])
    assert long_job.pod_name(replica) != old
    assert long_job.node(replica) == node
    assert status["restarts"] > before["restarts"]
    assert "remote" not in status["lastRestore"]["tiers"]


def test_a_node_that_is_lost_costs_no_more_than_its_copies_on_a_neighbour(
    long_job: Job, breakable: Cluster
) -> None:
    before, node = long_job.status, long_job.node(1)
    old = long_job.pod_name(1)
    breakable.node_kill(int(node.removeprefix("node-")))
    status = long_job.wait_training(before["attempt"])
    assert long_job.node(1) != node
    assert long_job.pod_name(1) != old
    recovery = last_recovery(long_job, "NodeLost")
    assert recovery["reason"] == "NodeLost"
    assert recovery["replicas"] == [1]
    assert "remote" not in status["lastRestore"]["tiers"]
    assert "neighbor" in status["lastRestore"]["tiers"]
    events = long_job.kube.run("get", "events", "-n", long_job.namespace, "-o", "json")
    assert "delete by force" in events
