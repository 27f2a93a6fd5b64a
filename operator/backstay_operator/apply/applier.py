"""The one place that changes the cluster: objects of a job, its pods, its status, its Events.

Called by a worker, for one job at a time. Creates with fixed names, deletes with uid, writes status
with the resourceVersion that the decision was made on; each step can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from backstay_operator.api import TrainingJob
from backstay_operator.api.job import PVC
from backstay_operator.api.names import API_VERSION, KIND, LABEL_JOB
from backstay_operator.apply.events import Telling, build_event, due
from backstay_operator.apply.refusals import trouble_of
from backstay_operator.apply.tokens import Tokens
from backstay_operator.cluster import (
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    EVENT,
    NETWORK_POLICY,
    POD,
    SERVICE,
    TRAINING_JOB,
    Cluster,
    Kind,
    Tree,
    belongs_to,
)
from backstay_operator.decide import (
    CreateFlushPod,
    CreatePod,
    DeleteJob,
    DeletePod,
    Flush,
    Flushed,
    JobRecord,
    Plan,
    Trouble,
    chosen,
)
from backstay_operator.errors import AlreadyThere, ClusterError, Conflict, Refused
from backstay_operator.leaders import Leaders
from backstay_operator.manifests import Addresses, Wiring, build_topology
from backstay_operator.manifests.cluster_pod import build_cluster_pod, build_flush_pod
from backstay_operator.manifests.objects import (
    build_claim,
    build_config_map,
    build_disruption_budget,
    build_network_policy,
    build_service,
)
from backstay_operator.manifests.wiring import pod_name
from backstay_operator.memory import JobMemory
from backstay_operator.settings import SidecarSettings
from backstay_operator.times import text_of
from backstay_protocol.clock import Clock

APPLY_AGAIN_SECONDS = 300.0
ANNOTATE_SECONDS = 30.0
_RELEASED = f"{LABEL_JOB}-released"
ANNOTATION_STEP = "backstay.dev/last-durable-step"
ANNOTATION_TIME = "backstay.dev/last-durable-time"
ANNOTATION_VOLCANO = "volcano.sh/last-checkpoint-time"

log = logging.getLogger("backstay.apply")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is the same for all jobs."""

    cluster_name: str
    operator_namespace: str
    instance: str
    """Name of this operator's pod."""
    sidecar: SidecarSettings
    key_secret: str = "backstay-operator-key"
    """Secret in the operator's namespace that jobs' tokens are made from."""


