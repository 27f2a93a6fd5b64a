"""A TrainingJob on this machine: observe, decide (the operator's own code), carry out.

One asyncio loop in the main thread. What is decided lies in `backstay_operator.decide`; what a
kubelet does, in `kubelet.py`; this module is the API server and the applier between them.
Generations are persisted before a pod is created.

The runner's own trouble (a full disk) never stops training: it is told once and tried again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from backstay_cli.errors import CommandError
from backstay_cli.local import machine, tree
from backstay_cli.local.census import Census, TrainerRoot, last_words
from backstay_cli.local.control import ControlServer, FailOrder, OrderReply
from backstay_cli.local.events import Event
from backstay_cli.local.failures import Failures
from backstay_cli.local.incidents import Incidents
from backstay_cli.local.kubelet import Host, Pod
from backstay_cli.local.logs import LogTail
from backstay_cli.local.machine import Nodes
from backstay_cli.local.opening import open_status
from backstay_cli.local.podspec import check_job
from backstay_cli.local.processes import living_shims
from backstay_cli.local.state import (
    LocalStatus,
    NodeRecord,
    StateFolder,
    announce,
    control_socket,
)
from backstay_cli.local.store import EmbeddedStore
from backstay_cli.local.telling import Telling
from backstay_cli.local.watch import LeaderWatch
from backstay_cli.local.wire import Wires
from backstay_operator.api import TrainingJob
from backstay_operator.api.names import SIDECAR, TRAINER
from backstay_operator.decide import (
    CreatePod,
    DeletePod,
    Observed,
    Outcome,
    Plan,
    conditions,
    decide,
)
from backstay_operator.settings import RestartSettings
from backstay_protocol.clock import Clock

_BUSY_SECONDS = 0.2  # between looks while something is being mended
_CALM_SECONDS = 0.5
_END_GRACE_SECONDS = 5.0
_STORE_AGAIN_SECONDS = 1.0


def _quick_restarts() -> RestartSettings:
    """As a cluster's, in a tenth of the time: a person sits in front of it."""
    return RestartSettings(
        first_backoff_seconds=1.0,
        most_backoff_seconds=30.0,
        calm_seconds=60.0,
        flush_seconds=120.0,
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How `backstay local run` was called."""

    grace_seconds: float = 15.0
    """For the last common save after Ctrl-C."""
    follow_logs: bool = False
    restarts: RestartSettings = field(default_factory=_quick_restarts)


class LocalRunner:
    """One run of `backstay local run`."""

    def __init__(
        self,
        job: TrainingJob,
        manifest: Path,
        state: StateFolder,
        options: RunOptions,
        emit: Callable[[Event], None],
        clock: Clock,
    ) -> None:
        """The state folder must be locked. Raises CommandError if the machine has no room."""
        machine.check_size(job)
        check_job(job)
        self._job = job
        self._state = state
        self._options = options
        self._emit = emit
        self._clock = clock
        self._tell = Telling(emit, clock)
        old = state.read()
        self._resumed = old is not None
        self._status = open_status(old, job, manifest, clock.time())
        machine.check_memory(job, self._status.uid)
        machine.check_addresses(self._status.hosts)
        self._nodes = Nodes(state, self._status.uid)
        self._pods: dict[int, Pod] = {}
        self._store: EmbeddedStore | None = None
        self._incidents = Incidents()
        self._census = Census()
        self._tail = LogTail(self._tell.log)
        self._told_large: set[int] = set()
        self._unwritten = False
        """Whether status.json lags behind `_status`."""

    # --- the whole ------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until the job is over or a signal comes; the exit code."""
        tree.become_subreaper()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._host = Host(
            emit=self._emit,
            wake=self._wake.set,
            ended=self._container_ended,
            node_alive=self._nodes.is_alive,
            settings=self._options.restarts,
            clock=self._clock,
        )
        self._listen_for_signals()
        self._state.write(self._status)
        announce(self._status, self._state)
        failures = Failures(self._pods, self._nodes, self._lose_node)
        self._failures = failures
        control = ControlServer(control_socket(self._status.uid), self._order)
        try:
            await control.start()
            return await self._run_job()
        finally:
            await control.close()
            await self._end_everything()

    async def _run_job(self) -> int:
        await self._start_store()
        self._tell.started(
            self._job,
            self._status,
            self._state,
            address=self._wires.leader_address,
            resumed=self._resumed,
        )
        first = self._status.record.first_generation
        host = self._status.hosts[0]
        self._leader = LeaderWatch(
            host, self._state.token(), first, self._incidents, self._emit, self._clock
        )
        try:
            self._adopt_pods()
            watching = self._host.spawn(self._look_again_and_again())
            outcome = await self._reconcile_until_over()
            watching.cancel()
            return self._tell_end(outcome)
        finally:
            await self._leader.close()

    def _tell_end(self, outcome: Outcome | None) -> int:
        if outcome is None:
            return self._tell.stopped(self._stopped_by)
        if not outcome.succeeded:
            return self._tell.failed(outcome, self._state)
        return self._tell.succeeded(outcome, self._leader.view)

    async def _reconcile_until_over(self) -> Outcome | None:
        """None: told to stop."""
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self._follow_logs()  # before a plan ends the pods whose last words these are
                outcome = await self._reconcile()
            except OSError as error:  # the next look, soon, finds what is still to be done
                self._tell.in_trouble("the runner could not carry out its plan", error)
            else:
                if outcome is not None:
                    return outcome
            await self._wake.wait()
        self._tell.say("info", "stopping: one last common save (Ctrl-C again to end at once)")
        try:
            await self._delete_pods(list(self._pods), self._options.grace_seconds)
        except OSError as error:
            self._tell.say("warning", f"not everything could be cleaned up: {error}")
        return None

    async def _end_everything(self) -> None:
        await asyncio.gather(*(pod.kill() for pod in self._pods.values()))
        await self._host.close()
        if self._store is not None:
            await self._store.stop()
        tree.kill_strays(living_shims())
        self._nodes.close()

    # --- start ------------------------------------------------------------------------------------

    async def _start_store(self) -> None:
        status = self._status
        if status.embedded:
            self._store = EmbeddedStore(
                folder=self._state.store,
                log=self._state.logs / "store.log",
                host=machine.store_host(status.uid),
                keys=self._state.store_keys(),
                on_exit=self._store_ended,
            )
            self._store.start()
            await self._store.ready(status.bucket, status.region, self._clock)
            self._status = replace(status, store_endpoint=self._store.endpoint)
            self._tell.store_started(self._store.endpoint, status.bucket)
        endpoint = self._store.endpoint if self._store is not None else ""
        grace = self._options.grace_seconds
        self._wires = Wires(self._job, status, self._state, self._nodes, endpoint, grace)

    def _store_ended(self) -> None:
        log = self._state.logs / "store.log"
        self._tell.say(
            "warning", f"the embedded store ended by itself; it starts again (see {log})"
        )
        self._restart_store()

    def _restart_store(self) -> None:
        if self._store is None or self._store.stopping:
            return
        try:
            self._store.start()
        except (OSError, CommandError) as error:
            self._tell.in_trouble("the embedded store could not be started", error)
            loop = asyncio.get_running_loop()
            loop.call_later(_STORE_AGAIN_SECONDS, self._restart_store)
        else:
            self._tell.is_well("the embedded store could not be started")

    def _adopt_pods(self) -> None:
        """Pods that a killed runner left behind exist still: their containers start in place."""
        for replica, generation in sorted(self._status.running.items()):
            pod = self._status.record.pods.get(replica)
            node = self._status.node_of(replica)
            if pod is None or pod.generation != generation or node is None:
                continue
            if not self._nodes.is_alive(node.name):
                continue
            self._nodes.create(node.name)
            plan = self._wires.old_pod(replica, generation, node.name)
            if plan is not None:
                self._pods[replica] = Pod(plan, self._host)
                self._pods[replica].start()

    # --- observe, decide, carry out ---------------------------------------------------------------

    async def _reconcile(self) -> Outcome | None:
        plan = decide(self._observed(), self._clock.time(), self._options.restarts)
        if plan.outcome is not None and plan.outcome.succeeded:
            await self._leader.poll()  # the newest word, before it is final
            plan = decide(self._observed(), self._clock.time(), self._options.restarts)
        found = tuple(
            {
                "type": c.type,
                "status": str(c.status),
                "reason": c.reason,
                "message": c.message,
            }
            for c in conditions(self._observed(), plan)
        )
        creates = any(isinstance(action, CreatePod) for action in plan.actions)
        before = self._status.record
        self._persist(replace(self._status, record=plan.record, conditions=found))
        if creates and self._unwritten:  # a generation must be durable before its pod exists
            self._status = replace(self._status, record=before)
            return None
        await self._carry_out(plan)
        self._tell.is_well("the runner could not carry out its plan")
        return plan.outcome

    def _observed(self) -> Observed:
        early, words = self._early_deaths()
        return Observed(
            job=self._job,
            record=self._status.record,
            pods=tuple(pod.state() for pod in self._pods.values()),
            leader=self._leader.facts(),
            early_deaths=early,
            early_death_words=words,
        )

    def _early_deaths(self) -> tuple[int, str]:
        """The most starts in a row that came to nothing, and what says why."""
        sidecars = {pod.sidecar_early_deaths: pod for pod in self._pods.values()}
        most, ranks = max(sidecars, default=0), self._census.early_deaths
        if most > ranks:
            words = self._last_words([sidecars[most]], SIDECAR)
            return most, f"the sidecar ends before it is up: {words}"
        words = self._last_words(self._pods.values(), TRAINER) if ranks else ""
        return ranks, f"the trainer ends before it calls restore(): {words}"

    def _last_words(self, pods: Iterable[Pod], container: str) -> str:
        logs = [s.log for pod in pods for s in pod.plan.containers if s.name == container]
        return next(filter(None, (last_words(Path(log)) for log in logs)), "see its log")

    def _persist(self, status: LocalStatus) -> None:
        """Write it, now or, if that fails, with the next one (see `_unwritten`)."""
        if status == self._status and not self._unwritten:
            return
        self._status, self._unwritten = status, True
        try:
            self._state.write(status)
        except OSError as error:
            self._tell.in_trouble("the job's status could not be written", error)
        else:
            self._unwritten = False
            self._tell.is_well("the job's status could not be written")

    async def _carry_out(self, plan: Plan) -> None:
        deletions = [a for a in plan.actions if isinstance(a, DeletePod)]
        for deletion in deletions:
            self._note_lost(deletion, plan)
        graceful = [a.replica for a in deletions if a.graceful]
        grace = _END_GRACE_SECONDS if plan.outcome else self._options.grace_seconds
        await self._delete_pods(graceful, grace)
        await self._delete_pods([a.replica for a in deletions if not a.graceful], 0)
        for action in plan.actions:
            if isinstance(action, CreatePod):
                self._create_pod(action)

    def _note_lost(self, action: DeletePod, plan: Plan) -> None:
        pod = self._pods.get(action.replica)
        if pod is None or plan.outcome is not None:
            return
        now = self._clock.time()
        self._incidents.noticed("pod", (action.replica,), now)
        self._tell.pod_lost(pod, action, now)

    async def _delete_pods(self, replicas: list[int], grace_seconds: float) -> None:
        pods = [self._pods.pop(replica) for replica in replicas if replica in self._pods]
        await asyncio.gather(*(pod.prepare_end(grace_seconds) for pod in pods))
        await asyncio.gather(*(pod.end(graceful=grace_seconds > 0) for pod in pods))
        for pod in pods:
            self._nodes.wipe_memory(pod.plan.node)
        left = {r: g for r, g in self._status.running.items() if r not in replicas}
        self._persist(replace(self._status, running=left))

    def _create_pod(self, action: CreatePod) -> None:
        replica = action.identity.replica
        node = self._place(replica)
        self._nodes.create(node)
        self._nodes.wipe_memory(node)  # a new pod's memory volume is empty
        plan = self._wires.new_pod(action.identity, node)
        pod = Pod(plan, self._host)
        if action.identity.replaces:
            old = self._wires.pod_name(replica, action.identity.replaces)
            self._tell.pod_replaced(pod, action, old)
        self._pods[replica] = pod
        pod.start()
        record = self._status.record
        created = replace(record.pods[replica], created=True)
        running = {**self._status.running, replica: action.identity.generation}
        self._persist(
            replace(self._status, record=record.with_pod(replica, created), running=running)
        )

    def _place(self, replica: int) -> str:
        """The node near the replica's old disk, if that lives; else a new one."""
        node = self._status.node_of(replica)
        if node is not None and self._nodes.is_alive(node.name):
            return node.name
        name = f"node-{self._status.next_node}"
        nodes = [
            n if n.replica != replica or n.lost else replace(n, lost="gone")
            for n in self._status.nodes
        ]
        self._persist(
            replace(
                self._status,
                nodes=(*nodes, NodeRecord(name=name, replica=replica)),
                next_node=self._status.next_node + 1,
            )
        )
        return name

    # --- looking again and again ------------------------------------------------------------------

    async def _look_again_and_again(self) -> None:
        while True:
            training = self._leader.view is not None and self._leader.view.phase == "Training"
            calm = training and not self._incidents.is_open
            await asyncio.sleep(_CALM_SECONDS if calm else _BUSY_SECONDS)
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - a look that fails must not be the last
                self._tell.in_trouble("the runner could not look at its pods", error)
            else:
                self._tell.is_well("the runner could not look at its pods")
            self._wake.set()

    async def _look(self) -> None:
        await self._leader.poll()
        self._take_census()
        self._look_at_memory()
        self._follow_logs()

    def _take_census(self) -> None:
        roots = {}
        for replica, pod in self._pods.items():
            process = pod.process(TRAINER)
            if process is not None:
                roots[replica] = TrainerRoot(
                    replica=replica,
                    shim=process.shim_pid,
                    memory=self._nodes.memory(pod.plan.node),
                    first_rank=replica * self._job.spec.processes_per_replica,
                )
        for death in self._census.look(roots):
            self._incidents.noticed("trainer", (death.replica,), self._clock.time())

    def _look_at_memory(self) -> None:
        """A folder in tmpfs has no quota: a volume beyond its limit is only told."""
        limit = self._job.spec.checkpoint.memory.size_limit_bytes
        for replica, pod in self._pods.items():
            used = machine.folder_bytes(self._nodes.memory(pod.plan.node))
            if used > limit and replica not in self._told_large:
                self._told_large.add(replica)
                self._tell.say(
                    "warning",
                    f"replica {replica}'s memory volume holds {used} bytes, more than "
                    f"spec.checkpoint.memory.sizeLimit ({limit}); a cluster would stop it there: "
                    f"write `sizeLimit: {-(-used * 11 // 10 >> 20)}Mi`",
                )

    def _follow_logs(self) -> None:
        if not self._options.follow_logs:
            return
        for replica, pod in self._pods.items():
            for spec in pod.plan.containers:
                self._tail.look(replica, spec.name, Path(spec.log))

    def _container_ended(self, replica: int, container: str, at: float) -> None:
        self._incidents.noticed("container", (replica,), at)

    # --- failures by order ------------------------------------------------------------------------

    async def _order(self, order: FailOrder) -> OrderReply:
        try:
            breakage = self._failures.prepare(order)
            at = self._clock.time()
            self._incidents.failed(order.failure, breakage.replicas, at)
            self._tell.failure_injected(order.failure, breakage, at)
            await breakage.act()
        except (CommandError, OSError) as error:
            return OrderReply(ok=False, text=str(error))
        if order.failure == "memory":  # the kubelet is the one that rebooted it
            self._incidents.noticed("memory", breakage.replicas, self._clock.time())
        self._wake.set()
        return OrderReply(ok=True, text=breakage.detail)

    def _lose_node(self, name: str) -> None:
        nodes = tuple(
            replace(n, lost="destroyed") if n.name == name else n for n in self._status.nodes
        )
        self._persist(replace(self._status, nodes=nodes))

    # --- signals ----------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        self._stopped_by = ""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_stop, number)

    def _told_to_stop(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            for shim in living_shims():
                os.kill(shim, signal.SIGTERM)
            return
        self._stopped_by = number.name
        self._stop.set()
        self._wake.set()
