"""Conditions of a status: times and generations added, what did not change kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backstay_operator.api import names
from backstay_operator.cluster import Tree
from backstay_operator.decide import Condition
from backstay_operator.times import text_of

_MOST_MESSAGE = 4096
_GOES_AWAY = {
    names.SUSPENDED: ("Resumed", "spec.suspend is false"),
    names.RESTORING: (names.REASON_WAITING, "the leader does not answer"),
}
"""Conditions that must not stand when nobody tells them any more."""


def merged(
    old: Iterable[Tree], told: Iterable[Condition], *, generation: int, now: float
) -> list[dict[str, Any]]:
    """The list for the status. What nobody tells now stays as it was observed."""
    before = {tree.get("type", ""): tree for tree in old}
    new = {condition.type: condition for condition in told}
    for name, (reason, message) in _GOES_AWAY.items():
        if name not in new and before.get(name, {}).get("status") == "True":
            new[name] = Condition(type=name, status=False, reason=reason, message=message)
    fresh = {
        name: _tree(condition, before.get(name, {}), generation, now)
        for name, condition in new.items()
    }
    order = [*names.CONDITIONS, *sorted(before.keys() - set(names.CONDITIONS))]
    every = {**before, **fresh}
    return [dict(every[name]) for name in order if name in every]


def _tree(condition: Condition, before: Tree, generation: int, now: float) -> dict[str, Any]:
    status = "True" if condition.status else "False"
    same = before.get("status") == status and before.get("lastTransitionTime")
    return {
        "type": condition.type,
        "status": status,
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if same else text_of(now),
        "reason": condition.reason,
        "message": shortened(condition.message, _MOST_MESSAGE),
    }


def shortened(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
