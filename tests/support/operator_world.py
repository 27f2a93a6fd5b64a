"""A cluster in memory with one job and an operator over it, for tests of whole passes."""

from __future__ import annotations

import copy
from typing import Any

from backstay_operator.api import Allowances
from backstay_operator.apply.applier import Applier, Surroundings
from backstay_operator.handlers.queue import WorkQueue
from backstay_operator.handlers.reconcile import Reconciler, Tools
from backstay_operator.handlers.watch import Hints
from backstay_operator.handlers.workers import Workers
from backstay_operator.metrics import Metrics
from backstay_operator.observe.reader import Reader
from backstay_operator.settings import ClusterSettings, SidecarSettings
from backstay_protocol.ids import first_attempt_of
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
