"""What is persisted of a job: `JobRecord` to `status.generations` and back. Pure.

Written by the applier before pods are created, read by the observer. Compact, for a job may have
thousands of replicas: one text a pod, `<replica>/<generation>/<replaces>/<created: 0 or 1>/<node>`.
"""

from __future__ import annotations

from typing import Any

from backstay_operator.cluster import Tree
from backstay_operator.decide import JobRecord, PodRecord


def write_record(record: JobRecord) -> dict[str, Any]:
    """The tree for `status.generations`."""
    tree: dict[str, Any] = {
        "first": record.first_generation,
        "newest": record.generation,
        "pods": [
            f"{replica}/{pod.generation}/{pod.replaces}/{int(pod.created)}/{pod.node}"
            for replica, pod in sorted(record.pods.items())
        ],
    }
    extra = {
        "choice": record.choice,
        "choiceNumber": record.choice_number,
        "outcome": record.outcome,
        "outcomeReason": record.outcome_reason,
        "outcomeMessage": record.outcome_message,
        "endedAt": int(record.ended_at),
        "drainSince": int(record.drain_since),
        "flushSince": int(record.flush_since),
        "safeEnd": record.safe_end,
    }
    return tree | {name: value for name, value in extra.items() if value}


def parse_record(tree: Tree) -> JobRecord | None:
    """The record in a `status.generations`; None: there is none."""
    if not tree.get("first"):
        return None
    return JobRecord(
        first_generation=int(tree["first"]),
        generation=int(tree.get("newest") or tree["first"]),
        pods=dict(_pod(text) for text in tree.get("pods") or []),
        choice=str(tree.get("choice") or ""),
        choice_number=int(tree.get("choiceNumber") or 0),
        outcome=str(tree.get("outcome") or ""),
        outcome_reason=str(tree.get("outcomeReason") or ""),
        outcome_message=str(tree.get("outcomeMessage") or ""),
        ended_at=float(tree.get("endedAt") or 0),
        drain_since=float(tree.get("drainSince") or 0),
        flush_since=float(tree.get("flushSince") or 0),
        safe_end=bool(tree.get("safeEnd")),
    )


def _pod(text: str) -> tuple[int, PodRecord]:
    replica, generation, replaces, created, node = text.split("/", 4)
    record = PodRecord(
        generation=int(generation), replaces=int(replaces), created=created == "1", node=node
    )
    return int(replica), record
