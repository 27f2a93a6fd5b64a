"""What the operator asks of a cluster: one small interface of plain dicts.

`kube.py` implements it over the Kubernetes client, tests/support/fake_api.py for tests. Observers
and the applier take it as an argument; nothing else may reach the API server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from backstay_operator.api.names import API_VERSION, KIND

Tree = dict[str, Any]
FIELD_MANAGER = "backstay-operator"


@dataclass(frozen=True)
class Kind:
    """One kind of object."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True


TRAINING_JOB = Kind(API_VERSION, KIND, "trainingjobs")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
SERVICE = Kind("v1", "Service", "services")
SECRET = Kind("v1", "Secret", "secrets")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
CRD = Kind(
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)


def belongs_to(tree: Tree, uid: str) -> bool:
    """Whether the job of that uid owns it: an earlier job of the same name may not be gone yet."""
    owners = tree["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)


class Cluster(Protocol):
    """Every call is bounded in time and may raise Refused or Unreachable (errors.py)."""

    async def find(self, kind: Kind, namespace: str = "", selector: str = "") -> list[Tree]:
        """All objects as they are now (a consistent read), of one namespace or of all."""
        ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Tree | None:
        """One object; None: there is none."""
        ...

    async def create(self, kind: Kind, body: Tree) -> Tree:
        """Create it. Raises AlreadyThere."""
        ...

    async def replace(self, kind: Kind, body: Tree) -> Tree:
        """Put it, with the resourceVersion that it carries. Raises Conflict."""
        ...

    async def apply(self, kind: Kind, body: Tree, *, status: bool = False) -> Tree:
        """Server-side apply, forced. With a resourceVersion in it: raises Conflict."""
        ...

    async def merge(self, kind: Kind, namespace: str, name: str, body: Tree) -> Tree | None:
        """Merge patch; None: it is gone."""
        ...

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> bool:
        """Delete exactly the object with that uid; False: it was gone already."""
        ...
