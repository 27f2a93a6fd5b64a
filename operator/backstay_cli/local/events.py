"""What a local run tells: one JSON object a line with `backstay local run -o json`.

This is an interface: scripts (the demo, tests) read it. Every line has `event` (the kind: the
class's name in snake_case) and `time` (seconds since the epoch). A later version may add kinds and
fields, never change these. The readable account is drawn from the same events.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from backstay_protocol import codec


@dataclass(frozen=True, kw_only=True)
class Event:
    """The part that all kinds share."""

    time: float
    """Seconds since the epoch at which it happened (not at which it was seen, where known)."""

    @property
    def kind(self) -> str:
        """`PodStarted` is `pod_started`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def to_json(self) -> str:
        """One line, without the newline."""
        plain = codec.to_plain(self)
        return json.dumps({"event": self.kind, **plain}, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class JobStarted(Event):
    """`job_started`: first event of a run. `resumed`: the state folder knew the job already."""

    job: str
    namespace: str
    run: str
    uid: str
    replicas: int
    processes_per_replica: int
    state_dir: str
    address: str
    """`host:port` of the leader's sidecar (REST, with the token in `state_dir`/token)."""
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class StoreStarted(Event):
    """`store_started`: the embedded S3 store listens."""

    endpoint: str
    bucket: str


@dataclass(frozen=True, kw_only=True)
class PodStarted(Event):
    """`pod_started`: a pod's containers are being started."""

    replica: int
    pod: str
    node: str
    generation: int
    address: str


@dataclass(frozen=True, kw_only=True)
class ContainerStarted(Event):
    """`container_started`: also after each restart in place (`restarts` > 0)."""

    replica: int
    pod: str
    container: str
    restarts: int


@dataclass(frozen=True, kw_only=True)
class ContainerExited(Event):
    """`container_exited`: `exit_code` is 128 + signal where a signal ended it."""

    replica: int
    pod: str
    container: str
    exit_code: int
    reason: str
    """Completed | Error | Killed by signal n."""
    next: str
    """What follows, in words: "restarts at once", "restarts in 2 s", "stays ended", ..."""


@dataclass(frozen=True, kw_only=True)
class FailureInjected(Event):
    """`failure_injected`: somebody ordered it with `backstay local fail`."""

    failure: str
    """trainer | memory | node | all."""
    replicas: tuple[int, ...]
    detail: str


@dataclass(frozen=True, kw_only=True)
class PodLost(Event):
    """`pod_lost`: the pod is gone, with its node or alone."""

    replica: int
    pod: str
    node: str
    why: str


@dataclass(frozen=True, kw_only=True)
class PodReplaced(Event):
    """`pod_replaced`: its successor is being created (a `pod_started` follows)."""

    replica: int
    pod: str
    replaces: str
    node: str
    generation: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RestoreBegun(Event):
    """`restore_begun`: the leader gathers the ranks of a new attempt."""

    message: str


@dataclass(frozen=True, kw_only=True)
class RestoreDone(Event):
    """`restore_done`: an attempt has its go-ahead."""

    attempt: int
    attempt_name: str
    """`k.n`."""
    base: str | None
    """`<step>-<attempt>`; null: from nothing."""
    base_step: int
    """0 from nothing."""
    bytes_by_tier: dict[str, int]
    """What all ranks read, by tier: memory, local, neighbor, remote."""
    lost_steps: int
    """Steps trained before and not in the base; -1: not known."""
    seconds: float
    """From the first join to the go-ahead, by the leader's clock."""
    bad: tuple[str, ...] = ()
    """Copies that were struck out on the way."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """`recovered`: the first step after a failure. One for each failure or group of failures."""

    failures: tuple[str, ...]
    """trainer | memory | node | all | container | pod: what had failed."""
    replicas: tuple[int, ...]
    failed_at: float
    """Seconds since the epoch of the (first) failure."""
    detect_seconds: float
    """From the failure to its being noticed: by the runner, a launcher or the leader."""
    resume_seconds: float
    """From the failure to the end of the first step after it."""
    attempt: int
    base_step: int
    step: int
    """The first step seen after it."""
    lost_steps: int
    bytes_by_tier: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """`progress`: at most one a second, when something changed."""

    step: int
    """Smallest step of all ranks."""
    attempt: int
    attempt_name: str
    phase: str
    newest: dict[str, int]
    """Tier -> newest step that is complete there."""
    durable_step: int
    """-1: none yet, or no remote tier."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """`notice`: what a person should read."""

    level: str
    """info | warning."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Log(Event):
    """`log`: a line of a container's output, with `--logs`."""

    replica: int
    container: str
    line: str


@dataclass(frozen=True, kw_only=True)
class JobSucceeded(Event):
    """`job_succeeded`: last event, exit code 0."""

    step: int
    durable_step: int
    seconds: float
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class JobFailed(Event):
    """`job_failed`: last event, exit code 1."""

    why: str
    logs: tuple[str, ...] = field(default=())
    """Files to look into."""


@dataclass(frozen=True, kw_only=True)
class JobStopped(Event):
    """`job_stopped`: last event after Ctrl-C or SIGTERM, exit code 130. Run it again to go on."""

    why: str


def parse_line(line: str) -> dict[str, Any]:
    """A line of `-o json`, for readers in Python: a plain dict with `event` and `time`."""
    value = json.loads(line)
    if not isinstance(value, dict) or "event" not in value:
        raise ValueError(f"not an event line: {line[:80]!r}")
    return value
