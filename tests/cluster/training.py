"""TrainingJobs that really train: their manifest, what tests look at, and how they are hurt.

For the tests of jobs; `long_job` (conftest.py) is one that never ends by itself.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.kube import Kube, Object, is_true
from cluster.object_store import Store

KIND = "trainingjob"
LABEL_JOB = "backstay.dev/job"
START_SECONDS = 240
RECOVER_SECONDS = 240
GONE_SECONDS = 30
OWNED = "pods,services,secrets,configmaps,poddisruptionbudgets,networkpolicies"
SECRET = "store-keys"
PORT_API, PORT_HEALTH = 7070, 7071
SMALL = ("--width=64", "--num-layers=2", "--num-heads=2", "--context-length=32")
ENDLESS = 1_000_000


@dataclass(frozen=True)
class Job:
    """A TrainingJob in the cluster."""

    kube: Kube
    namespace: str
    manifest: Object

    @property
    def name(self) -> str:
        """Its own and its run's."""
        return str(self.manifest["metadata"]["name"])

    def apply(self) -> None:
        """Make it, or make it as it was."""
        self.kube.apply(self.manifest, namespace=self.namespace)

    def delete(self) -> None:
        """As a person would; what is its own may go on for a while."""
        self.kube.delete(KIND, self.name, self.namespace)

    def set_spec(self, **fields: Any) -> None:
        """Change fields of the spec."""
        self.kube.patch(KIND, self.name, {"spec": fields}, self.namespace)

    # --- what there is ----------------------------------------------------------------------

    @property
    def tree(self) -> Object:
        """The object itself."""
        found = self.kube.get(KIND, self.name, self.namespace)
        assert found is not None, f"there is no job {self.name}"
        return found

    @property
    def status(self) -> Object:
        """Empty before the operator has looked at it."""
        return self.tree.get("status") or {}

    def objects(self) -> list[str]:
        """Kind and name of everything that is the job's own."""
        found = self.kube.list(OWNED, self.namespace, f"{LABEL_JOB}={self.name}")
        return sorted(f"{one['kind']}/{one['metadata']['name']}" for one in found)

    def pods(self) -> list[Object]:
        """All of them, those that end too."""
        return self.kube.list("pods", self.namespace, f"{LABEL_JOB}={self.name}")

    def pod(self, replica: int) -> Object:
        """The current pod of a replica."""
        found = [pod for pod in self.pods() if replica_of(pod) == replica]
        assert found, f"replica {replica} has no pod"
        return max(found, key=generation_of)

    def pod_name(self, replica: int) -> str:
        """Of its current pod."""
        return str(self.pod(replica)["metadata"]["name"])

    def node(self, replica: int) -> str:
        """Where its current pod runs."""
        return str(self.pod(replica)["spec"]["nodeName"])

    def replica_away_from(self, node: str) -> int:
        """A replica that runs on another node, the last of them."""
        found = [replica_of(pod) for pod in self.pods() if pod["spec"].get("nodeName") != node]
        assert found, f"all replicas run on {node}"
        return max(found)

    def restarts(self, replica: int, container: str) -> int:
        """Of one container in the replica's current pod."""
        status = self.pod(replica)["status"]
        every = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
        return next(int(one["restartCount"]) for one in every if one["name"] == container)

    def events(self) -> list[str]:
        """What its Events say."""
        found = self.kube.list("events.events.k8s.io", self.namespace)
        mine = (one for one in found if (one.get("regarding") or {}).get("name") == self.name)
        return [str(one.get("note", "")) for one in mine]

    # --- its API ----------------------------------------------------------------------------

    def token(self) -> str:
        """The bearer token of its API."""
        template = "go-template={{.data.token | base64decode}}"
        secret = f"{self.name}-backstay"
        return self.kube.run("get", "secret", secret, "-n", self.namespace, "-o", template)

    @contextmanager
    def port(self, replica: int, port: int) -> Iterator[str]:
        """A base URL by which a port of a replica's pod is reached for as long as the block."""
        pod = f"pod/{self.pod_name(replica)}"
        with self.kube.port_forward(self.namespace, pod, port) as local:
            yield f"http://127.0.0.1:{local}"

    def told(self, path: str) -> Object:
        """What the leader answers; AssertionError when it does not."""
        try:
            with self.port(0, PORT_API) as base:
                code, body = ask(f"{base}{path}", self.token())
        except OSError as error:
            raise AssertionError(f"the leader does not answer: {error}") from error
        assert code == 200, body
        found: Object = json.loads(body)
        return found

    def checkpoints(self) -> list[Object]:
        """All that the leader knows of."""
        return list(self.told("/v1/checkpoints")["checkpoints"])

    def running_attempt(self) -> int:
        """The one that trains, by the leader's own word: the operator may be dead. 0: none does."""
        view = self.told("/v1/job")
        return int(view["attempt"]) if view["phase"] == "Training" else 0

    # --- waiting ----------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], Any], timeout: float) -> Any:
        """Until the condition is true; what it returned."""
        return self.kube.wait(what, condition, timeout=timeout, namespace=self.namespace)

    def wait_training(self, after_attempt: int = 0, timeout: float = RECOVER_SECONDS) -> Object:
        """Until a newer attempt trains and has made a checkpoint durable; its status."""

        def trains() -> Object | None:
            status = self.status
            tree = {"status": status}
            newer = status.get("attempt", 0) > after_attempt
            going = is_true(tree, "Running") and is_true(tree, "Durable")
            ready = f"{self.manifest['spec']['replicas']}/{self.manifest['spec']['replicas']}"
            return status if newer and going and status.get("ready") == ready else None

        found: Object = self.wait(f"{self.name} trains anew", trains, timeout)
        return found

    def wait_durable(self, step: int, timeout: float = RECOVER_SECONDS) -> None:
        """Until a step beyond this one is durable."""
        self.wait(
            f"a step after {step} is durable",
            lambda: self.status.get("durableStep", 0) > step,
            timeout,
        )

    # --- hurting ----------------------------------------------------------------------------

    def kill_rank(self, replica: int, signal: str = "KILL") -> None:
        """A signal to the rank's process, which is torchrun's child."""
        self.kube.exec(
            self.namespace, self.pod_name(replica), "sh", "-c",
            "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | "
            f"grep -q '[-]u -m examples' && kill -{signal} ${{p#/proc/}}; done; true",
            container="trainer",
        )  # fmt: skip

    def end_container(self, replica: int, container: str) -> None:
        """SIGTERM to its first process."""
        pod = self.pod_name(replica)
        self.kube.exec(self.namespace, pod, "sh", "-c", "kill -TERM 1", container=container)


