"""A recording of a demo as the local runner and the trainer leave it, made up step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from examples.char_gpt.incidents import FAILURES, TIERS, Failure

START = 1_790_000_000.0
SECONDS_PER_STEP = 0.25
EVERY = {"memory": 5, "local": 10, "neighbor": 20, "remote": 40}
SHARD_BYTES = 10_806_528


def loss_at(step: int) -> float:
    """A curve with some noise that depends on the step alone, as in a run that is bit-exact."""
    noise = math.sin(step * 12.9898) * 43758.5453
    return 2.1 + 2.5 * math.exp(-step / 60) + 0.16 * (noise - math.floor(noise) - 0.5)


def record(
    failures: Sequence[Failure] = FAILURES, num_steps: int = 420
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(events, losses) of a run in which each failure strikes two steps after it may."""
    now, step, attempt = START, 0, 1
    events: list[dict[str, Any]] = [
        {"event": "job_started", "time": now, "replicas": 3, "state_dir": "state"}
    ]
    losses: list[dict[str, Any]] = []
    left = list(failures)
    now += 9
    while step < num_steps:
        step, now = step + 1, now + SECONDS_PER_STEP
        losses.append({"step": step, "loss": loss_at(step), "lr": 1e-3, "time": now})
        events.append(progress(step, attempt, now))
        if left and step == left[0].after_step + 2 + 7 * attempt:
            failure = left.pop(0)
            base, attempt = step - step % EVERY[failure.tier], attempt + 1
            events += _outage(failure, step, base, attempt, now)
            step, now = base, now + 8 + attempt
            losses += [_restored(rank, failure, base, now - SECONDS_PER_STEP) for rank in range(3)]
    losses.append({"event": "sample", "text": "The statement of a class", "time": now})
    losses.append({"event": "finished", "step": step, "parameters": 2_701_632, "time": now})
    done = {"step": step, "durable_step": step, "seconds": now - START}
    events.append({"event": "job_succeeded", "time": now + 2, **done})
    return events, losses


def progress(step: int, attempt: int, now: float) -> dict[str, Any]:
    """What the runner says after a step."""
    return {
        "event": "progress",
        "time": now,
        "step": step,
        "attempt": attempt,
        "attempt_name": f"1.{attempt}",
        "phase": "Training",
        "newest": {tier: step - step % EVERY[tier] for tier in TIERS if step >= EVERY[tier]},
        "durable_step": step - step % EVERY["remote"],
        "warnings": [],
    }


def bytes_for(failure: Failure) -> dict[str, int]:
    """What three ranks read, each all three shards, after this failure."""
    if failure.tier == "memory":
        return {"memory": 9 * SHARD_BYTES}
    if failure.tier == "remote":
        return {"remote": 9 * SHARD_BYTES}
    return {"memory": 6 * SHARD_BYTES, failure.tier: 3 * SHARD_BYTES}


def _restored(rank: int, failure: Failure, base: int, now: float) -> dict[str, Any]:
    sources = {tier: num_bytes // 3 for tier, num_bytes in bytes_for(failure).items()}
    return {"event": "restored", "rank": rank, "step": base, "sources": sources, "time": now}


def _outage(
    failure: Failure, step: int, base: int, attempt: int, now: float
) -> list[dict[str, Any]]:
    replicas = [0, 1, 2] if failure.replica is None else [failure.replica]
    restored = {
        "attempt": attempt,
        "base_step": base,
        "lost_steps": step - base,
        "bytes_by_tier": bytes_for(failure),
    }
    return [
        {
            "event": "failure_injected",
            "time": now,
            "failure": failure.kind,
            "replicas": replicas,
            "detail": "",
        },
        {
            "event": "restore_done",
            "time": now + 6 + attempt,
            "attempt_name": f"1.{attempt}",
            "base": f"{base}-{attempt - 1}",
            "seconds": 1.5,
            "bad": [],
            "reason": "the newest complete one",
            **restored,
        },
        {
            "event": "recovered",
            "time": now + 8 + attempt,
            "failures": [failure.kind],
            "replicas": replicas,
            "failed_at": now,
            "detect_seconds": 0.4 * attempt,
            "resume_seconds": 8.0 + attempt,
            "step": base + 1,
            **restored,
        },
    ]
