"""The operator's metrics: few series, whatever the number of jobs."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One set a process."""

    def __init__(self) -> None:
        """All zero."""
        self._told: set[str] = set()
        self.registry = CollectorRegistry()
        self.passes = Histogram(
            "backstay_operator_reconcile_seconds",
            "Time of one look at a job and what followed",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.errors = Counter(
            "backstay_operator_reconcile_errors",
            "Looks at a job that failed and are tried again",
            registry=self.registry,
        )
        self.depth = Gauge(
            "backstay_operator_queue_depth",
            "Jobs that wait for a look",
            registry=self.registry,
        )
        self.jobs = Gauge(
            "backstay_operator_jobs",
            "Jobs whose condition is True",
            ["condition"],
            registry=self.registry,
        )
        self.replaced = Counter(
            "backstay_operator_pods_replaced",
            "Pods that were created in the place of another one",
            ["reason"],
            registry=self.registry,
        )
        self.leads = Gauge(
            "backstay_operator_leader",
            "1 in the operator that works",
            registry=self.registry,
        )

    def note_jobs(self, conditions: Iterable[Iterable[str]]) -> None:
        """`conditions`: of each job, the types that are True."""
        counts = Count(name for of_job in conditions for name in of_job)
        for name in {*counts, *self._told}:
            self.jobs.labels(name).set(counts.get(name, 0))
        self._told |= set(counts)
