"""What the operator may do: exactly this, each rule with its reason in the template."""

from __future__ import annotations

import re
from typing import Any

from support.rendered_chart import CHART, NAMESPACE, objects, the

JOBS = {
    ("backstay.dev", "trainingjobs", "get list watch patch delete"),
    ("backstay.dev", "trainingjobs/status", "patch"),
    ("", "pods", "get list watch create patch delete"),
    ("", "services", "create patch"),
    ("", "configmaps", "create patch"),
    ("", "secrets", "get create delete"),
    ("", "persistentvolumeclaims", "create"),
    ("policy", "poddisruptionbudgets", "create patch list"),
    ("networking.k8s.io", "networkpolicies", "create patch"),
    ("events.k8s.io", "events", "create patch"),
}
CLUSTER = {
    ("", "nodes", "list watch"),
    ("apiextensions.k8s.io", "customresourcedefinitions trainingjobs.backstay.dev", "get"),
    ("", "namespaces kube-system", "get"),
}
EVERYWHERE = {("apiextensions.k8s.io", "customresourcedefinitions", "list watch")}
LEASE = {
    ("coordination.k8s.io", "leases", "create"),
    ("coordination.k8s.io", "leases backstay-operator", "get update"),
}


KEY = {("", "secrets", "create"), ("", "secrets backstay-operator-key", "get")}


def rules(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(group, resource and its names, verbs in the order they were written)."""
    found: dict[tuple[str, str], list[str]] = {}
    for rule in role["rules"]:
        assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                name = " ".join([resource, *rule.get("resourceNames", [])])
                found.setdefault((group, name), []).extend(rule["verbs"])
    return {(group, name, " ".join(verbs)) for (group, name), verbs in found.items()}


def test_for_all_namespaces_there_is_one_cluster_role() -> None:
    trees = objects()
    assert rules(the("ClusterRole", trees, "backstay-operator")) == JOBS | CLUSTER | EVERYWHERE
    assert rules(the("Role", trees, "backstay-operator-lease")) == LEASE
    assert rules(the("Role", trees, "backstay-operator-key")) == KEY
    binding = the("ClusterRoleBinding", trees)
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "backstay-operator", "namespace": NAMESPACE}
    ]


def test_with_a_list_of_namespaces_jobs_are_out_of_reach_elsewhere() -> None:
    trees = objects({"namespaces": ["a", "b"]})
    assert rules(the("ClusterRole", trees, "backstay-operator")) == CLUSTER
    roles = [t for t in trees if t["kind"] == "Role" and t["metadata"]["namespace"] in "ab"]
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    assert all(rules(role) == JOBS for role in roles)
    bindings = [
        t for t in trees if t["kind"] == "RoleBinding" and t["metadata"]["namespace"] in "ab"
    ]
    assert [binding["metadata"]["namespace"] for binding in bindings] == ["a", "b"]
    assert all(binding["subjects"][0]["namespace"] == NAMESPACE for binding in bindings)


def test_a_cluster_with_a_name_needs_no_look_at_kube_system() -> None:
    role = the("ClusterRole", objects({"clusterName": "lab"}), "backstay-operator")
    assert rules(role) == JOBS | EVERYWHERE | CLUSTER - {("", "namespaces kube-system", "get")}


def test_nothing_reaches_roles_tokens_or_shells_and_no_secret_is_listed() -> None:
    for tree in objects():
        if tree["kind"] not in ("ClusterRole", "Role"):
            continue
        for group, resource, verbs in rules(tree):
            assert "*" not in (group, resource, verbs)
            assert group not in ("rbac.authorization.k8s.io", "authentication.k8s.io")
            assert "/exec" not in resource
            assert "token" not in resource
            if resource == "secrets":
                assert not {"list", "watch", "update", "patch"} & set(verbs.split())


def test_people_get_jobs_by_the_clusters_own_roles_and_never_their_status() -> None:
    edit = the("ClusterRole", objects(), "backstay-edit")
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert {resource for _, resource, _ in rules(edit)} == {"trainingjobs"}
    view = the("ClusterRole", objects(), "backstay-view")
    assert {verbs for _, _, verbs in rules(view)} == {"get list watch"}


def test_every_rule_has_its_reason_above_it() -> None:
    found = 0
    for path in sorted((CHART / "templates").rglob("*")):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for number, line in enumerate(lines):
            if re.match(r"\s*- apiGroups:", line):
                found += 1
                assert lines[number - 1].lstrip().startswith("# "), f"{path.name}:{number + 1}"
    assert found > 12
