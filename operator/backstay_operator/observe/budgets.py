"""PodDisruptionBudgets of others that select a job's pods: with two, every eviction fails. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backstay_operator.cluster import Tree, belongs_to

MOST_NAMED = 5


def foreign_budgets(budgets: Iterable[Tree], pods: Iterable[Tree], uid: str) -> tuple[str, ...]:
    """Names of those that select any of the pods and are not the job's own (`uid`)."""
    labels = [pod["metadata"].get("labels") or {} for pod in pods]
    found = sorted(
        str(budget["metadata"]["name"])
        for budget in budgets
        if not belongs_to(budget, uid)
        and any(selects((budget.get("spec") or {}).get("selector"), each) for each in labels)
    )
    return tuple(found[:MOST_NAMED])


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector as policy/v1 means it: none selects nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return False
    return all(_holds(each, labels) for each in selector.get("matchExpressions") or ())


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(str(expression.get("key")))
    values = expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False
