"""What each check of `replicas` and `renewal` looks at, and what they have in common. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backstay_operator.decide.observed import JobRecord, Observed, PodState
from backstay_operator.decide.plan import DeletePod, Plan
from backstay_operator.settings import RestartSettings


@dataclass(frozen=True)
class Case:
    """One job at one moment."""

    observed: Observed
    record: JobRecord
    now: float
    """Seconds since the epoch."""
    settings: RestartSettings


Check = Callable[[Case], Plan | None]
"""None: it has nothing to do."""


def delete(pod: PodState, why: str, *, graceful: bool) -> DeletePod:
    """`graceful`: with its grace; else by force."""
    return DeletePod(replica=pod.replica, generation=pod.generation, graceful=graceful, why=why)


def may_delete(pod: PodState) -> bool:
    """A pod that ends already is left to end, unless nobody is there to do it."""
    return not pod.terminating or not pod.node_alive