def replica_of(pod: Object) -> int:
    """Which replica a pod is, or was."""
    return int(pod["metadata"]["labels"]["backstay.dev/replica-index"])


def generation_of(pod: Object) -> int:
    """The number that a newer pod of the same replica has a greater one of."""
    return int(pod["metadata"]["labels"]["backstay.dev/generation"])


def node_number(node: str) -> int:
    """As the harness counts."""
    return int(node.removeprefix("node-"))


def last_recovery(status: Object, *reasons: str) -> Object:
    """The newest recovery, which must be of one of these kinds and tell its phases."""
    recovery: Object = status["recoveries"][-1]
    assert recovery["reason"] in reasons, recovery
    assert recovery["restoreSeconds"] > 0
    print(f"\nrecovery: {json.dumps(recovery)}")
    return recovery


def ask(url: str, token: str = "", method: str = "GET") -> tuple[int, str]:
    """Status code and body of an answer, whatever it is."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def char_gpt(num_steps: int) -> list[str]:
    """The command that trains a small char_gpt, about twenty steps a second."""
    return ["torchrun", "-m", "examples.char_gpt.train", f"--num-steps={num_steps}", *SMALL]


def counting(num_steps: int, seconds_per_step: float, exit_seconds: float) -> list[str]:
    """A command that only counts its steps; `exit_seconds`: how long it waits for its last save."""
    script = f"""
import time, torch, torch.distributed as dist, backstay
state = {{"count": torch.zeros(1000)}}
with backstay.Checkpointer(state, exit_timeout_seconds={exit_seconds}) as checkpointer:
    first = checkpointer.restore().step
    dist.init_process_group("gloo")
    for step in range(first, {num_steps}):
        time.sleep({seconds_per_step})
        dist.barrier()
        state["count"] += 1
        checkpointer.step(step + 1)
    assert int(state["count"][0]) == {num_steps}
"""
    return ["torchrun", "--no-python", "python3", "-u", "-c", script]


def manifest(
    name: str,
    image: str,
    store: Store,
    torch: str,
    *,
    num_steps: int = ENDLESS,
    command: list[str] | None = None,
    **spec: Any,
) -> Object:
    """A job of three replicas that trains, by default char_gpt.

    `torch`: folder of the nodes that has it; empty: the image has. `spec`: more fields, or others.
    """
    trainer = {
        "name": "trainer",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command or char_gpt(num_steps),
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    template = {
        "securityContext": {"runAsUser": 0},
        "affinity": {"podAntiAffinity": _apart(name)},
        "containers": [trainer],
    }
    if torch:
        mount_torch(template, torch)
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
                    "credentialsSecret": SECRET,
                    "everySteps": 50,
                },
            },
            **spec,
        },
    }


def mount_torch(template: Object, folder: str) -> None:
    """Show the nodes' packages to the trainer of a pod template."""
    template["volumes"] = [{"name": "torch", "hostPath": {"path": folder}}]
    mount = {"name": "torch", "mountPath": folder, "readOnly": True}
    template["containers"][0]["volumeMounts"] = [mount]


def _apart(name: str) -> Object:
    """A node for each where there are enough; preferred, since nodes are lost here."""
    term = {
        "labelSelector": {"matchLabels": {LABEL_JOB: name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 50, "podAffinityTerm": term}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
