"""One pass over one job: read, look, decide, write status, carry out, tell.

Called by a worker, never twice at once for one job. Every step can be repeated; what a pass could
not finish the next one does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from backstay_operator.api import Allowances, InvalidJob, TrainingJob, read_job
from backstay_operator.api.names import SIDECAR
from backstay_operator.apply.applier import Applier, durable_annotation
from backstay_operator.apply.recovery import with_restores
from backstay_operator.apply.status import build_status, refused_status
from backstay_operator.cluster import TRAINING_JOB, Cluster, Tree, belongs_to
from backstay_operator.decide import Condition, CreatePod, Plan, conditions, decide
from backstay_operator.decide.admission import accepted, refusal, refused
from backstay_operator.decide.live import placement_of, policy_change
from backstay_operator.handlers.failures import note_failure
from backstay_operator.handlers.queue import Key
from backstay_operator.handlers.tellings import tellings_of
from backstay_operator.leaders import Leaders
from backstay_operator.memory import JobMemory
from backstay_operator.metrics import Metrics
from backstay_operator.observe.pods import container_state, identity_of, is_flush_pod, kept_of
from backstay_operator.observe.reader import Reader, Seen
from backstay_operator.persisted import parse_record
from backstay_operator.settings import RestartSettings, SidecarSettings
from backstay_protocol.clock import Clock
from backstay_protocol.messages import Policy

WRITE_SECONDS = 2.0
ACTED_SECONDS = 1.0
BUSY_SECONDS = 2.0
REFUSED_SECONDS = 10.0
CALM_SECONDS = 5.0
MOST_CALM_SECONDS = 30.0
_JOBS_A_SECOND = 5.0
"""Looks at calm jobs a second, all together: each costs some calls of the API server's."""