class Applier:
    """Carries plans out."""

    def __init__(
        self, cluster: Cluster, leaders: Leaders, around: Surroundings, clock: Clock
    ) -> None:
        """Changes nothing yet."""
        self._cluster = cluster
        self._leaders = leaders
        self._around = around
        self._clock = clock
        self._tokens = Tokens(cluster, around.operator_namespace, around.key_secret)

    # --- status -----------------------------------------------------------------------------------

    async def write_status(
        self, tree: Tree, status: dict[str, Any], memory: JobMemory, *, fenced: bool
    ) -> None:
        """One write, if it says something new. `fenced`: only on what was read. Raises Conflict."""
        if _but_ages(status) == _but_ages(tree.get("status") or {}):
            return
        metadata = {
            "name": tree["metadata"]["name"],
            "namespace": tree["metadata"]["namespace"],
        }
        if fenced:
            metadata["resourceVersion"] = tree["metadata"]["resourceVersion"]
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
        await self._cluster.apply(TRAINING_JOB, body, status=True)
        memory.status_at = self._clock.monotonic()

    async def tell(self, tree: Tree, tellings: Iterable[Telling], memory: JobMemory) -> None:
        """Events, after the status was written. One that can't be written is only logged."""
        now = self._clock.monotonic()
        for telling, swallowed in due(tellings, memory.told, now):
            event = build_event(
                tree,
                telling,
                swallowed,
                instance=self._around.instance,
                now=self._clock.time(),
            )
            try:
                await self._cluster.create(EVENT, event)
            except ClusterError as error:
                log.warning("an Event could not be written: %s", error)

    async def annotate(self, tree: Tree, step: int, at: str, memory: JobMemory) -> None:
        """Last durable step and time for schedulers, at most every ANNOTATE_SECONDS."""
        now, value = self._clock.monotonic(), f"{step}@{at}"
        if value == memory.annotated or now - memory.annotated_at < ANNOTATE_SECONDS:
            return
        memory.annotated_at = now
        annotations = {ANNOTATION_STEP: str(step), ANNOTATION_TIME: at, ANNOTATION_VOLCANO: at}
        metadata = tree["metadata"]
        body = {"metadata": {"annotations": annotations}}
        try:
            await self._cluster.merge(TRAINING_JOB, metadata["namespace"], metadata["name"], body)
        except ClusterError as error:
            log.warning("the job could not be annotated: %s", error)
        else:
            memory.annotated = value

    # --- plans ------------------------------------------------------------------------------------

    async def carry_out(
        self,
        job: TrainingJob,
        plan: Plan,
        pods: Sequence[Tree],
        leader_host: str,
        memory: JobMemory,
    ) -> None:
        """All actions, in order: deletions, then objects, then creations.

        What is refused becomes the job's troubles. Raises ClusterError.
        """
        troubles: list[Trouble] = []
        deletions = [a for a in plan.actions if isinstance(a, DeletePod)]
        await asyncio.gather(*(self._delete_pod(job, a, pods) for a in deletions))
        creations = [a for a in plan.actions if isinstance(a, CreatePod)]
        flushers = [a for a in plan.actions if isinstance(a, CreateFlushPod)]
        if not plan.record.outcome:
            wiring = self._wiring(job, plan.record, memory.uid)
            leader = _leader_pod(job, plan.record, pods)
            troubles += await self._ensure_objects(
                job, wiring, memory, leader, now=bool(creations or flushers)
            )
            if not troubles:
                found = await asyncio.gather(
                    *(self._create_pod(job, a, wiring) for a in creations),
                    *(self._create_flush_pod(job, a, wiring) for a in flushers),
                )
                troubles += [trouble for trouble in found if trouble is not None]
        memory.troubles = tuple(troubles)
        for action in plan.actions:
            if isinstance(action, Flush):
                await self._flush(action, leader_host, memory)
            elif isinstance(action, DeleteJob):
                await self._delete_job(job, action, memory)

    def _wiring(self, job: TrainingJob, record: JobRecord, uid: str) -> Wiring:
        return Wiring(
            uid=uid,
            cluster=self._around.cluster_name,
            addresses=Addresses.in_cluster(job.name, job.spec.replicas, uid),
            first_generation=record.first_generation,
            restore=chosen(job.spec.restore, record),
            sidecar=self._around.sidecar,
        )

    # --- objects ----------------------------------------------------------------------------------

    async def _ensure_objects(
        self,
        job: TrainingJob,
        wiring: Wiring,
        memory: JobMemory,
        leader: Tree | None,
        *,
        now: bool,
    ) -> list[Trouble]:
        """Apply what changed, and all of it every few minutes: somebody may have touched it."""
        uid = memory.uid
        objects: list[tuple[Kind, dict[str, Any]]] = [
            (SERVICE, build_service(job, uid, leader)),
            (CONFIG_MAP, build_config_map(job, uid, build_topology(job, wiring))),
            (BUDGET, build_disruption_budget(job, uid)),
            (NETWORK_POLICY, build_network_policy(job, uid, self._around.operator_namespace)),
        ]
        due_again = self._clock.monotonic() - memory.applied_at > APPLY_AGAIN_SECONDS
        if due_again or not memory.applied_at:
            memory.applied = {}
        try:
            if now or due_again or not memory.token:
                memory.token = await self._tokens.ensure(job, uid, memory.token)
            for kind, body in objects:
                digest = _digest(body)
                if memory.applied.get(kind.kind) == digest:
                    continue
                await self._cluster.apply(kind, body)
                memory.applied[kind.kind] = digest
            if now:
                await self._ensure_claims(job)
        except Refused as error:
            return [trouble_of(str(error))]
        if due_again or not memory.applied_at:
            memory.applied_at = self._clock.monotonic()
        return []

    async def _ensure_claims(self, job: TrainingJob) -> None:
        local = job.spec.checkpoint.local
        if local is None or local.volume != PVC:
            return
        for replica in range(job.spec.replicas):
            try:
                await self._cluster.create(CLAIM, build_claim(job, local, replica))
            except AlreadyThere:
                continue

    # --- pods -------------------------------------------------------------------------------------

    async def _create_pod(
        self, job: TrainingJob, action: CreatePod, wiring: Wiring
    ) -> Trouble | None:
        body = build_cluster_pod(job, action.identity, wiring, near_node=action.near_node)
        about = {"replica": action.identity.replica}
        log.info("create pod %s: %s", body["metadata"]["name"], action.why, extra=about)
        return await self._create(job, body, wiring.uid)

    async def _create_flush_pod(
        self, job: TrainingJob, action: CreateFlushPod, wiring: Wiring
    ) -> Trouble | None:
        body = build_flush_pod(job, action.identity, wiring, action.node)
        return await self._create(job, body, wiring.uid)

    async def _create(self, job: TrainingJob, body: dict[str, Any], uid: str) -> Trouble | None:
        try:
            await self._cluster.create(POD, body)
        except AlreadyThere:
            name = body["metadata"]["name"]
            found = await self._cluster.get(POD, job.namespace, name)
            if found is not None and not belongs_to(found, uid):
                return trouble_of(f"a pod {name} of somebody else is in the way; delete it")
        except Conflict as error:  # the namespace's quota was changed under it: again, soon
            return trouble_of(str(error))
        except Refused as error:
            return trouble_of(str(error))
        return None

    async def _delete_pod(self, job: TrainingJob, action: DeletePod, pods: Sequence[Tree]) -> None:
        name = pod_name(job.name, action.replica, action.generation)
        name += "-flush" if action.flush else ""
        found = next((pod for pod in pods if pod["metadata"]["name"] == name), None)
        if found is None:
            return
        uid = found["metadata"]["uid"]
        log.info("delete pod %s: %s", name, action.why, extra={"replica": action.replica})
        if action.graceful:
            await self._cluster.delete(POD, job.namespace, name, uid=uid)
            return
        # Out of Service, budget and policy at once: its name may live on while its node is away.
        labels = {LABEL_JOB: None, _RELEASED: job.name}
        body = {"metadata": {"uid": uid, "labels": labels}}
        try:
            await self._cluster.merge(POD, job.namespace, name, body)
        except Conflict:
            return  # another pod has the name by now
        await self._cluster.delete(POD, job.namespace, name, uid=uid, grace_seconds=0)

    # --- others -----------------------------------------------------------------------------------

    async def _flush(self, action: Flush, leader_host: str, memory: JobMemory) -> None:
        if not leader_host or not memory.token:
            return
        answer = await self._leaders.flush(leader_host, memory.token)
        if answer is not None:
            memory.flushed = Flushed(
                asked_at=action.since,
                step=answer.step,
                durable=answer.durable,
                message=answer.message,
            )

    async def _delete_job(self, job: TrainingJob, action: DeleteJob, memory: JobMemory) -> None:
        log.info("delete the job: %s", action.why)
        await self._cluster.delete(TRAINING_JOB, job.namespace, job.name, uid=memory.uid)


def durable_annotation(status: dict[str, Any]) -> tuple[int, str] | None:
    """Step and time of the last durable checkpoint that a status names."""
    if "durableStep" not in status:
        return None
    return int(status["durableStep"]), str(status.get("durableTime") or text_of(0))


def _but_ages(tree: Any) -> Any:
    """Without what changes by itself: a write for an older age alone would be one a pass."""
    if isinstance(tree, dict):
        return {name: _but_ages(value) for name, value in tree.items() if name != "ageSeconds"}
    return [_but_ages(value) for value in tree] if isinstance(tree, list) else tree


def _digest(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _leader_pod(job: TrainingJob, record: JobRecord, pods: Sequence[Tree]) -> Tree | None:
    known = record.pods.get(0)
    name = pod_name(job.name, 0, known.generation) if known is not None else ""
    return next((pod for pod in pods if pod["metadata"]["name"] == name), None)
