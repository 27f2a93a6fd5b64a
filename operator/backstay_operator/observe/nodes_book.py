"""All nodes of the cluster, listed at most every few seconds for all jobs together."""

from __future__ import annotations

import asyncio

from backstay_operator.cluster import NODE, Cluster
from backstay_operator.decide import NodeState
from backstay_operator.observe.nodes import node_state
from backstay_protocol.clock import Clock

FRESH_SECONDS = 5.0
YOUNG_SECONDS = 1.0


class NodesBook:
    """One LIST serves every job that asks within FRESH_SECONDS."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        """Empty: the first who asks lists."""
        self._cluster = cluster
        self._clock = clock
        self._lock = asyncio.Lock()
        self._nodes: dict[str, NodeState] = {}
        self._listed_at = float("-inf")
        self._keys: set[str] = set()

    async def nodes(self, wanted: set[str], topology_key: str = "") -> dict[str, NodeState]:
        """By name. `wanted`: nodes of a job's pods; one that is missing is looked for again."""
        async with self._lock:
            age = self._clock.monotonic() - self._listed_at
            new_key = bool(topology_key) and topology_key not in self._keys
            missing = not wanted <= self._nodes.keys() and age > YOUNG_SECONDS
            if age > FRESH_SECONDS or missing or new_key:
                await self._list(topology_key)
            return self._nodes

    async def _list(self, topology_key: str) -> None:
        if topology_key:
            self._keys.add(topology_key)
        trees = await self._cluster.find(NODE)
        keys = frozenset(self._keys)
        self._nodes = {tree["metadata"]["name"]: node_state(tree, keys) for tree in trees}
        self._listed_at = self._clock.monotonic()
