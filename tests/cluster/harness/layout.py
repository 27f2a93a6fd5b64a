"""Names, paths and addresses of one test cluster.

All addresses belong to network namespaces that the cluster makes itself. They
are taken from the block reserved for benchmarks (198.18.0.0/15), and nothing
of it is routed in the machine's own namespace: the API server is reached
through a forwarder on the loopback interface.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "v1.34.4"
CONTROL_IP = "198.18.0.1"
NODE_PREFIX_LEN = 24
POD_CIDR = "198.18.64.0/18"
SERVICE_CIDR = "198.18.128.0/20"
SERVICE_API_IP = "198.18.128.1"
SERVICE_DNS_IP = "198.18.128.10"
CLUSTER_DOMAIN = "cluster.local"
BRIDGE_MAC = "02:00:c6:12:00:01"
MAX_NODES = 60
PAUSE_IMAGE = "backstay.test/pause:1"
DNS_IMAGE = "backstay.test/coredns:1"
CONTROL_NODE = 0

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]


def module(name: str) -> list[str]:
    """Command that runs one of this package's modules as a process; needs `module_env`."""
    return [sys.executable, "-P", "-m", f"cluster.harness.{name}"]


def module_env() -> dict[str, str]:
    """Environment in which this package can be imported from any folder."""
    return os.environ | {"PYTHONPATH": str(TESTS)}


def cache_dir() -> Path:
    """Folder of built binaries and images, kept from run to run."""
    default = Path.home() / ".cache" / "backstay-cluster"
    return Path(os.environ.get("BACKSTAY_CLUSTER_CACHE", default))


def bin_dir() -> Path:
    """Folder of the built binaries."""
    return cache_dir() / "bin"


def node_name(index: int) -> str:
    """Name of the node with this number: workers count from 1."""
    return "control" if index == CONTROL_NODE else f"node-{index}"


def node_ip(index: int) -> str:
    """Address of a node on the cluster's bridge."""
    return f"198.18.0.{10 + index}"


def pod_cidr(index: int) -> str:
    """The node's own range of pod addresses."""
    return f"198.18.{64 + index}.0/24"


@dataclass(frozen=True)
class Layout:
    """Where one cluster keeps its files, and what its kernel objects are called."""

    name: str
    state: Path

    @classmethod
    def load(cls, name: str | None = None) -> Layout:
        """The cluster that the environment or the argument names."""
        name = name or os.environ.get("BACKSTAY_CLUSTER_NAME", "backstay")
        base = Path(os.environ.get("BACKSTAY_CLUSTER_STATE", "/tmp/backstay-cluster"))
        return cls(name=name, state=(base / name).resolve())

    @property
    def netns(self) -> str:
        """The control plane's network namespace, which also holds the bridge."""
        return f"{self.name}-control"

    @property
    def cgroup(self) -> str:
        """Name of the cluster's folder in every cgroup hierarchy."""
        return f"cluster-{self.name}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's way in."""
        return self.state / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.state / "pki"

    @property
    def config(self) -> Path:
        """Configuration files of every component."""
        return self.state / "config"

    @property
    def run(self) -> Path:
        """Process numbers."""
        return self.state / "run"

    @property
    def logs(self) -> Path:
        """One file a component, one folder a node."""
        return self.state / "logs"

    @property
    def settings(self) -> Path:
        """What `up` was told."""
        return self.state / "cluster.json"

    def disk(self, index: int) -> Path:
        """The folder that is the node's /var: its disk, kept over a power loss."""
        return self.state / "disks" / node_name(index)
