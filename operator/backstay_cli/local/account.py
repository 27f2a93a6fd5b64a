"""The readable account of a local run, drawn from its events; or the events themselves as JSON.

On a terminal the last line is alive (step, attempt, newest step per tier); elsewhere progress is a
line now and then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from backstay_cli.local import events
from backstay_cli.local.events import Event
from backstay_operator.api.quantity import format_bytes
from backstay_protocol.names import TIERS

_PROGRESS_SECONDS = 5.0
_LOGS_SHOWN = 6


def json_lines(stream: TextIO) -> Callable[[Event], None]:
    """One JSON object a line, flushed."""

    def emit(event: Event) -> None:
        stream.write(event.to_json() + "\n")
        stream.flush()

    return emit


def lasting(tell: Callable[[Event], None]) -> Callable[[Event], None]:
    """A job does not end because whoever read its account has gone."""
    gone = False

    def emit(event: Event) -> None:
        nonlocal gone
        if gone:
            return
        try:
            tell(event)
        except BrokenPipeError:
            gone = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - flushed when Python ends
        except OSError:
            return  # no room for this one; the next may find some

    return emit


class Account:
    """Tells events to a person."""

    def __init__(self, console: Console | None = None) -> None:
        """`console`: standard output by default."""
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._progress_told = 0.0

    def __call__(self, event: Event) -> None:
        """Tell one event; kinds that say nothing to a person are passed over."""
        if isinstance(event, events.Progress):
            self._progress(event)
            return
        teller = _TELLERS.get(type(event))
        text = teller(event) if teller is not None else ""
        if text:
            self._line(event.time, text)
        if isinstance(event, events.JobSucceeded | events.JobFailed | events.JobStopped):
            self.close()

    def close(self) -> None:
        """End the live line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _line(self, time: float, text: str) -> None:
        clock = datetime.fromtimestamp(time, tz=UTC).astimezone().strftime("%H:%M:%S")
        self._console.print(f"[dim]{clock}[/dim] {text}")

    def _progress(self, event: events.Progress) -> None:
        text = _progress_text(event)
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        elif event.time - self._progress_told >= _PROGRESS_SECONDS:
            self._progress_told = event.time
            self._line(event.time, text)


def _progress_text(event: events.Progress) -> str:
    newest = ", ".join(f"{tier} {event.newest[tier]}" for tier in TIERS if tier in event.newest)
    return (
        f"{event.phase.lower()}: step {event.step}, attempt {event.attempt_name}"
        + (f"; newest complete: {newest}" if newest else "")
        + (f"; durable {event.durable_step}" if event.durable_step >= 0 else "")
    )


def bytes_in_words(bytes_by_tier: Mapping[str, int]) -> str:
    """`12 MiB from memory, 6 MiB from neighbor`."""
    parts = [
        f"{format_bytes(bytes_by_tier[tier])} from {tier}"
        for tier in TIERS
        if bytes_by_tier.get(tier)
    ]
    return ", ".join(parts) or "nothing to read"


def _job_started(event: events.JobStarted) -> str:
    how = "goes on" if event.resumed else "starts"
    return (
        f"[bold]{event.namespace}/{event.job}[/bold] {how}: {event.replicas} replicas x "
        f"{event.processes_per_replica} processes; leader http://{event.address}, "
        f"state in {escape(event.state_dir)}"
    )


def _store_started(event: events.StoreStarted) -> str:
    return f"embedded store at {event.endpoint}, bucket {event.bucket}"


def _pod_started(event: events.PodStarted) -> str:
    return f"replica {event.replica}: pod {event.pod} starts on {event.node} ({event.address})"


def _container_started(event: events.ContainerStarted) -> str:
    if not event.restarts:
        return ""
    return f"replica {event.replica}: {event.container} started again ({event.restarts})"


def _container_exited(event: events.ContainerExited) -> str:
    what = f"replica {event.replica}: {event.container} ended"
    if event.exit_code == 0:
        return f"{what}: completed"
    return f"[yellow]{what}: {event.reason}, code {event.exit_code}[/yellow]; {event.next}"


def _failure_injected(event: events.FailureInjected) -> str:
    return f"[bold red]failure by order ({event.failure})[/bold red]: {escape(event.detail)}"


def _pod_lost(event: events.PodLost) -> str:
    return f"[yellow]replica {event.replica}: pod {event.pod} is lost[/yellow]: {event.why}"


def _pod_replaced(event: events.PodReplaced) -> str:
    return (
        f"replica {event.replica}: {event.pod} on {event.node} takes the place of {event.replaces}"
    )


def _restore_begun(event: events.RestoreBegun) -> str:
    return f"restore: {escape(event.message or 'the ranks join')}"


def _restore_done(event: events.RestoreDone) -> str:
    begun = f"attempt {event.attempt_name} begins"
    bad = "".join(f"\n         [red]struck out[/red]: {escape(text)}" for text in event.bad)
    if event.base is None:
        return f"[green]{begun}[/green] from nothing, at step 0{bad}"
    lost = f"; {event.lost_steps} steps lost" if event.lost_steps >= 0 else ""
    return (
        f"[green]{begun}[/green] from step {event.base_step}: "
        f"{bytes_in_words(event.bytes_by_tier)}, in {event.seconds:.1f} s{lost}{bad}"
    )


def _recovered(event: events.Recovered) -> str:
    return (
        f"[bold green]recovered[/bold green] from {' + '.join(event.failures)}: noticed after "
        f"{event.detect_seconds:.1f} s, training again after {event.resume_seconds:.1f} s "
        f"(step {event.step}); {bytes_in_words(event.bytes_by_tier)}"
    )


def _notice(event: events.Notice) -> str:
    style = "yellow" if event.level == "warning" else "none"
    return f"[{style}]{escape(event.text)}[/{style}]"


def _log(event: events.Log) -> str:
    return f"[cyan]{event.replica} {event.container}|[/cyan] {escape(event.line)}"


def _job_succeeded(event: events.JobSucceeded) -> str:
    return (
        f"[bold green]succeeded[/bold green] at step {event.step} after {event.seconds:.0f} s: "
        f"{escape(event.message)}"
    )


def _job_failed(event: events.JobFailed) -> str:
    logs = "".join(f"\n         {escape(log)}" for log in event.logs[:_LOGS_SHOWN])
    return f"[bold red]failed[/bold red]: {escape(event.why)}" + (f"\n         logs:{logs}")


def _job_stopped(event: events.JobStopped) -> str:
    return f"{event.why}; nothing runs any more; run it again to go on"


_TELLERS: dict[type[Event], Callable[..., str]] = {
    events.JobStarted: _job_started,
    events.StoreStarted: _store_started,
    events.PodStarted: _pod_started,
    events.ContainerStarted: _container_started,
    events.ContainerExited: _container_exited,
    events.FailureInjected: _failure_injected,
    events.PodLost: _pod_lost,
    events.PodReplaced: _pod_replaced,
    events.RestoreBegun: _restore_begun,
    events.RestoreDone: _restore_done,
    events.Recovered: _recovered,
    events.Notice: _notice,
    events.Log: _log,
    events.JobSucceeded: _job_succeeded,
    events.JobFailed: _job_failed,
    events.JobStopped: _job_stopped,
}
