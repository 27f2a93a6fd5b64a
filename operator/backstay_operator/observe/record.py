"""The persisted record of a job, or a new one for a job that has none. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from backstay_operator.cluster import Tree
from backstay_operator.decide import JobRecord, PodRecord
from backstay_operator.observe.pods import identity_of
from backstay_operator.persisted import parse_record
from backstay_operator.times import seconds


def read_record(job: Tree, pods: Iterable[Tree]) -> JobRecord:
    """The record of a job; of one that was never seen, or lost its status, a new one.

    `pods`: those that exist: what the status has lost, their labels still tell.
    """
    found = parse_record((job.get("status") or {}).get("generations") or {})
    if found is not None:
        return found
    first = int(seconds(job["metadata"].get("creationTimestamp")))
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