def calm_seconds(jobs: int) -> float:
    """How long a job that trains is left alone, by how many there are."""
    return min(max(CALM_SECONDS, jobs / _JOBS_A_SECOND), MOST_CALM_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a pass works with."""

    cluster: Cluster
    reader: Reader
    applier: Applier
    leaders: Leaders
    allow: Allowances
    sidecar: SidecarSettings
    metrics: Metrics
    clock: Clock


class Reconciler:
    """Has the memory of every job."""

    def __init__(self, tools: Tools) -> None:
        """Knows no job yet."""
        self._tools = tools
        self._memories: dict[Key, JobMemory] = {}
        self.nodes: dict[Key, frozenset[str]] = {}
        """Where a job's pods ran when it was looked at last: hints of nodes go by it."""

    @property
    def known(self) -> int:
        """Number of jobs."""
        return len(self._memories)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._memories.pop(key, None)
        self.nodes.pop(key, None)

    def heard(self, key: Key, pod: Tree) -> None:
        """A watch brought a pod: if its sidecar has left a last word, remember it until the sidecar
        runs again.
        """
        memory, identity, word = self._memories.get(key), identity_of(pod), kept_of(pod)
        if memory is None or identity is None or not belongs_to(pod, memory.uid):
            return
        if word is not None:
            memory.last_words[identity] = word
        elif not is_flush_pod(pod) and container_state(pod, SIDECAR).running:
            memory.last_words.pop(identity, None)

    async def look(self, key: Key) -> float | None:
        """One pass; seconds until the next one, None: not by itself. Raises ClusterError."""
        tree = await self._tools.cluster.get(TRAINING_JOB, *key)
        if tree is None:
            self.forget(key)
            return None
        if tree["metadata"].get("deletionTimestamp"):
            return None  # its dependents go with it
        memory = self._memory(key, tree["metadata"]["uid"])
        try:
            job = read_job(_manifest(tree), self._tools.allow)
        except InvalidJob as error:
            return await self._refuse(tree, refused(error), memory)
        no = refusal(job, self._tools.sidecar.memory)
        if no is not None:
            return await self._refuse(tree, no, memory)
        return await self._work(key, tree, job, memory)

    def _memory(self, key: Key, uid: str) -> JobMemory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = JobMemory(uid=uid)
        return memory

    async def _refuse(self, tree: Tree, no: Condition, memory: JobMemory) -> float:
        status = refused_status(tree, [no], no.reason, self._tools.clock.time())
        await self._tools.applier.write_status(tree, status, memory, fenced=False)
        await self._tools.applier.tell(tree, tellings_of(no), memory)
        return MOST_CALM_SECONDS

    # --- a job that is taken ----------------------------------------------------------------------

    async def _work(
        self, key: Key, tree: Tree, job: TrainingJob, memory: JobMemory
    ) -> float | None:
        tools = self._tools
        seen = await tools.reader.look(tree, job, memory)
        self.nodes[key] = frozenset(pod.node for pod in seen.observed.pods if pod.node)
        now = tools.clock.time()
        plan = decide(seen.observed, now, _settings_of(job))
        note_failure(memory, seen, plan, now=now, monotonic=tools.clock.monotonic())
        status, restored = self._status(seen, plan, memory, now)
        fenced = bool(plan.actions) or plan.record != parse_record(_generations(tree))
        if fenced or tools.clock.monotonic() - memory.status_at >= WRITE_SECONDS:
            await tools.applier.write_status(tree, status, memory, fenced=fenced)
            if restored:
                memory.failure = None
        else:
            restored = ()
        await tools.applier.carry_out(job, plan, seen.pods, seen.leader_host, memory)
        told = tellings_of(plan, restored=restored, troubles=memory.troubles)
        await tools.applier.tell(tree, told, memory)
        self._count(plan)
        durable = durable_annotation(status)
        if durable is not None:
            await tools.applier.annotate(tree, *durable, memory)
        await self._tell_leader(tree, job, seen, memory)
        memory.phase = seen.view.phase if seen.view is not None else memory.phase
        current = set(plan.record.generations.items())
        memory.last_words = {i: w for i, w in memory.last_words.items() if i in current}
        return self._next(job, plan, memory, ending=bool(seen.pods))

    def _status(
        self, seen: Seen, plan: Plan, memory: JobMemory, now: float
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        told = (accepted(), *conditions(seen.observed, plan))
        ready = sum(p.trainer.running and not p.terminating for p in seen.observed.pods)
        status = build_status(seen.tree, seen.observed, plan, seen.view, told, ready=ready, now=now)
        if seen.view is None:
            return status, ()
        first = plan.record.first_generation
        return with_restores(status, seen.view, memory.failure, first)

    def _count(self, plan: Plan) -> None:
        for action in plan.actions:
            if isinstance(action, CreatePod) and action.identity.replaces:
                self._tools.metrics.replaced.labels(plan.reason).inc()

    async def _tell_leader(
        self, tree: Tree, job: TrainingJob, seen: Seen, memory: JobMemory
    ) -> None:
        """What the leader can't know: schedules that were changed on a running job, and where pods
        run. It shows what it goes by, so that it is told again after it was replaced.
        """
        view, leaders = seen.view, self._tools.leaders
        if view is None:
            return
        placement = placement_of(seen.observed)
        if placement is not None and placement != view.placement:
            await leaders.set_placement(seen.leader_host, memory.token, placement)
        if view.phase != "Training":
            return
        if view.policy is None:
            await self._tell_interval(tree, job, seen, memory)
        elif (change := policy_change(job.spec.checkpoint, view.policy)) is not None:
            await leaders.set_policy(seen.leader_host, memory.token, change)

    async def _tell_interval(
        self, tree: Tree, job: TrainingJob, seen: Seen, memory: JobMemory
    ) -> None:
        """A leader of protocol 1.0 takes the capture interval alone: it is told once a world."""
        steps, view = job.spec.checkpoint.memory.schedule.every_steps, seen.view
        if not steps or view is None or int(tree["metadata"].get("generation") or 1) < 2:
            return
        if memory.interval != (view.attempt, steps) and await self._tools.leaders.set_policy(
            seen.leader_host, memory.token, Policy(every_steps=steps)
        ):
            memory.interval = (view.attempt, steps)

    def _next(
        self, job: TrainingJob, plan: Plan, memory: JobMemory, *, ending: bool
    ) -> float | None:
        """`ending`: pods are there; of a suspended job, they bring their last save out."""
        record = plan.record
        if memory.troubles:
            return REFUSED_SECONDS
        if plan.actions:
            return ACTED_SECONDS
        if record.outcome:
            ttl = job.spec.ttl_seconds_after_finished
            if ttl is None:
                return None
            return max(1.0, record.ended_at + ttl - self._tools.clock.time())
        if job.spec.suspend:
            return BUSY_SECONDS if ending else MOST_CALM_SECONDS
        calm = memory.phase == "Training" and memory.failure is None
        return calm_seconds(self.known) if calm else BUSY_SECONDS


def _settings_of(job: TrainingJob) -> RestartSettings:
    return replace(
        RestartSettings(),
        flush_seconds=float(job.spec.final_save_seconds),
        early_deaths=job.spec.failure_policy.early_deaths,
    )


def _generations(tree: Tree) -> Tree:
    found: Tree = (tree.get("status") or {}).get("generations") or {}
    return found


def _manifest(tree: Tree) -> Tree:
    """What the reader of manifests takes: no status (it is ours)."""
    return {name: value for name, value in tree.items() if name != "status"}
