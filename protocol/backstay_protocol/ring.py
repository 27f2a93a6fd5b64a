"""Who keeps whose copies: a ring over replicas, from where their pods really run. Pure.

Used by the leader (or the operator, who knows more about nodes) whenever pods move. Never the same
node if there is another; another failure domain where possible; each replica keeps for one other
unless nodes are too unequal for that. The old copy goes only when the new one is complete: see
retention.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ring:
    """Replica -> the replica that keeps its copies, and what is not as it should be."""

    neighbors: dict[int, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    same_node: tuple[int, ...] = ()
    """Replicas whose neighbour runs on the same node."""
    same_domain: tuple[int, ...] = ()
    """Replicas whose neighbour is in the same failure domain; a node not known to be in one is a
    domain of its own."""


def neighbors(
    replicas: Iterable[int],
    where: Mapping[int, str],
    domain: Mapping[int, str] | None = None,
) -> Ring:
    """The ring. `where`: replica -> node, `domain`: replica -> failure domain (rack, zone).

    A replica whose node is not known is taken to be on a node of its own.
    """
    order = sorted(set(replicas))
    if len(order) < 2:
        return Ring({}, ("one replica has no neighbor",) if order else ())
    nodes = {replica: where.get(replica, f"?{replica}") for replica in order}
    domains = {replica: (domain or {}).get(replica, nodes[replica]) for replica in order}
    ring = _best_shift(_grouped(order, nodes, domains), nodes, domains)
    _mend(ring, nodes)
    return Ring(
        ring,
        _warnings(ring, nodes, domains if domain else nodes),
        same_node=tuple(r for r, other in sorted(ring.items()) if nodes[r] == nodes[other]),
        same_domain=tuple(r for r, other in sorted(ring.items()) if domains[r] == domains[other]),
    )


def _grouped(order: list[int], nodes: Mapping[int, str], domains: Mapping[int, str]) -> list[int]:
    """Replicas of one domain, and in it of one node, side by side; first seen, first placed."""
    first_in_domain: dict[str, int] = {}
    first_on_node: dict[str, int] = {}
    for replica in order:
        first_in_domain.setdefault(domains[replica], replica)
        first_on_node.setdefault(nodes[replica], replica)
    return sorted(order, key=lambda r: (first_in_domain[domains[r]], first_on_node[nodes[r]], r))


def _best_shift(
    order: list[int], nodes: Mapping[int, str], domains: Mapping[int, str]
) -> dict[int, int]:
    """Shifting groups past the largest one parts all pairs, where that can be done at all."""
    count = len(order)
    sizes = {_largest(order, nodes), _largest(order, domains), 1}

    def shifted(by: int) -> dict[int, int]:
        return {replica: order[(i + by) % count] for i, replica in enumerate(order)}

    def together(by: int) -> tuple[int, int, int]:
        pairs = shifted(by).items()
        return (
            sum(nodes[a] == nodes[b] for a, b in pairs),
            sum(domains[a] == domains[b] for a, b in pairs),
            by,
        )

    return shifted(min((by for by in sizes if by < count), key=together))


def _largest(order: list[int], group: Mapping[int, str]) -> int:
    sizes: dict[str, int] = {}
    for replica in order:
        sizes[group[replica]] = sizes.get(group[replica], 0) + 1
    return max(sizes.values())


def _mend(ring: dict[int, int], nodes: Mapping[int, str]) -> None:
    """A node with more than half of all replicas: some others then keep for several."""
    load = dict.fromkeys(ring, 1)
    for replica in ring:
        if nodes[ring[replica]] != nodes[replica]:
            continue
        others = [other for other in ring if nodes[other] != nodes[replica]]
        if others:
            load[ring[replica]] -= 1
            ring[replica] = min(others, key=lambda other: (load[other], other))
            load[ring[replica]] += 1


def _warnings(
    ring: Mapping[int, int], nodes: Mapping[int, str], domains: Mapping[int, str]
) -> tuple[str, ...]:
    same_node = [replica for replica, other in ring.items() if nodes[replica] == nodes[other]]
    if same_node:
        return (
            f"all {len(ring)} replicas run on node {nodes[same_node[0]]}: "
            "the neighbor tier does not survive its loss",
        )
    same_domain = sum(domains[replica] == domains[other] for replica, other in ring.items())
    if same_domain:
        return (
            f"{same_domain} of {len(ring)} replicas have their neighbor in the same failure domain",
        )
    return ()
