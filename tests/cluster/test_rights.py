"""The chart's objects and rights on a real API server: all are taken, and allow what the docs say.

The API server runs alone on loopback, so nothing is started; rights are asked with access reviews.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster import machine
from cluster.harness import layout
from support.api_server import ApiServer, running
from support.rendered_chart import NAMESPACE, objects

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:backstay-operator"
STRANGER = "system:serviceaccount:team-a:default"
PATHS = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "FlowSchema": "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas",
    "PriorityLevelConfiguration": (
        "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations"
    ),
}
NAMED_MODE = {"namespaces": ["team-a"]}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not (layout.bin_dir() / "kube-apiserver").exists():
        machine.build_programs()
    with running(layout.bin_dir(), tmp_path_factory.mktemp("api-server")) as it:
        for name in (NAMESPACE, "team-a", "team-b"):
            it.must("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        yield it


def made(api: ApiServer, values: dict[str, Any], kinds: tuple[str, ...] = ()) -> list[str]:
    """Create the release's objects of some kinds (all, as a trial, if none); their paths."""
    paths = []
    for tree in objects(values):
        if kinds and tree["kind"] not in kinds:
            continue
        path = PATHS[tree["kind"]].format(tree["metadata"].get("namespace", ""))
        query = {"fieldValidation": "Strict"} | ({} if kinds else {"dryRun": "All"})
        api.must("POST", path, tree, **query)
        paths.append(f"{path}/{tree['metadata']['name']}")
    return paths


@pytest.mark.parametrize(
    "values",
    [{}, {"operator": {"replicas": 2}, "flowSchema": {"enabled": True}}, NAMED_MODE],
    ids=["defaults", "all switches", "named namespaces"],
)
def test_the_api_server_takes_every_object_of_the_chart(
    api: ApiServer, values: dict[str, Any]
) -> None:
    assert len(made(api, values)) >= 12


@pytest.fixture(params=["everywhere", "in named namespaces"])
def mode(request: pytest.FixtureRequest, api: ApiServer) -> Iterator[str]:
    values = NAMED_MODE if request.param != "everywhere" else {}
    kinds = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    paths = made(api, values, kinds)
    yield request.param
    for path in paths:
        api.must("DELETE", path)


def may(
    api: ApiServer, user: str, verb: str, resource: str, namespace: str, name: str = ""
) -> bool:
    group, _, resource = resource.rpartition("/")
    resource, _, part = resource.partition(":")
    attributes = {"verb": verb, "group": group, "resource": resource, "subresource": part}
    attributes |= {"namespace": namespace, "name": name}
    groups = ["system:serviceaccounts", "system:authenticated"]
    spec = {"user": user, "groups": groups, "resourceAttributes": attributes}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    return bool(api.must("POST", REVIEWS, body)["status"]["allowed"])


NEEDED = [
    ("list", "backstay.dev/trainingjobs"),
    ("watch", "backstay.dev/trainingjobs"),
    ("patch", "backstay.dev/trainingjobs:status"),
    ("delete", "backstay.dev/trainingjobs"),
    ("list", "pods"),
    ("create", "pods"),
    ("delete", "pods"),
    ("patch", "pods"),
    ("create", "services"),
    ("patch", "configmaps"),
    ("create", "secrets"),
    ("get", "secrets"),
    ("create", "policy/poddisruptionbudgets"),
    ("create", "networking.k8s.io/networkpolicies"),
    ("create", "events.k8s.io/events"),
]
NEVER = [
    ("list", "secrets"),
    ("watch", "secrets"),
    ("update", "secrets"),
    ("create", "pods:exec"),
    ("create", "pods:attach"),
    ("create", "serviceaccounts:token"),
    ("create", "rbac.authorization.k8s.io/roles"),
    ("bind", "rbac.authorization.k8s.io/clusterroles"),
    ("escalate", "rbac.authorization.k8s.io/roles"),
    ("impersonate", "users"),
    ("create", "backstay.dev/trainingjobs"),
    ("update", "nodes"),
    ("patch", "nodes"),
    ("delete", "nodes"),
    ("delete", "namespaces"),
    ("create", "apps/deployments"),
    ("patch", "apiextensions.k8s.io/customresourcedefinitions"),
]


def test_the_operator_may_do_what_it_must(api: ApiServer, mode: str) -> None:
    assert [n for n in NEEDED if not may(api, OPERATOR, *n, "team-a")] == []
    assert may(api, OPERATOR, "watch", "nodes", "")
    lease = "coordination.k8s.io/leases"
    assert may(api, OPERATOR, "create", lease, NAMESPACE)
    assert may(api, OPERATOR, "update", lease, NAMESPACE, "backstay-operator")


def test_the_operator_may_do_nothing_else_of_weight(api: ApiServer, mode: str) -> None:
    assert [n for n in NEVER if may(api, OPERATOR, *n, "team-a")] == []
    lease = "coordination.k8s.io/leases"
    assert not may(api, OPERATOR, "update", lease, NAMESPACE, "kube-scheduler")
    assert not may(api, OPERATOR, "update", lease, "team-a", "backstay-operator")


def test_named_namespaces_are_the_only_ones_in_reach(api: ApiServer, mode: str) -> None:
    reached = [n for n in NEEDED if may(api, OPERATOR, *n, "team-b")]
    assert reached == (NEEDED if mode == "everywhere" else [])


def test_a_pods_own_account_may_do_nothing(api: ApiServer, mode: str) -> None:
    asked = [*NEEDED, *NEVER]
    assert [n for n in asked if may(api, STRANGER, *n, "team-a")] == []
