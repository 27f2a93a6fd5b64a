"""What is persisted of a job in its status: `status.generations` to `JobRecord` and back. Pure.

Compact, for a job may have thousands of replicas: one text a pod,
`<replica>/<generation>/<replaces>/<created: 0 or 1>/<node>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backstay_operator.cluster import Tree
from backstay_operator.decide import JobRecord, PodRecord
from backstay_operator.observe.pods import identity_of
from backstay_operator.observe.times import seconds


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
    }
    return tree | {name: value for name, value in extra.items() if value}


def read_record(job: Tree, pods: Iterable[Tree]) -> JobRecord:
    """The record of a job; of one that was never seen, or lost its status, a new one.

    `pods`: those that exist: what the status has lost, their labels still tell.
    """
    tree = (job.get("status") or {}).get("generations") or {}
    if tree.get("first"):
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
        )
    first = int(seconds(job["metadata"].get("creationTimestamp")))
    return _from_pods(first, pods)


def _from_pods(first: int, pods: Iterable[Tree]) -> JobRecord:
    newest: dict[int, int] = {}
    for pod in pods:
        identity = identity_of(pod)
        if identity is not None:
            newest[identity[0]] = max(identity[1], newest.get(identity[0], 0))
    return JobRecord(
        first_generation=first,
        generation=max([first, *newest.values()]),
        pods={r: PodRecord(generation=g, created=True) for r, g in newest.items()},
    )


def _pod(text: str) -> tuple[int, PodRecord]:
    replica, generation, replaces, created, node = text.split("/", 4)
    record = PodRecord(
        generation=int(generation), replaces=int(replaces), created=created == "1", node=node
    )
    return int(replica), record
