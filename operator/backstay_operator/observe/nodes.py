"""A Node object to the few fields that decisions need. Pure."""

from __future__ import annotations

from backstay_operator.cluster import Tree
from backstay_operator.decide import NodeState
from backstay_operator.times import seconds

_KEPT_LABELS = ("topology.kubernetes.io/", "kubernetes.io/hostname")


def node_state(tree: Tree, topology_keys: frozenset[str] = frozenset()) -> NodeState:
    """Labels are kept for topology only, and for the keys that jobs name."""
    metadata, spec = tree["metadata"], tree.get("spec") or {}
    conditions = (tree.get("status") or {}).get("conditions") or []
    ready: Tree = next((c for c in conditions if c.get("type") == "Ready"), {})
    word = str(ready.get("status", "Unknown"))
    labels = metadata.get("labels") or {}
    return NodeState(
        name=metadata["name"],
        ready=word == "True",
        ready_word=word,
        since=seconds(ready.get("lastTransitionTime")),
        taints=tuple(str(taint.get("key", "")) for taint in spec.get("taints") or []),
        labels={
            key: value
            for key, value in labels.items()
            if key.startswith(_KEPT_LABELS) or key in topology_keys
        },
    )
