"""The kubelet's part in a local run: one pod's containers, started, restarted in place, ended.

What follows an end is decided by `backstay_operator.decide.after_end`; this carries it out. All in
the loop of the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from backstay_cli.local import tree
from backstay_cli.local.events import (
    ContainerExited,
    ContainerStarted,
    Event,
    Notice,
    PodStarted,
)
from backstay_cli.local.processes import Exit, Process, ProcessSpec, living_shims
from backstay_operator.api.names import SIDECAR, TRAINER
from backstay_operator.decide import ContainerState, Ended, PodState, Restart, after_end
from backstay_operator.decide.containers import ended, started
from backstay_operator.settings import RestartSettings
from backstay_protocol.clock import Clock
from backstay_protocol.names import PORT_HEALTH, URL_HEALTHZ, URL_PRESTOP
from backstay_protocol.topology import PodIdentity

_PROBE_SECONDS = 0.1
_STARTUP_SECONDS = 90.0
_TERM_SECONDS = 10.0  # for a launcher to end its workers
_SIDECAR_SECONDS = 3.0
_AGAIN_SECONDS = 1.0  # after trouble of the machine, such as a full disk


@dataclass(frozen=True, kw_only=True)
class PodPlan:
    """Everything that is needed to run one pod here."""

    name: str
    identity: PodIdentity
    node: str
    host: str
    manifest: Mapping[str, Any]
    containers: tuple[ProcessSpec, ...]
    """The sidecar first."""


class Host:
    """What a pod needs of the runner."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        wake: Callable[[], None],
        ended: Callable[[int, str, float], None],
        node_alive: Callable[[str], bool],
        settings: RestartSettings,
        clock: Clock,
    ) -> None:
        """`wake`: something changed; `ended`: a container of a replica ended unexpectedly."""
        self.emit = emit
        self.wake = wake
        self.ended = ended
        self.node_alive = node_alive
        self.settings = settings
        self.clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def warn(self, text: str) -> None:
        """Tell of trouble that stops nothing."""
        self.emit(Notice(time=self.clock.time(), level="warning", text=text))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside; its failure is told, and stops nothing else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.warn(f"a part of the runner failed: {type(error).__name__}: {error}")
            self.wake()

    async def close(self) -> None:
        """Cancel what is still under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Pod:
    """One pod: its containers and what is known of them."""

    def __init__(self, plan: PodPlan, host: Host) -> None:
        """Nothing is started yet."""
        self.plan = plan
        self._host = host
        self._processes: dict[str, Process] = {}
        self._states = {
            spec.name: ContainerState(name=spec.name, running=False) for spec in plan.containers
        }
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._told_failed: set[str] = set()
        """Containers that could not be started, which was told."""
        self._holding = False  # nothing restarts by itself while the pod is being ended or rebooted
        self._ready = False
        self.sidecar_early_deaths = 0
        """Ends of the sidecar in a row before it was ever ready."""

    # --- what is known ----------------------------------------------------------------------------

    @property
    def replica(self) -> int:
        """Its replica."""
        return self.plan.identity.replica

    def state(self) -> PodState:
        """For `decide`."""
        alive = self._host.node_alive(self.plan.node)
        return PodState(
            replica=self.replica,
            generation=self.plan.identity.generation,
            node=self.plan.node,
            node_alive=alive,
            node_why="" if alive else "its folders were destroyed",
            trainer=self._states[TRAINER],
        )

    def process(self, container: str) -> Process | None:
        """The running process of a container."""
        found = self._processes.get(container)
        return found if found is not None and not found.ended.is_set() else None

    # --- starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the sidecar, then, when it is up, the rest."""
        self._host.emit(
            PodStarted(
                time=self._host.clock.time(),
                replica=self.replica,
                pod=self.plan.name,
                node=self.plan.node,
                generation=self.plan.identity.generation,
                address=self.plan.host,
            )
        )
        self._host.spawn(self._start_in_order())

    async def _start_in_order(self) -> None:
        self._holding = False
        first, *rest = self.plan.containers
        self._start_container(first)
        while True:
            try:
                up = await self._sidecar_up()
                break
            except OSError as error:  # no file descriptors for a client, say
                self._tell_failed(first.name, error)
                await asyncio.sleep(_AGAIN_SECONDS)
        if not up:
            return
        for spec in rest:
            self._start_container(spec)

    async def _sidecar_up(self) -> bool:
        """The startup probe; a sidecar that hangs is killed, and counts as an early death.

        False when the pod is being ended.
        """
        url = f"http://{self.plan.host}:{PORT_HEALTH}{URL_HEALTHZ}"
        hangs_at = self._host.clock.monotonic() + _STARTUP_SECONDS
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while not self._holding:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(url)).status_code == httpx.codes.OK:
                        self._ready, self.sidecar_early_deaths = True, 0
                        return not self._holding
                if self._host.clock.monotonic() > hangs_at:
                    hangs_at += _STARTUP_SECONDS
                    if (sidecar := self.process(SIDECAR)) is not None:
                        sidecar.kill()
                await asyncio.sleep(_PROBE_SECONDS)
        return False

    def _start_container(self, spec: ProcessSpec) -> None:
        self._timers.pop(spec.name, None)
        if self._holding or self.process(spec.name) is not None:
            return
        now = self._host.clock.time()
        try:
            process = Process(spec, lambda end: self._on_exit(spec, end))
        except OSError as error:
            self._tell_failed(spec.name, error)
            loop = asyncio.get_running_loop()
            again = loop.call_later(_AGAIN_SECONDS, self._start_container, spec)
            self._timers[spec.name] = again
            return
        self._told_failed.discard(spec.name)
        self._processes[spec.name] = process
        self._states[spec.name] = started(self._states[spec.name], now)
        self._host.emit(
            ContainerStarted(
                time=now,
                replica=self.replica,
                pod=self.plan.name,
                container=spec.name,
                restarts=self._states[spec.name].restarts,
            )
        )

    def _tell_failed(self, container: str, error: OSError) -> None:
        if container not in self._told_failed:
            self._told_failed.add(container)
            self._host.warn(
                f"replica {self.replica}: {container} could not be started: {error}; it is tried "
                "again"
            )

    # --- ends -------------------------------------------------------------------------------------

    def _on_exit(self, spec: ProcessSpec, end: Exit) -> None:
        with contextlib.suppress(OSError):  # the next end, or the runner's, finds them
            tree.kill_strays(living_shims())  # somebody may have killed the shim
        now = self._host.clock.time()
        over = Ended(exit_code=end.code, at=now, reason=end.reason)
        self._states[spec.name] = ended(self._states[spec.name], over, self._host.settings)
        follows = self._follow(spec, now)
        self._host.emit(
            ContainerExited(
                time=now,
                replica=self.replica,
                pod=self.plan.name,
                container=spec.name,
                exit_code=end.code,
                reason=end.reason,
                next=follows,
            )
        )
        self._host.wake()

    def _follow(self, spec: ProcessSpec, now: float) -> str:
        """Carry out what is decided about the end; in words."""
        if self._holding:
            return "its pod is being ended"
        state, is_sidecar = self._states[spec.name], spec.name == SIDECAR
        if is_sidecar and not self._ready:
            self.sidecar_early_deaths += 1
        if is_sidecar or (state.ended is not None and state.ended.exit_code):
            self._host.ended(self.replica, spec.name, now)
        if not self._host.node_alive(self.plan.node):
            return "its node is lost"
        decided = after_end(state, always=is_sidecar, settings=self._host.settings)
        if isinstance(decided, Restart):
            wait = max(0.0, decided.at - now)
            loop = asyncio.get_running_loop()
            self._timers[spec.name] = loop.call_later(wait, self._start_container, spec)
        return decided.why

    def _hold(self) -> None:
        self._holding = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def kill(self) -> None:
        """End all containers at once and for good."""
        self._hold()
        living = [p for p in self._processes.values() if not p.ended.is_set()]
        for process in living:
            process.kill()
        for process in living:
            await process.ended.wait()

    async def reboot(self, wipe: Callable[[], None]) -> None:
        """What its node's reboot does: all containers die, `wipe`, all start again, no backoff."""
        await self.kill()
        try:
            wipe()
        finally:  # a pod that is left down would be down for good
            for name, state in self._states.items():
                self._states[name] = replace(state, quick_ends=0)
            self._ready = False
            self._host.spawn(self._start_in_order())

    async def prepare_end(self, grace_seconds: float) -> None:
        """From now on nothing restarts; the trainer's preStop hook may take `grace_seconds`."""
        self._hold()
        if grace_seconds > 0 and self.process(TRAINER) is not None:
            await self._prestop(grace_seconds)

    async def end(self, graceful: bool) -> None:
        """As a deletion ends it: SIGTERM, the sidecar last; bounded."""
        self._hold()
        if graceful:
            users = [name for name in self._processes if name != SIDECAR]
            await self._stop(users, _TERM_SECONDS)
            await self._stop([SIDECAR], _SIDECAR_SECONDS)
        await self.kill()

    async def _stop(self, names: list[str], seconds: float) -> None:
        living = [found for name in names if (found := self.process(name)) is not None]
        await asyncio.gather(*(process.stop(seconds) for process in living))

    async def _prestop(self, grace_seconds: float) -> None:
        url = f"http://{self.plan.host}:{PORT_HEALTH}{URL_PRESTOP}"
        try:
            async with httpx.AsyncClient(timeout=grace_seconds, trust_env=False) as client:
                answer = await client.get(url)
                answer.raise_for_status()
        except (httpx.HTTPError, OSError) as error:
            why = str(error) or type(error).__name__
            self._host.warn(f"replica {self.replica}: no last common save: {why}")
