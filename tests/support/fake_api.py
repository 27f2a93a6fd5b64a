"""A cluster in memory at the operator's own interface, with a kubelet that does as it is told.

Holds what the operator leans on: names, uids, resourceVersions, ownership by fields of `status`,
grace. No schema, no admission, no garbage collection: the real cluster has those.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backstay_operator.api.names import LABEL_GENERATION, LABEL_JOB, LABEL_REPLICA, SIDECAR, TRAINER
from backstay_operator.cluster import NODE, POD, TRAINING_JOB, Kind, Tree
from backstay_operator.errors import AlreadyThere, Conflict, Refused
from backstay_operator.times import text_of
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    FlushReply,
    JobView,
    Placement,
    Policy,
    ReplicaView,
    RestoreView,
    TierState,
)

START = 1_800_000_000.0


class FakeClock:
    """Stands still but for `pass_time`."""

    def __init__(self) -> None:
        self.now = START

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class FakeCluster:
    """`cluster.Cluster`. `calls` holds what was asked, in order; `before` may raise."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.objects: dict[tuple[str, str, str], Tree] = {}
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None
        self._numbers = itertools.count(1)

    # --- the interface --------------------------------------------------------------------------

    async def find(self, kind: Kind, namespace: str = "", selector: str = "") -> list[Tree]:
        self._note(f"find {kind.kind}")
        label, _, value = selector.partition("=")
        return [
            copy.deepcopy(tree)
            for (of_kind, space, _), tree in self.objects.items()
            if of_kind == kind.kind
            and namespace in ("", space)
            and (not label or (tree["metadata"].get("labels") or {}).get(label) == value)
        ]

    async def get(self, kind: Kind, namespace: str, name: str) -> Tree | None:
        self._note(f"get {kind.kind} {name}")
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def create(self, kind: Kind, body: Tree) -> Tree:
        name = body["metadata"]["name"]
        self._note(f"create {kind.kind} {name}")
        if self._key(kind, body) in self.objects:
            raise AlreadyThere(f"create {kind.kind}: {name} already exists")
        return self._put(kind, {**body, "metadata": {**body["metadata"], "uid": self._uid()}})

    async def replace(self, kind: Kind, body: Tree) -> Tree:
        self._note(f"replace {kind.kind} {body['metadata']['name']}")
        self._check_version(kind, body)
        return self._put(kind, body)

    async def apply(self, kind: Kind, body: Tree, *, status: bool = False) -> Tree:
        what = "status of " if status else ""
        self._note(f"apply {what}{kind.kind} {body['metadata']['name']}")
        self._check_version(kind, body)
        old = self.objects.get(self._key(kind, body))
        if status:
            if old is None:
                raise Refused(f"apply {kind.kind}: not found")
            return self._put(kind, {**old, "status": copy.deepcopy(body["status"])})
        uid = old["metadata"]["uid"] if old else self._uid()
        return self._put(kind, {**body, "metadata": {**body["metadata"], "uid": uid}})

    async def merge(self, kind: Kind, namespace: str, name: str, body: Tree) -> Tree | None:
        self._note(f"merge {kind.kind} {name}")
        old = self.objects.get((kind.kind, namespace, name))
        if old is None:
            return None
        uid = body.get("metadata", {}).get("uid")
        if uid and uid != old["metadata"]["uid"]:
            raise Conflict("merge: another uid")
        return self._put(kind, _merged(old, body))

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> bool:
        how = "" if grace_seconds is None else f" within {grace_seconds} s"
        self._note(f"delete {kind.kind} {name}{how}")
        old = self.objects.get((kind.kind, namespace, name))
        if old is None or old["metadata"]["uid"] != uid:
            return False
        if kind is POD and grace_seconds != 0:
            old["metadata"].setdefault("deletionTimestamp", text_of(self.clock.now))
            return True
        del self.objects[kind.kind, namespace, name]
        return True

    # --- what people, kubelet and scheduler do ----------------------------------------------------

    def add_job(self, manifest: Tree) -> Tree:
        """`kubectl apply` of a new job."""
        tree = copy.deepcopy(manifest)
        tree["metadata"] |= {
            "uid": self._uid(),
            "generation": 1,
            "creationTimestamp": text_of(self.clock.now),
        }
        return self._put(TRAINING_JOB, tree)

    def edit_job(self, name: str, change: Tree) -> None:
        """`kubectl patch` of its spec."""
        old = next(t for (k, _, n), t in self.objects.items() if (k, n) == ("TrainingJob", name))
        new = _merged(old, change)
        new["metadata"]["generation"] += 1
        self._put(TRAINING_JOB, new)

    def add_node(self, name: str, zone: str = "") -> None:
        """A node that is Ready."""
        labels = {"topology.kubernetes.io/zone": zone} if zone else {}
        self._put(
            NODE,
            {
                "metadata": {"name": name, "labels": labels, "uid": self._uid()},
                "spec": {},
                "status": {"conditions": [self._ready("True")]},
            },
        )

    def lose_node(self, name: str) -> None:
        """Its kubelet is silent."""
        self.objects["Node", "", name]["status"]["conditions"] = [self._ready("Unknown")]

    def taint_node(self, name: str, key: str) -> None:
        """`kubectl cordon`, or an autoscaler."""
        taints = self.objects["Node", "", name]["spec"].setdefault("taints", [])
        taints.append({"key": key, "effect": "NoSchedule"})

    def pods(self) -> list[Tree]:
        """All, by name."""
        found = [t for (kind, _, _), t in self.objects.items() if kind == "Pod"]
        return sorted(found, key=lambda tree: tree["metadata"]["name"])

    def pod_of(self, replica: int) -> Tree:
        """Its newest pod."""
        return max(
            (p for p in self.pods() if _label(p, LABEL_REPLICA) == str(replica)),
            key=lambda p: int(_label(p, LABEL_GENERATION)),
        )

    def run_pods(self) -> None:
        """Scheduler and kubelets: new pods run, those that were told to end are gone."""
        for tree in self.pods():
            metadata = tree["metadata"]
            if metadata.get("deletionTimestamp"):
                del self.objects["Pod", metadata["namespace"], metadata["name"]]
            elif not tree["spec"].get("nodeName"):
                replica = int(_label(tree, LABEL_REPLICA))
                tree["spec"]["nodeName"] = self._node_for(replica)
                self.set_running(tree, f"10.0.0.{replica + 1}")
            elif "status" not in tree:
                self.set_running(tree, "10.0.0.99")

    def set_running(self, tree: Tree, address: str) -> None:
        """Every container runs."""
        running = {"running": {"startedAt": text_of(self.clock.now)}}
        names = [c["name"] for c in tree["spec"]["containers"]]
        sides = [c["name"] for c in tree["spec"].get("initContainers") or []]
        tree["status"] = {
            "phase": "Running",
            "podIP": address,
            "containerStatuses": [_container(name, running) for name in names],
            "initContainerStatuses": [_container(name, running) for name in sides],
        }

    def end_trainer(self, tree: Tree, exit_code: int, *, restarts: int = 0) -> None:
        """The trainer has ended and is not running."""
        ended = {"terminated": self._end(exit_code)}
        tree["status"]["containerStatuses"] = [_container(TRAINER, ended, restarts)]

    def finish_pod(self, tree: Tree, word: str = "") -> None:
        """All containers have ended well; the sidecar leaves a termination message."""
        self.end_trainer(tree, 0)
        ended = {"terminated": {**self._end(0), "message": word}}
        tree["status"]["phase"] = "Succeeded"
        kind = "initContainerStatuses" if tree["spec"].get("initContainers") else ""
        tree["status"][kind or "containerStatuses"] = [_container(SIDECAR, ended)]

    def fail_pod(self, tree: Tree, reason: str) -> None:
        """Evicted, or the like."""
        tree["status"] = {"phase": "Failed", "reason": reason, "message": "the node was low"}

    def events(self) -> list[Tree]:
        """What people were told."""
        return [t for (kind, _, _), t in self.objects.items() if kind == "Event"]

    # --- inside -----------------------------------------------------------------------------------

    def _node_for(self, replica: int) -> str:
        ready = [
            name
            for (kind, _, name), tree in sorted(self.objects.items())
            if kind == "Node"
            and tree["status"]["conditions"][0]["status"] == "True"
            and not tree["spec"].get("taints")
        ]
        return ready[replica % len(ready)]

    def _ready(self, status: str) -> Tree:
        at = text_of(self.clock.now)
        return {"type": "Ready", "status": status, "lastTransitionTime": at}

    def _end(self, exit_code: int) -> Tree:
        reason = "Completed" if exit_code == 0 else "Error"
        at = text_of(self.clock.now)
        return {"exitCode": exit_code, "finishedAt": at, "reason": reason}

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)

    def _uid(self) -> str:
        return f"uid-{next(self._numbers)}"

    def _key(self, kind: Kind, body: Tree) -> tuple[str, str, str]:
        metadata = body["metadata"]
        return kind.kind, metadata.get("namespace", ""), metadata["name"]

    def _put(self, kind: Kind, body: Tree) -> Tree:
        tree = copy.deepcopy(body)
        tree["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.objects[self._key(kind, tree)] = tree
        return copy.deepcopy(tree)

    def _check_version(self, kind: Kind, body: Tree) -> None:
        version = body["metadata"].get("resourceVersion")
        old = self.objects.get(self._key(kind, body))
        if version and old is not None and old["metadata"]["resourceVersion"] != version:
            raise Conflict(f"{kind.kind}: the object has been modified")


class FakeLeaders:
    """`leaders.Leaders`: one leader, as it is set up."""

    def __init__(self) -> None:
        self.view: JobView | None = None
        self.flush_reply: FlushReply | None = None
        self.flushes = 0
        self.policies: list[Policy] = []
        self.placements: list[Placement] = []
        self.refused: set[str] = set()

    async def job(self, host: str, token: str) -> JobView | None:
        return self.view if host and token else None

    async def flush(self, host: str, token: str) -> FlushReply | None:
        self.flushes += 1
        return self.flush_reply

    async def set_policy(self, host: str, token: str, policy: Policy) -> bool:
        self.policies.append(policy)
        if self.view is not None and self.view.policy is not None:
            tiers = {**self.view.policy.tiers, **policy.tiers}
            self.view = replace(self.view, policy=Policy(tiers=tiers))
        return True

    async def set_placement(self, host: str, token: str, placement: Placement) -> bool:
        self.placements.append(placement)
        if self.view is not None:
            self.view = replace(self.view, placement=placement)
        return True


def view_of(
    cluster: FakeCluster,
    *,
    phase: str = "Training",
    attempt: int,
    step: int = 50,
    newest: int = 40,
    durable: int = 40,
    restores: tuple[RestoreView, ...] = (),
    silent: dict[int, float] | None = None,
) -> JobView:
    """A leader's view of the pods that the cluster has."""
    found = [
        ReplicaView(
            replica=int(_label(p, LABEL_REPLICA)),
            generation=int(_label(p, LABEL_GENERATION)),
            address="",
            seen_seconds_ago=(silent or {}).get(int(_label(p, LABEL_REPLICA)), 0.1),
        )
        for p in cluster.pods()
        if LABEL_JOB in (p["metadata"].get("labels") or {})
    ]
    remote = TierState(
        tier="remote", newest=CheckpointId(durable, attempt), newest_time=cluster.clock.now - 3
    )
    memory = TierState(tier="memory", newest=CheckpointId(newest, attempt))
    return JobView(
        run="team/gpt",
        attempt=attempt,
        phase=phase,
        message="",
        step=step,
        replicas=tuple(found),
        tiers=(memory, remote),
        restores=restores,
        newest_durable=CheckpointId(durable, attempt),
    )


def restore_of(
    attempt: int,
    finished: float,
    *,
    base: int = 0,
    stopped: float = 0.0,
    joined: float = 0.0,
    **tiers: int,
) -> RestoreView:
    """One restore, as the leader tells it."""
    return RestoreView(
        attempt=attempt,
        base=CheckpointId(base, attempt - 1) if base else None,
        finished=finished,
        seconds=2.0,
        bytes_by_tier=tiers,
        lost_steps=1,
        stopped=stopped,
        joined=joined,
    )


def _container(name: str, state: Tree, restarts: int = 0) -> Tree:
    return {"name": name, "state": state, "restartCount": restarts, "ready": "running" in state}


def _label(tree: Tree, name: str) -> str:
    return str((tree["metadata"].get("labels") or {}).get(name, ""))


def _merged(old: Any, change: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    result = copy.deepcopy(old)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result
