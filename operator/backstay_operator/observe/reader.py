"""One look at a job: LISTs, the leader's word, the persisted record. The only observer that asks.

Called by a worker at the start of each pass. Changes nothing but the job's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backstay_operator.api import TrainingJob
from backstay_operator.api.names import LABEL_JOB
from backstay_operator.cluster import POD, SECRET, Cluster, Tree
from backstay_operator.decide import (
    JobRecord,
    NodeState,
    Observed,
    PodState,
    drain_taint,
    note_choice,
    why_lost,
)
from backstay_operator.leaders import Leaders
from backstay_operator.manifests.cluster_pod import spec_digest
from backstay_operator.manifests.objects import owned_name, token_of
from backstay_operator.memory import JobMemory
from backstay_operator.observe.deaths import early_deaths, restarts
from backstay_operator.observe.leader import facts_of, missed_seconds
from backstay_operator.observe.nodes_book import NodesBook
from backstay_operator.observe.pods import (
    belongs_to,
    identity_of,
    is_flush_pod,
    kept_of,
    pod_state,
)
from backstay_operator.observe.record import read_record
from backstay_operator.settings import ClusterSettings
from backstay_protocol.clock import Clock
from backstay_protocol.messages import JobView, LastWord


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a pass works on."""

    tree: Tree
    """The TrainingJob, as it was read."""
    observed: Observed
    view: JobView | None
    pods: tuple[Tree, ...]
    """Those of this very job."""
    leader_host: str
    """IP of replica 0's pod; empty: it has none."""


class Reader:
    """Looks at jobs, one at a time."""

    def __init__(
        self, cluster: Cluster, leaders: Leaders, settings: ClusterSettings, clock: Clock
    ) -> None:
        """`settings`: how nodes are judged."""
        self._cluster = cluster
        self._leaders = leaders
        self._settings = settings
        self._clock = clock
        self._book = NodesBook(cluster, clock)

    async def look(self, tree: Tree, job: TrainingJob, memory: JobMemory) -> Seen:
        """Raises ClusterError."""
        selector = f"{LABEL_JOB}={job.name}"
        listed = await self._cluster.find(POD, job.namespace, selector)
        pods = tuple(p for p in listed if belongs_to(p, memory.uid) and identity_of(p) is not None)
        record = read_record(tree, pods)
        record = note_choice(record, job.spec.restore.choice, self._clock.time())
        host = _leader_host(pods, record)
        view = await self._ask_leader(job, host, memory)
        nodes = await self._nodes(job, pods)
        silent = self._silent(pods, view, memory)
        states = [(p, self._state(p, job, nodes, silent)) for p in pods]
        self._note_calm(pods, view, memory)
        deaths, words = early_deaths((p for p in pods if not is_flush_pod(p)), memory.calm_restarts)
        observed = Observed(
            job=job,
            record=record,
            pods=tuple(state for pod, state in states if not is_flush_pod(pod)),
            leader=facts_of(view),
            early_deaths=deaths,
            early_death_words=words,
            spec_digest=spec_digest(job),
            troubles=memory.troubles,
            last_word=last_word(pods, record),
            flushed=memory.flushed,
            flush_pods=tuple(state for pod, state in states if is_flush_pod(pod)),
        )
        return Seen(tree=tree, observed=observed, view=view, pods=pods, leader_host=host)

    async def _ask_leader(self, job: TrainingJob, host: str, memory: JobMemory) -> JobView | None:
        if not host:
            return None
        if not memory.token:
            name = owned_name(job.name)
            secret = await self._cluster.get(SECRET, job.namespace, name)
            memory.token = token_of(secret) if secret is not None else ""
        if not memory.token:
            return None
        view = await self._leaders.job(host, memory.token)
        if view is not None:
            memory.heard_at = self._clock.monotonic()
        return view

    async def _nodes(self, job: TrainingJob, pods: Iterable[Tree]) -> dict[str, NodeState]:
        names = {pod["spec"].get("nodeName") or "" for pod in pods} - {""}
        if not names:
            return {}
        return await self._book.nodes(names, _topology_key(job))

    def _state(
        self,
        pod: Tree,
        job: TrainingJob,
        nodes: dict[str, NodeState],
        silent: dict[str, float],
    ) -> PodState:
        name = pod["spec"].get("nodeName") or ""
        node, why = nodes.get(name), ""
        if name:
            why = why_lost(
                name,
                node,
                missed_seconds=silent.get(name, 0.0),
                limit_seconds=job.spec.node_lost_seconds or self._settings.node_lost_seconds,
                now=self._clock.time(),
            )
        domain = node.labels.get(_topology_key(job), "") if node is not None else ""
        drain = drain_taint(node, self._settings.drain_taints)
        return pod_state(pod, node_why=why, drain=drain, domain=domain)

    def _silent(
        self, pods: Iterable[Tree], view: JobView | None, memory: JobMemory
    ) -> dict[str, float]:
        """Node -> how long one of the job's pods there has been missed.

        By node: where the leader is lost, nobody says anything of those who were lost with it.
        """
        silent: dict[str, float] = {}
        for pod in pods:
            name = pod["spec"].get("nodeName") or ""
            silent[name] = max(silent.get(name, 0.0), self._missed(pod, view, memory))
        return silent

    def _missed(self, pod: Tree, view: JobView | None, memory: JobMemory) -> float:
        """Of the leader itself we know: it answers us, or not."""
        identity = identity_of(pod)
        assert identity is not None
        if identity[0] == 0:
            silent = self._clock.monotonic() - memory.heard_at
            return silent if view is None and memory.heard_at else 0.0
        return missed_seconds(view, *identity)

    def _note_calm(self, pods: tuple[Tree, ...], view: JobView | None, memory: JobMemory) -> None:
        training = view is not None and view.phase == "Training"
        if training or not memory.looked:
            memory.calm_restarts = restarts(pods)
        memory.looked = True


def _topology_key(job: TrainingJob) -> str:
    neighbor = job.spec.checkpoint.neighbor
    return neighbor.topology_key if neighbor is not None else ""


def _leader_host(pods: Iterable[Tree], record: JobRecord) -> str:
    """IP of replica 0's current pod, or of the flush pod that stands in for it."""
    current = record.pods.get(0)
    hosts = [""]
    for pod in pods:
        if current is None or identity_of(pod) != (0, current.generation):
            continue
        status = pod.get("status") or {}
        if status.get("phase") == "Running" and status.get("podIP"):
            hosts.append(str(status["podIP"]))
    return hosts[-1]


def last_word(pods: Iterable[Tree], record: JobRecord) -> LastWord | None:
    """What the sidecars of the current pods, or of their flush pods, said as they ended.

    A replaced pod may have spoken of an attempt that is no history any more.
    """
    current = set(record.generations.items())
    words = [
        word for pod in pods if identity_of(pod) in current and (word := kept_of(pod)) is not None
    ]
    if not words:
        return None
    return LastWord(
        newest_step=max(word.newest_step for word in words),
        durable_step=max(word.durable_step for word in words),
    )
