"""Whether a node is lost, and whether it is being emptied. Pure; asked by who observes pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
MISSED_SECONDS = 10.0
"""A replica that its leader has not heard for so long is missed."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """The few fields of a Node that matter here."""

    name: str
    ready: bool = True
    ready_word: str = "True"
    """True, False or Unknown (the kubelet is silent), as the API says."""
    since: float = 0.0
    """When that last changed, seconds since the epoch."""
    taints: tuple[str, ...] = ()
    """Keys."""
    labels: Mapping[str, str] = field(default_factory=dict)


def why_lost(
    name: str, node: NodeState | None, *, missed_seconds: float, limit_seconds: float, now: float
) -> str:
    """Why a pod's node counts as lost; empty if it does not.

    `node`: None if the API has no such Node. `missed_seconds`: how long the leader has not heard
    the replica; a node that is not Ready either confirms that it is gone, without more waiting.
    """
    if node is None:
        return f"there is no Node {name} any more"
    if OUT_OF_SERVICE in node.taints:
        return f"somebody marked it with {OUT_OF_SERVICE}"
    if node.ready:
        return ""
    away = max(0.0, now - node.since)
    words = f"Ready={node.ready_word} for {away:.0f} s"
    if away >= limit_seconds:
        return words
    if missed_seconds >= MISSED_SECONDS:
        return f"{words}, and its sidecar has been silent for {missed_seconds:.0f} s"
    return ""


def drain_taint(node: NodeState | None, keys: Sequence[str]) -> str:
    """Key of the taint that says that the node is being emptied; empty if there is none."""
    if node is None:
        return ""
    return next((key for key in keys if key in node.taints), "")
