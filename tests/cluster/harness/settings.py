"""What one cluster was told at `up`, kept in its state folder for all later commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cluster.harness.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Read by everything that starts a component or a node. Frozen for the cluster's life."""

    nodes: int = 3
    """Workers; the control plane's node comes on top."""
    zones: int = 3
    """Zones that the workers are spread over."""
    grace_seconds: int = 8
    """Silence after which a node is NotReady."""
    toleration_seconds: int = 300
    """How long a pod stays bound to a lost node unless it says otherwise."""
    proxy_mode: str = "nftables"
    """kube-proxy's: nftables or iptables."""
    network_policy: bool = True
    """Whether kube-router enforces NetworkPolicy."""
    reserved_memory: str = "16Gi"
    """Memory of the machine that no node offers to pods."""
    reserved_cpu: str = "0"
    mounts: tuple[str, ...] = ()
    """SOURCE:TARGET, a folder of the machine that every node shows read-only under TARGET."""
    images: tuple[str, ...] = ()
    """Image archives that every node has from the start."""
    port: int = 0
    """Loopback port of the API server; `up` chooses it."""
    seed: str = ""
    """Folder from which a new node gets its images; `up` makes it."""

    def write(self, cluster: Layout) -> None:
        """Keep for the commands that follow."""
        cluster.settings.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, cluster: Layout) -> Settings | None:
        """None if the cluster is not up."""
        try:
            fields = json.loads(cluster.settings.read_text())
        except (OSError, ValueError):
            return None
        lists = {name: tuple(fields[name]) for name in ("mounts", "images")}
        return cls(**(fields | lists))

    def same_cluster(self, other: Settings) -> bool:
        """Whether a cluster that runs with `other` is what `self` asks for."""
        mine, theirs = asdict(self), asdict(other)
        chosen = {"port", "seed"}
        return all(mine[name] == theirs[name] for name in mine.keys() - chosen)
