"""One look at a job: LISTs, the leader's word, the persisted record. The only observer that asks.

Called by a worker at the start of each pass. Changes nothing but the job's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from backstay_operator.api import TrainingJob, names
from backstay_operator.api.names import LABEL_JOB
from backstay_operator.cluster import BUDGET, POD, SECRET, TRAINING_JOB, Cluster, Tree, belongs_to
from backstay_operator.decide import (
    JobRecord,
    NodeState,
    Observed,
    PodState,
    drain_taint,
    note_choice,
    why_lost,
)
from backstay_operator.decide.conditions import REMOTE_REASONS
from backstay_operator.errors import Refused
from backstay_operator.leaders import Leaders
from backstay_operator.manifests.cluster_pod import spec_digest
from backstay_operator.manifests.objects import owned_name, token_of
from backstay_operator.memory import JobMemory
from backstay_operator.observe.budgets import foreign_budgets
from backstay_operator.observe.deaths import early_deaths, restarts
from backstay_operator.observe.leader import facts_of, missed_seconds
from backstay_operator.observe.nodes_book import NodesBook
from backstay_operator.observe.pods import identity_of, is_flush_pod, kept_of, pod_state
from backstay_operator.observe.record import read_record
from backstay_operator.persisted import parse_record
from backstay_operator.settings import ClusterSettings
from backstay_operator.times import seconds
from backstay_protocol.clock import Clock
from backstay_protocol.messages import JobView, LastWord
from backstay_protocol.round_events import STOOD_DOWN

BUDGETS_SECONDS = 60.0
"""How often other budgets of a job's namespace are looked for."""


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
        first = not (tree.get("status") or {}).get("generations")
        record = note_choice(record, job.spec.restore.choice, self._clock.time(), first=first)
        host = _leader_host(pods, record)
        view = await self._ask_leader(job, host, memory)
        nodes = await self._nodes(job, pods)
        silent = self._silent(pods, view, memory)
        states = [(p, self._state(p, job, nodes, silent)) for p in pods]
        self._note_calm(pods, view, memory)
        deaths, words = early_deaths((p for p in pods if _may_die_early(p)), memory.calm_restarts)
        observed = Observed(
            job=job,
            record=record,
            pods=tuple(state for pod, state in states if not is_flush_pod(pod)),
            leader=facts_of(view),
            early_deaths=deaths,
            early_death_words=words,
            spec_digest=spec_digest(job),
            troubles=memory.troubles,
            last_word=last_word(pods, record, memory.last_words),
            flushed=memory.flushed,
            flush_pods=tuple(state for pod, state in states if is_flush_pod(pod)),
            remote_trouble_since=self._trouble_since(tree, view, memory),
            foreign_budgets=await self._foreign_budgets(job, pods, memory),
            token_refused=view is None and bool(memory.token) and host in self._leaders.refused,
            run_users=await self._run_users(job, view, memory),
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

    def _trouble_since(self, tree: Tree, view: JobView | None, memory: JobMemory) -> float:
        """An operator that was restarted goes by the condition that the one before it wrote."""
        facts = facts_of(view)
        if facts is None:
            return memory.remote_trouble_since
        if not facts.remote_trouble:
            memory.remote_trouble_since = 0.0
        elif not memory.remote_trouble_since:
            memory.remote_trouble_since = _degraded_since(tree) or self._clock.time()
        return memory.remote_trouble_since

    async def _foreign_budgets(
        self, job: TrainingJob, pods: tuple[Tree, ...], memory: JobMemory
    ) -> tuple[str, ...]:
        now = self._clock.monotonic()
        if pods and now - memory.budgets_at >= BUDGETS_SECONDS:
            memory.budgets_at = now
            try:
                budgets = await self._cluster.find(BUDGET, job.namespace)
            except Refused:  # rights of an older chart: nothing is said of budgets
                budgets = []
            memory.foreign_budgets = foreign_budgets(budgets, pods, memory.uid)
        return memory.foreign_budgets

    async def _run_users(
        self, job: TrainingJob, view: JobView | None, memory: JobMemory
    ) -> tuple[str, ...]:
        """Asked only when it matters: before a run is taken over."""
        if view is None or view.code != STOOD_DOWN:
            return ()
        trees = await self._cluster.find(TRAINING_JOB, job.namespace)
        return run_users(trees, job.spec.checkpoint.run_name, memory.uid)

    async def _nodes(self, job: TrainingJob, pods: Iterable[Tree]) -> dict[str, NodeState]:
        wanted = {pod["spec"].get("nodeName") or "" for pod in pods} - {""}
        if not wanted:
            return {}
        return await self._book.nodes(wanted, _topology_key(job))

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


def _may_die_early(pod: Tree) -> bool:
    """Not one that failed as a whole: its successor begins with no restarts."""
    return not is_flush_pod(pod) and (pod.get("status") or {}).get("phase") != "Failed"


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


def run_users(jobs: Iterable[Tree], run_name: str, uid: str) -> tuple[str, ...]:
    """Jobs of the namespace that are not over and keep their checkpoints under that name too."""
    found = []
    for tree in jobs:
        metadata, spec = tree["metadata"], tree.get("spec") or {}
        named = (spec.get("checkpoint") or {}).get("runName") or metadata["name"]
        record = parse_record((tree.get("status") or {}).get("generations") or {})
        lives = record is not None and not record.outcome and not spec.get("suspend")
        if metadata["uid"] != uid and named == run_name and lives:
            found.append(str(metadata["name"]))
    return tuple(sorted(found))


def _degraded_since(tree: Tree) -> float:
    """When the condition that tells of the bucket became true; 0: it is not."""
    for one in (tree.get("status") or {}).get("conditions") or []:
        told = one.get("type") == names.DEGRADED and one.get("status") == "True"
        if told and one.get("reason") in REMOTE_REASONS.values():
            return seconds(one.get("lastTransitionTime"))
    return 0.0


def last_word(
    pods: Iterable[Tree],
    record: JobRecord,
    heard: Mapping[tuple[int, int], LastWord] | None = None,
) -> LastWord | None:
    """What the sidecars of the current pods, or of their flush pods, said as they ended.

    `heard`: words of pods that may be gone since. A replaced pod may have spoken of an attempt
    that is no history any more.
    """
    current = set(record.generations.items())
    words = [
        word for pod in pods if identity_of(pod) in current and (word := kept_of(pod)) is not None
    ]
    words += [word for identity, word in (heard or {}).items() if identity in current]
    if not words:
        return None
    return LastWord(
        newest_step=max(word.newest_step for word in words),
        durable_step=max(word.durable_step for word in words),
    )
