"""What the local runner says of a job: its events, in words, and each trouble once.

The runner calls it; what is shown, and how, is up to who takes the events (`account.py`). It
decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from backstay_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from backstay_cli.local.events import (
    Event,
    FailureInjected,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSucceeded,
    Log,
    Notice,
    PodLost,
    PodReplaced,
    StoreStarted,
)
from backstay_cli.local.failures import Breakage
from backstay_cli.local.kubelet import Pod
from backstay_cli.local.state import LocalStatus, StateFolder
from backstay_operator.api import TrainingJob
from backstay_operator.decide import CreatePod, DeletePod, Outcome
from backstay_protocol.clock import Clock
from backstay_protocol.messages import JobView


class Telling:
    """One per run."""

    def __init__(self, emit: Callable[[Event], None], clock: Clock) -> None:
        """`emit` takes every event, in order."""
        self._emit = emit
        self._clock = clock
        self._begun = clock.time()
        self._troubles: set[str] = set()
        """What is in trouble now, and was told."""

    # --- words ----------------------------------------------------------------------------------

    def say(self, level: str, text: str) -> None:
        """A sentence: `info` or `warning`."""
        self._emit(Notice(time=self._clock.time(), level=level, text=text))

    def in_trouble(self, what: str, error: Exception) -> None:
        """Tell it once, until it is well again."""
        if what not in self._troubles:
            self._troubles.add(what)
            why = str(error) or type(error).__name__
            self.say("warning", f"{what}: {why}; training goes on, and it is tried again")

    def is_well(self, what: str) -> None:
        """It works: the next trouble is told anew."""
        self._troubles.discard(what)

    def log(self, replica: int, container: str, line: str) -> None:
        """A line of a container's log."""
        self._emit(Log(time=self._clock.time(), replica=replica, container=container, line=line))

    # --- what happens to the job ----------------------------------------------------------------

    def started(
        self,
        job: TrainingJob,
        status: LocalStatus,
        state: StateFolder,
        *,
        address: str,
        resumed: bool,
    ) -> None:
        """The job begins, or goes on; `address`: of the leader's sidecar."""
        self._emit(
            JobStarted(
                time=self._clock.time(),
                job=job.name,
                namespace=job.namespace,
                run=job.run,
                uid=status.uid,
                replicas=job.spec.replicas,
                processes_per_replica=job.spec.processes_per_replica,
                state_dir=str(state.root),
                address=address,
                resumed=resumed,
            )
        )

    def store_started(self, endpoint: str, bucket: str) -> None:
        """The embedded store takes requests."""
        self._emit(StoreStarted(time=self._clock.time(), endpoint=endpoint, bucket=bucket))

    def pod_lost(self, pod: Pod, action: DeletePod, at: float) -> None:
        """A pod is taken away because it is of no use any more."""
        self._emit(
            PodLost(
                time=at,
                replica=action.replica,
                pod=pod.plan.name,
                node=pod.plan.node,
                why=action.why,
            )
        )

    def pod_replaced(self, pod: Pod, action: CreatePod, old_pod: str) -> None:
        """Another pod stands in for one that was lost."""
        self._emit(
            PodReplaced(
                time=self._clock.time(),
                replica=action.identity.replica,
                pod=pod.plan.name,
                replaces=old_pod,
                node=pod.plan.node,
                generation=action.identity.generation,
                why=action.why,
            )
        )

    def failure_injected(self, failure: str, breakage: Breakage, at: float) -> None:
        """Something is broken by order."""
        self._emit(
            FailureInjected(
                time=at, failure=failure, replicas=breakage.replicas, detail=breakage.detail
            )
        )

    # --- its end; each returns the exit code ----------------------------------------------------

    def stopped(self, by: str) -> int:
        """A signal ended the runner; the job can go on later."""
        self._emit(JobStopped(time=self._clock.time(), why=f"stopped by {by}"))
        return EXIT_INTERRUPTED

    def failed(self, outcome: Outcome, state: StateFolder) -> int:
        """The job is given up."""
        logs = tuple(str(path) for path in sorted(state.logs.glob("*/*.log")))
        self._emit(JobFailed(time=self._clock.time(), why=outcome.message, logs=logs))
        return EXIT_FAILED

    def succeeded(self, outcome: Outcome, view: JobView | None) -> int:
        """The job is done; `view`: the leader's last word."""
        now = self._clock.time()
        self._emit(
            JobSucceeded(
                time=now,
                step=view.step if view else 0,
                durable_step=view.newest_durable.step if view and view.newest_durable else -1,
                seconds=round(now - self._begun, 3),
                message=outcome.message,
            )
        )
        return EXIT_OK
