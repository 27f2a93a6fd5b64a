"""What happened in a run, read from its events and losses; and whether it happened as it should.

Pure: used by demo.py while the run lasts and by report.py afterwards. Events are the JSON lines of
`backstay local run -o json`, losses those of train.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
Losses = Sequence[Mapping[str, Any]]

TIERS = ("memory", "local", "neighbor", "remote")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure of the demo: what is broken, when, and which tier has to help."""

    kind: str
    """As `backstay local fail` calls it."""
    replica: int | None
    """None: all of them."""
    after_step: int
    """Not before the run has come this far."""
    tier: str
    """The nearest tier that still has what was lost."""
    title: str
    detail: str


FAILURES = (
    Failure(
        kind="trainer",
        replica=1,
        after_step=60,
        tier="memory",
        title="One trainer process killed",
        detail="kill -9 of one rank; its shards stay in the node's memory",
    ),
    Failure(
        kind="memory",
        replica=2,
        after_step=130,
        tier="local",
        title="One node's memory wiped",
        detail="as a reboot would; the node's own disk stays",
    ),
    Failure(
        kind="node",
        replica=1,
        after_step=200,
        tier="neighbor",
        title="One node destroyed with its disk",
        detail="its shards are left on its neighbour's disk only",
    ),
    Failure(
        kind="all",
        replica=None,
        after_step=280,
        tier="remote",
        title="Every node destroyed",
        detail="nothing is left but the S3 bucket",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure and how the run came back from it."""

    failure: Failure
    at: float
    """When it happened, seconds since the epoch."""
    step: int
    """The last step that was trained before it."""
    base_step: int
    """The step that every rank came back to."""
    lost_steps: int
    detect_seconds: float
    """From the failure until it was noticed."""
    resume_seconds: float
    """From the failure until the first step after it was done."""
    bytes_by_tier: Mapping[str, int]
    """What all ranks together read."""
    bytes_by_rank: Mapping[int, Mapping[str, int]]
    """Rank -> tier -> what it read."""
    attempt: str
    """The attempt that went on, `k.n`."""
    problem: str
    """Why this was not the recovery that was expected; empty: it was."""


def may_inject(failure: Failure, progress: Event, last_base: int) -> bool:
    """Whether a run that reports `progress` has what this failure is to be survived with.

    The tier that has to help must hold a step that the run has not been set back to already, and
    the nearest tier one that no farther one has: else another tier could serve as well.
    """
    newest = progress["newest"]
    if progress["phase"] != "Training" or progress["step"] < failure.after_step:
        return False
    if newest.get(failure.tier, -1) <= max(last_base, 0):
        return False
    farther = TIERS[TIERS.index(failure.tier) + 1 :]
    return failure.tier != "memory" or all(
        newest.get(tier, -1) < newest["memory"] for tier in farther
    )


def is_recovery(failure: Failure, event: Event) -> bool:
    """Whether this event says that the run came back from this failure."""
    return event["event"] == "recovered" and failure.kind in event["failures"]


def judge(failure: Failure, bytes_by_tier: Mapping[str, int]) -> str:
    """Why these are not the tiers that should have served; empty: they are.

    The tier that the failure left as the nearest must have served. Nearer ones may have helped: two
    of three nodes still had their memory. A farther one means that the nearest was overlooked; from
    remote, which comes last, everything must have come.
    """
    used = {tier for tier, num_bytes in bytes_by_tier.items() if num_bytes}
    said = ", ".join(tier for tier in TIERS if tier in used) or "nothing"
    if failure.tier not in used:
        return f"read from {said}; {failure.tier} should have served"
    if failure.tier == "remote" and used != {"remote"}:
        return f"read from {said}; with all nodes gone only remote can have served"
    if failure.tier != "remote" and "remote" in used:
        return f"read from {said}; remote was not needed while {failure.tier} had the step"
    return ""


def read_incidents(
    events: Iterable[Event], losses: Losses, failures: Sequence[Failure] = FAILURES
) -> tuple[Incident, ...]:
    """The failures that were injected and recovered from, in order."""
    found = []
    attempts: dict[int, str] = {}
    pending: list[tuple[Failure, Event]] = []
    left = list(failures)
    for event in events:
        if event["event"] == "restore_done":
            attempts[event["attempt"]] = event["attempt_name"]
        elif event["event"] == "failure_injected":
            failure = next((f for f in left if f.kind == event["failure"]), None)
            if failure is not None:
                left.remove(failure)
                pending.append((failure, event))
        elif event["event"] == "recovered":
            for failure, injected in pending:
                if is_recovery(failure, event):
                    found.append(_incident(failure, injected, event, losses, attempts))
            pending = [entry for entry in pending if not is_recovery(entry[0], event)]
    return tuple(found)


def _incident(
    failure: Failure,
    injected: Event,
    recovered: Event,
    losses: Losses,
    attempts: Mapping[int, str],
) -> Incident:
    at = float(recovered.get("failed_at") or injected["time"])
    trained = [int(line["step"]) for line in losses if "loss" in line and line["time"] <= at]
    base_step = int(recovered["base_step"])
    step = trained[-1] if trained else base_step + max(0, int(recovered["lost_steps"]))
    return Incident(
        failure=failure,
        at=at,
        step=step,
        base_step=base_step,
        lost_steps=max(0, step - base_step),
        detect_seconds=float(recovered["detect_seconds"]),
        resume_seconds=float(recovered["resume_seconds"]),
        bytes_by_tier=dict(recovered["bytes_by_tier"]),
        bytes_by_rank=_bytes_by_rank(losses, at, float(recovered["time"])),
        attempt=attempts.get(recovered["attempt"], str(recovered["attempt"])),
        problem=judge(failure, recovered["bytes_by_tier"]),
    )


def _bytes_by_rank(losses: Losses, start: float, stop: float) -> dict[int, Mapping[str, int]]:
    """What each rank said that it read in the last restore between two times."""
    return {
        line["rank"]: line["sources"]
        for line in losses
        if line.get("event") == "restored" and start <= line["time"] <= stop
    }


def last_losses(losses: Losses) -> dict[int, float]:
    """Step -> loss of the time that counted: a step trained again replaces its first time."""
    return {int(line["step"]): float(line["loss"]) for line in losses if "loss" in line}


def human_bytes(num_bytes: float) -> str:
    """`31.2 MB`."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def human_sources(bytes_by_tier: Mapping[str, int]) -> str:
    """`memory 21.6 MB, local 10.8 MB`, nearest first."""
    return ", ".join(
        f"{tier} {human_bytes(bytes_by_tier[tier])}" for tier in TIERS if bytes_by_tier.get(tier)
    )
