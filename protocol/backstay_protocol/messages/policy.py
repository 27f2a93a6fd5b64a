"""What operator and people may change of a running job, and where its pods run."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_protocol.topology import Retention, Schedule


@dataclass(frozen=True, kw_only=True)
class TierPolicy:
    """When one tier takes a checkpoint, and what it keeps."""

    schedule: Schedule = field(default_factory=Schedule)
    retention: Retention | None = None
    """None: the tier has none of its own (memory, neighbor)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """PUT /v1/policy at the leader, and its answer: schedules and retention, from a step on."""

    every_steps: int = 0
    """The capture interval alone, for those who speak 1.0; passed over where `tiers` has memory."""
    effective_from: int = 0
    """Asked: not before this step. Answered: from this step on."""
    tiers: dict[str, TierPolicy] = field(default_factory=dict)
    """Asked: what changes. Answered: every configured tier."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """All that is in force, in the leader's word; every sidecar keeps it and tells a new leader."""

    number: int = 0
    """Grows with each change."""
    over: dict[str, TierPolicy] = field(default_factory=dict)
    """What the topology said when this was decided: another topology is a change of its own."""
    entries: tuple[Policy, ...] = ()
    """Oldest first; each holds until the next one's step. Empty: nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """PUT /v1/placement at the leader: what only the operator knows of the nodes."""

    nodes: dict[int, str] = field(default_factory=dict)
    """Replica -> node. A domain counts for the replica only while its sidecar says the same."""
    domains: dict[int, str] = field(default_factory=dict)
    """Replica -> failure domain of that node, where it has one."""
