"""Prometheus metrics of one sidecar, served on the health port.

The agent owns one and sets the gauges at each scrape; the replicator counts what moved. It keeps
its own registry, so that several sidecars can live in one test process. A tier is the only label:
a thousand pods of eight ranks must not be as many series (GET /v1/job has each rank).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from backstay_protocol.clock import Clock
from backstay_protocol.messages import RankProgress, TierState


class Metrics:
    """Everything that is counted."""

    def __init__(self, clock: Clock) -> None:
        """`clock` gives ages."""
        self._clock = clock
        self.registry = it = CollectorRegistry()
        tier = ["tier"]
        self._bytes = Counter("backstay_tier_bytes", "Bytes stored in a tier", tier, registry=it)
        self._seconds = Counter(
            "backstay_tier_transfer_seconds", "Time spent storing them", tier, registry=it
        )
        self._shards = Counter("backstay_tier_shards", "Shards stored", tier, registry=it)
        self._failures = Counter(
            "backstay_tier_failures", "Transfers that failed", tier, registry=it
        )
        self._served = Counter("backstay_served_bytes", "Shard bytes sent", tier, registry=it)
        self._ok = Gauge("backstay_tier_ok", "0: the tier is degraded", tier, registry=it)
        self._backlog = Gauge("backstay_tier_backlog", "Shards that wait", tier, registry=it)
        self._newest = Gauge(
            "backstay_tier_newest_step", "Newest step complete in the tier", tier, registry=it
        )
        self._age = Gauge(
            "backstay_tier_newest_age_seconds", "Age of that checkpoint", tier, registry=it
        )
        self._step = Gauge("backstay_step", "Step that all ranks of the pod have made", registry=it)
        self._stall = Gauge(
            "backstay_stall_seconds", "Time that saves blocked a rank, of the worst", registry=it
        )
        self._saves = Gauge("backstay_saves", "Saves that every rank has published", registry=it)
        self._skipped = Gauge(
            "backstay_skipped_saves", "Saves skipped by a rank, of the worst", registry=it
        )
        self._attempt = Gauge("backstay_attempt", "Attempt that this pod follows", registry=it)
        self._attempts = Counter(
            "backstay_attempts", "Attempts that began while this sidecar ran", registry=it
        )

    def moved(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A shard has reached a tier."""
        self._bytes.labels(tier).inc(num_bytes)
        self._seconds.labels(tier).inc(seconds)
        self._shards.labels(tier).inc()

    def failed(self, tier: str) -> None:
        """A transfer failed."""
        self._failures.labels(tier).inc()

    def served(self, tier: str, num_bytes: int) -> None:
        """Bytes went to a reader."""
        self._served.labels(tier).inc(num_bytes)

    def attempt_began(self, attempt: int) -> None:
        """The go-ahead was given."""
        self._attempts.inc()
        self._attempt.set(attempt)

    def render(self, tiers: Iterable[TierState], ranks: Iterable[RankProgress]) -> bytes:
        """The text of a scrape."""
        for state in tiers:
            self._ok.labels(state.tier).set(1 if state.ok else 0)
            self._backlog.labels(state.tier).set(state.backlog)
            if state.newest is not None:
                self._newest.labels(state.tier).set(state.newest.step)
            if state.newest_time:
                self._age.labels(state.tier).set(self._clock.time() - state.newest_time)
        self._render_ranks(list(ranks))
        return generate_latest(self.registry)

    def _render_ranks(self, ranks: list[RankProgress]) -> None:
        if not ranks:
            return
        self._step.set(min(rank.step for rank in ranks))
        self._stall.set(max(rank.stall_seconds for rank in ranks))
        self._saves.set(min(rank.saves for rank in ranks))
        self._skipped.set(max(rank.skipped for rank in ranks))
