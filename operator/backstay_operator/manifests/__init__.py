"""Builders of Kubernetes objects. Pure: they take values and return plain dicts.

The control loop sends the dicts to the API server; the local runner interprets them with processes
and folders.
"""

from backstay_operator.manifests.launcher import launcher_env
from backstay_operator.manifests.pods import build_pod
from backstay_operator.manifests.topology import build_policy, build_topology, pod_identity
from backstay_operator.manifests.wiring import Addresses, Wiring

__all__ = [
    "Addresses",
    "Wiring",
    "build_pod",
    "build_policy",
    "build_topology",
    "launcher_env",
    "pod_identity",
]
