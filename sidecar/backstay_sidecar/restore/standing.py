"""The policy that stands, as the leader decides it. No I/O; used by duties.

A new leader process says nothing of it until it has heard what the sidecars remember: what was
changed on the running job outlives it. Where its own topology has been changed since then, that is
a change like any other, announced to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backstay_protocol import policies
from backstay_protocol.messages import Policies, Policy, TierPolicy
from backstay_protocol.topology import Retention, Schedule, Tiers


class Standing:
    """One per leader."""

    def __init__(self, tiers: Tiers) -> None:
        """As the topology says, until something else is heard."""
        self._own = policies.of_tiers(tiers)
        self._policies = policies.of_topology(tiers)
        self._heard = False
        self.settled = False
        """Whether it is known what stands."""
        self.wanted: Mapping[str, TierPolicy] = {}
        """The topology's own, where it is newer than what stands: set it when all ranks train."""

    def hear(self, told: Policies) -> None:
        """What a sidecar remembers. Only a leader that does not know yet listens.

        Pods older than a tier know nothing of it: it goes by this topology from the beginning.
        """
        fits = {name for policy in told.entries for name in policy.tiers} <= self._own.keys()
        newer = not self._heard or told.number > self._policies.number
        if told.entries and fits and newer and not self.settled:
            entries = (replace(p, tiers={**self._own, **p.tiers}) for p in told.entries)
            self._policies, self._heard = replace(told, entries=tuple(entries)), True

    def settle(self) -> None:
        """All that could be heard was heard."""
        if self.settled:
            return
        self.settled = True
        heard = self._policies
        if heard.over != self._own and policies.newest(heard) != self._own:
            self.wanted = self._own
        self._policies = replace(heard, over=self._own)

    def begin(self, first_step: int) -> int:
        """An attempt is about to begin with this step: its capture interval, 0: none by steps."""
        self.settle()
        if self.wanted:
            self.change(self.wanted, first_step)
        self._policies = policies.begun(self._policies, first_step)
        return policies.capture_steps(self.at(first_step))

    def change(self, change: Mapping[str, TierPolicy], from_step: int) -> Policy:
        """From that step on. The caller has named it to all."""
        self.settle()
        whole, self.wanted = {**self.wanted, **change}, {}
        self._policies = policies.changed(self._policies, whole, from_step)
        return self._policies.entries[-1]

    def problem(self, change: Mapping[str, TierPolicy]) -> str:
        """Why it can't be changed so; empty: it can."""
        return policies.problem(self._own, change)

    def stands(self, change: Mapping[str, TierPolicy]) -> bool:
        """Whether that is what was set last: asked again, it changes nothing."""
        newest = policies.newest(self._policies)
        return self.settled and not self.wanted and {**newest, **change} == newest

    @property
    def was_changed(self) -> bool:
        """Whether anything was changed on the running job, as far as was heard."""
        return self._heard and self._policies.number > 0

    @property
    def word(self) -> Policies:
        """What all sidecars are told."""
        return self._policies if self.settled else Policies()

    @property
    def newest(self) -> Policy:
        """What was set last."""
        return self._policies.entries[-1]

    def at(self, step: int) -> Mapping[str, TierPolicy]:
        """What holds at a step."""
        return policies.at(self._policies.entries, step)

    def schedule(self, tier: str, step: int) -> Schedule:
        """Of one tier."""
        return self.at(step)[tier].schedule

    def retention(self, tier: str, step: int) -> Retention:
        """Of one tier that has one."""
        return policies.retention(self.at(step), tier)
