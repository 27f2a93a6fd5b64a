"""Tells a run while it lasts: its events as lines for people. Used by demo.py.

Nothing is decided here. On a terminal the newest progress is one line that is written over; else a
line every few seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from examples.char_gpt.incidents import (
    FAILURES,
    TIERS,
    Event,
    Failure,
    Incident,
    human_sources,
)

_PROGRESS_SECONDS = 5.0
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Account:
    """Writes what happens, with the minutes and seconds since it was made."""

    def __init__(self, out: TextIO, start: float, failures: Sequence[Failure] = FAILURES) -> None:
        self._out = out
        self._start = start
        self._failures = failures
        self._now = start
        self._terminal = out.isatty()
        self._colour = self._terminal and "NO_COLOR" not in os.environ
        self._open_line = False
        self._last_progress = 0.0
        self._injected = 0

    def heading(self, text: str) -> None:
        """A line that begins a part."""
        self._say("\n" + self._style(text, "bold"), clock=False)

    def line(self, text: str, style: str = "") -> None:
        """One line at the time of the newest event."""
        self._say(self._style(text, style))

    def tell(self, event: Event, loss: float | None, num_steps: int) -> None:
        """One event; `loss` is the newest one known."""
        self._now = max(self._now, float(event["time"]))
        kind = event["event"]
        if kind == "progress":
            self._tell_progress(event, loss, num_steps)
        elif kind == "failure_injected":
            self._tell_failure(event)
        elif kind == "restore_done":
            self._tell_restore(event)
        else:
            text, style = _sentence(event)
            if text:
                self.line(text, style)

    def recovered(self, incident: Incident) -> None:
        """How the run came back from a failure."""
        for rank, sources in sorted(incident.bytes_by_rank.items()):
            self.line(f"    rank {rank} read {human_sources(sources)}", "dim")
        self.line(
            f"  ✓ going on from step {incident.base_step}, steps lost: {incident.lost_steps}, "
            f"noticed after {incident.detect_seconds:.1f} s, next step done after "
            f"{incident.resume_seconds:.1f} s",
            "green",
        )
        if incident.problem:
            self.line(f"  ✗ not as expected: {incident.problem}", "red")

    def _tell_progress(self, event: Event, loss: float | None, num_steps: int) -> None:
        if not self._terminal and self._now < self._last_progress + _PROGRESS_SECONDS:
            return
        self._last_progress = self._now
        if event["phase"] != "Training" or not num_steps:
            self._say("waiting for all ranks to begin together", over=True)
            return
        newest = event["newest"]
        held = "  ".join(f"{tier} {newest[tier]}" for tier in TIERS if newest.get(tier, -1) >= 0)
        shown = "" if loss is None else f"  loss {loss:.3f}"
        text = f"step {event['step']:>4}/{num_steps}{shown}  complete in: {held or 'nothing yet'}"
        self._say(text, over=True)

    def _tell_failure(self, event: Event) -> None:
        self._injected += 1
        failure = next((f for f in self._failures if f.kind == event["failure"]), None)
        title = failure.title if failure else str(event["failure"])
        where = ", ".join(str(replica) for replica in event["replicas"])
        self.line(f"✗ {self._injected}. {title} (replica {where})", "red")
        if failure:
            self.line(f"    {failure.detail}", "dim")

    def _tell_restore(self, event: Event) -> None:
        for bad in event["bad"]:
            self.line(f"    damaged and left out: {bad}", "yellow")
        if event["base"] is None:
            self.line(f"  attempt {event['attempt_name']}: no checkpoint yet, begins at step 0")
            return
        self.line(
            f"  attempt {event['attempt_name']}: all ranks hold step {event['base_step']} again, "
            f"read from {human_sources(event['bytes_by_tier'])}"
        )

    def _say(self, text: str, *, clock: bool = True, over: bool = False) -> None:
        seconds = int(self._now - self._start)
        stamp = self._style(f"{seconds // 60:>2}:{seconds % 60:02}  ", "dim") if clock else ""
        before = "\r\x1b[K" if self._open_line else ""
        self._open_line = over and self._terminal
        self._out.write(f"{before}{stamp}{text}{'' if self._open_line else os.linesep}")
        self._out.flush()

    def _style(self, text: str, style: str) -> str:
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and self._colour else text


def _sentence(event: Event) -> tuple[str, str]:
    """(text, style) of the events that are told as they are; an empty text: not told."""
    kind = event["event"]
    if kind == "job_started":
        return f"{event['replicas']} replicas start; state in {event['state_dir']}", "dim"
    if kind == "store_started":
        return f"an S3 server listens at {event['endpoint']}", "dim"
    if kind == "container_exited" and event["exit_code"] and "pod" not in event["next"]:
        words = f"{event['container']} of replica {event['replica']} ended ({event['reason']})"
        return f"    {words}; {event['next']}", "dim"
    if kind == "pod_lost":
        return f"    lost the pod of replica {event['replica']}: {event['why']}", "dim"
    if kind == "pod_replaced":
        return f"    replica {event['replica']} gets a new pod on {event['node']}", "dim"
    if kind == "notice" and event["level"] == "warning":
        return f"    {event['text']}", "yellow"
    if kind == "job_succeeded":
        return (
            f"✓ step {event['step']} reached; durable in remote: {event['durable_step']}",
            "green",
        )
    if kind == "job_failed":
        return f"✗ the job failed: {event['why']}", "red"
    return "", ""
