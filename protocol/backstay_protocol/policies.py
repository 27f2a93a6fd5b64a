"""Schedules and retention of a running job: which of them holds at which step. Pure.

Leader and sidecars keep the same short list of policies; each holds from a step on that all ranks
were told of in time, until the next one's. The list is never empty where these are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from backstay_protocol.messages import Policies, Policy, TierPolicy
from backstay_protocol.names import MEMORY, TIERS
from backstay_protocol.topology import Retention, Schedule, Tiers

NO_STEPS = 10**15
"""A capture interval by steps that never comes: memory's schedule is by seconds then."""
KEPT = 4
"""Policies that are remembered; what was captured under older ones has long gone its way."""


def of_tiers(tiers: Tiers) -> dict[str, TierPolicy]:
    """What a topology says of each configured tier."""
    found = {name: getattr(tiers, name) for name in TIERS}
    return {
        name: TierPolicy(schedule=tier.schedule, retention=getattr(tier, "retention", None))
        for name, tier in found.items()
        if tier is not None
    }


def of_topology(tiers: Tiers) -> Policies:
    """Before anything was changed."""
    own = of_tiers(tiers)
    steps = own[MEMORY].schedule.every_steps
    return Policies(over=own, entries=(Policy(every_steps=steps, tiers=own),))


def at(entries: Sequence[Policy], step: int) -> Mapping[str, TierPolicy]:
    """The one that holds for a checkpoint of this step."""
    held = [policy for policy in entries if policy.effective_from <= step]
    return (held[-1] if held else entries[0]).tiers


def newest(policies: Policies) -> Mapping[str, TierPolicy]:
    """The one that was set last, whether it holds already or not."""
    return policies.entries[-1].tiers


def changed(policies: Policies, change: Mapping[str, TierPolicy], from_step: int) -> Policies:
    """With a change from a step on; what was to begin there or later does not any more."""
    tiers = {**newest(policies), **change}
    earlier = tuple(p for p in policies.entries if p.effective_from < from_step)
    steps = tiers[MEMORY].schedule.every_steps
    entries = (*earlier, Policy(every_steps=steps, effective_from=from_step, tiers=tiers))
    return replace(policies, number=policies.number + 1, entries=entries[-KEPT:])


def begun(policies: Policies, first_step: int) -> Policies:
    """An attempt begins: what was to hold from a later step on holds from its first one."""
    if policies.entries[-1].effective_from <= first_step:
        return policies
    return changed(policies, {}, first_step)


def capture_steps(tiers: Mapping[str, TierPolicy]) -> int:
    """The capture interval for control blocks."""
    return tiers[MEMORY].schedule.every_steps or NO_STEPS


def problem(known: Mapping[str, TierPolicy], change: Mapping[str, TierPolicy]) -> str:
    """Why a change can't be made on a running job; empty: it can."""
    for name, tier in change.items():
        if name not in known:
            there = ", ".join(known)
            return (
                f"tier {name!r} is not configured; this job has {there}: another one needs a start"
            )
        if (tier.retention is None) != (known[name].retention is None):
            wants = "needs a" if tier.retention is None else "has no"
            return f"tier {name!r} {wants} retention"
    if MEMORY in change and change[MEMORY].schedule == Schedule():
        return "memory needs everySteps or everySeconds: without, nothing would be saved"
    return ""


def retention(tiers: Mapping[str, TierPolicy], name: str) -> Retention:
    """Of a tier that has one."""
    found = tiers[name].retention
    assert found is not None, name
    return found
