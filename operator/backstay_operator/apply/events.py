"""Events (events.k8s.io/v1) about a job: at most one of a kind in five minutes, with a count.

Regarding the TrainingJob; never about normal saves. What must still be seen tomorrow is a
condition. Pure but for the memory of what was told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from backstay_operator.api.names import API_VERSION, KIND
from backstay_operator.apply.conditions import shortened
from backstay_operator.cluster import Tree
from backstay_operator.memory import Told
from backstay_operator.times import micro_text_of

QUIET_SECONDS = 300.0
MOST_A_PASS = 10
_NOTE = 1024
CONTROLLER = "backstay.dev/operator"
NORMAL = "Normal"
WARNING = "Warning"


@dataclass(frozen=True, kw_only=True)
class Telling:
    """One thing worth telling."""

    reason: str
    """CamelCase."""
    action: str
    """What the operator does about it, CamelCase."""
    note: str
    type: str = NORMAL
    key: str = ""
    """What it is about within the job (a replica); the same key and reason are told together."""


def due(
    tellings: Iterable[Telling], told: dict[tuple[str, str], Told], monotonic: float
) -> list[tuple[Telling, int]]:
    """Those to be told now, each with how often it was swallowed before. Updates `told`."""
    found: list[tuple[Telling, int]] = []
    for telling in tellings:
        known = told.get((telling.reason, telling.key))
        if known is not None and monotonic - known.at < QUIET_SECONDS:
            known.swallowed += 1
            continue
        if len(found) == MOST_A_PASS:
            break
        told[telling.reason, telling.key] = Told(at=monotonic)
        found.append((telling, known.swallowed if known is not None else 0))
    return found


def build_event(
    job: Tree, telling: Telling, swallowed: int, *, instance: str, now: float
) -> dict[str, Any]:
    """The object. `instance`: this operator's pod."""
    metadata = job["metadata"]
    note = telling.note if not swallowed else f"{telling.note} ({swallowed} more times before)"
    seed = f"{metadata.get('uid')}/{telling.reason}/{telling.key}/{now}".encode()
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(seed).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "eventTime": micro_text_of(now),
        "reportingController": CONTROLLER,
        "reportingInstance": shortened(instance, 128),
        "action": telling.action,
        "reason": telling.reason,
        "type": telling.type,
        "note": shortened(note, _NOTE),
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata.get("uid", ""),
        },
    }
