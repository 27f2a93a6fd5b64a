"""What the chart makes of its values."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import helm_python
import pytest
import yaml

from backstay_operator.api import read_job
from backstay_operator.config import read_config
from backstay_operator.manifests.objects import build_network_policy
from support.bad_jobs import job
from support.rendered_chart import CHART, NAMESPACE, objects, rendered, the

EVERYTHING: dict[str, Any] = {
    "operator": {"replicas": 2},
    "metrics": {
        name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")
    },
    "flowSchema": {"enabled": True},
}
DIGEST = "sha256:" + "a" * 64


def kinds(values: dict[str, Any] | None = None) -> list[str]:
    return sorted(f"{tree['kind']} {tree['metadata']['name']}" for tree in objects(values))


def container(values: dict[str, Any] | None = None) -> dict[str, Any]:
    (found,) = the("Deployment", objects(values))["spec"]["template"]["spec"]["containers"]
    return dict(found)


def config(values: dict[str, Any] | None = None) -> dict[str, Any]:
    text = the("ConfigMap", objects(values), "backstay-operator")["data"]["operator.yaml"]
    return dict(yaml.safe_load(text))


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"namespaces": ["a", "b"]}], ids=str)
def test_helm_finds_nothing_to_complain_about(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    worse = [m for m in report["messages"] if m["severity"] > 1]
    assert (worse, report["errors"]) == ([], [])


def test_by_default_there_is_what_an_operator_needs_and_no_more() -> None:
    assert kinds() == [
        "ClusterRole backstay-edit",
        "ClusterRole backstay-operator",
        "ClusterRole backstay-view",
        "ClusterRoleBinding backstay-operator",
        "ConfigMap backstay-operator",
        "CustomResourceDefinition trainingjobs.backstay.dev",
        "Deployment backstay-operator",
        "PodDisruptionBudget backstay-operator",
        "Role backstay-operator-key",
        "Role backstay-operator-lease",
        "RoleBinding backstay-operator-key",
        "RoleBinding backstay-operator-lease",
        "Service backstay-operator-metrics",
        "ServiceAccount backstay-operator",
    ]


# (values, what is more, what is less)
SWITCHES = [
    ({"crds": {"install": False}}, [], ["CustomResourceDefinition trainingjobs.backstay.dev"]),
    (
        {"metrics": {"serviceMonitor": {"enabled": True}}},
        ["PodMonitor backstay-sidecars", "ServiceMonitor backstay-operator"],
        [],
    ),
    ({"metrics": {"prometheusRule": {"enabled": True}}}, ["PrometheusRule backstay"], []),
    ({"metrics": {"dashboard": {"enabled": True}}}, ["ConfigMap backstay-dashboard"], []),
    (
        {"flowSchema": {"enabled": True}},
        ["FlowSchema backstay-operator", "PriorityLevelConfiguration backstay-operator"],
        [],
    ),
    (
        {"operator": {"podDisruptionBudget": {"enabled": False}}},
        [],
        ["PodDisruptionBudget backstay-operator"],
    ),
    (
        {"operator": {"leaderElection": {"enabled": False}}},
        [],
        ["Role backstay-operator-lease", "RoleBinding backstay-operator-lease"],
    ),
    (
        {"operator": {"serviceAccount": {"create": False, "name": "mine"}}},
        [],
        ["ServiceAccount backstay-operator"],
    ),
    (
        {"rbac": {"aggregateToDefaultRoles": False}},
        [],
        ["ClusterRole backstay-edit", "ClusterRole backstay-view"],
    ),
    (
        {"namespaces": ["research"]},
        ["Role backstay-operator", "RoleBinding backstay-operator"],
        [],
    ),
]


@pytest.mark.parametrize(("values", "more", "less"), SWITCHES, ids=lambda v: json.dumps(v)[:70])
def test_each_switch_adds_or_takes_away_its_objects_only(
    values: dict[str, Any], more: list[str], less: list[str]
) -> None:
    before, after = kinds(), kinds(values)
    assert sorted(set(after) - set(before)) == more
    assert sorted(set(before) - set(after)) == less


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"oprator": {}}, "'oprator' not allowed"),
        ({"operator": {"image": {"name": "x"}}}, "'name' not allowed"),
        ({"operator": {"replicas": 3}}, "maximum: got 3, want 2"),
        ({"operator": {"replicas": 2, "leaderElection": {"enabled": False}}}, "must be true"),
        ({"operator": {"image": {"digest": "latest"}}}, "/operator/image/digest"),
        ({"operator": {"log": {"level": "loud"}}}, "/operator/log/level"),
        ({"sidecar": {"resources": {"memory": "lots"}}}, "/sidecar/resources/memory"),
        ({"sidecar": {"graceSeconds": 5}}, "minimum: got 5, want 30"),
        ({"policy": {"allow": {"hostPaths": ["opt"]}}}, "/policy/allow/hostPaths/0"),
        ({"policy": {"allow": {"remotes": {"*": [{"bucket": "x"}]}}}}, "endpoint"),
        ({"policy": {"allowed": {}}}, "'allowed' not allowed"),
        ({"namespaces": ["Research"]}, "/namespaces/0"),
        ({"metrics": {"serviceMonitor": {"enabled": "yes"}}}, "want boolean"),
        ({"crds": {"keep": True}}, "'keep' not allowed"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_values_that_would_be_ignored_or_can_not_work_are_refused(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(words)):
        rendered(values)


def test_a_service_account_that_is_not_made_needs_a_name() -> None:
    values = {"operator": {"serviceAccount": {"create": False}}}
    with pytest.raises(helm_python.HelmError, match=r"serviceAccount\.name is needed"):
        rendered(values)


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, "backstay-{}:0.1.0"),
        ({"tag": "2.0"}, "backstay-{}:2.0"),
        ({"registry": "r.example.org:5000", "tag": "x"}, "r.example.org:5000/backstay-{}:x"),
        ({"digest": DIGEST, "tag": "x"}, f"backstay-{{}}@{DIGEST}"),
        ({"repository": "team/it", "digest": DIGEST}, f"team/it@{DIGEST}"),
    ],
    ids=str,
)
def test_every_image_can_be_named_by_registry_tag_and_digest(
    image: dict[str, Any], reference: str
) -> None:
    values = {"operator": {"image": image}, "sidecar": {"image": image}}
    assert container(values)["image"] == reference.format("operator")
    assert config(values)["sidecar"]["image"] == reference.format("sidecar")


def test_one_registry_serves_all_images_that_name_none() -> None:
    values = {"global": {"imageRegistry": "mirror"}, "sidecar": {"image": {"registry": "own"}}}
    assert container(values)["image"] == "mirror/backstay-operator:0.1.0"
    assert config(values)["sidecar"]["image"] == "own/backstay-sidecar:0.1.0"


def test_images_come_from_values_and_from_nowhere_else() -> None:
    texts = "\n".join(rendered(EVERYTHING | {"global": {"imageRegistry": "mirror"}}).values())
    images = re.findall(r"^\s*image: (.+)$", texts, re.MULTILINE)
    assert len(images) == 2
    assert all("mirror/backstay-" in image for image in images)


def test_nothing_is_privileged_and_the_operator_is_locked_in() -> None:
    pod = the("Deployment", objects())["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        assert field not in pod
    assert not any("hostPath" in volume for volume in pod["volumes"])
    texts = "\n".join(rendered(EVERYTHING).values())
    assert "privileged: true" not in texts.replace(" ", "").replace("privileged:true", "X")


def test_the_operator_is_probed_on_its_health_port_and_has_limits() -> None:
    values = {"operator": {"ports": {"health": 9001, "metrics": 9002}}}
    only = container(values)
    ports = {port["name"]: port["containerPort"] for port in only["ports"]}
    assert ports == {"health": 9001, "metrics": 9002}
    assert config(values)["ports"] == {"health": 9001, "metrics": 9002}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert only[probe]["httpGet"]["port"] == "health"
    assert only["resources"]["limits"]["memory"]


def test_the_operator_does_not_wait_five_minutes_on_a_lost_node() -> None:
    tolerated = the("Deployment", objects())["spec"]["template"]["spec"]["tolerations"]
    seconds = {one["key"].split("/")[1]: one["tolerationSeconds"] for one in tolerated}
    assert seconds == {"not-ready": 15, "unreachable": 15}


def test_a_changed_setting_restarts_the_operator_and_the_same_does_not() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = the("Deployment", objects(values))["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({"crds": {"install": False}})
    assert checksum({}) != checksum({"operator": {"nodeLostSeconds": 45}})


def test_the_operator_reads_its_settings_as_the_values_say() -> None:
    values = {
        "clusterName": "lab",
        "namespaces": ["a", "b"],
        "sidecar": {"resources": {"memory": "1Gi"}, "graceSeconds": 60},
        "operator": {"nodeLostSeconds": 45, "drainTaints": ["x"], "log": {"format": "text"}},
        "policy": {
            "allow": {
                "serviceAccounts": ["default", "writer"],
                "hostPaths": ["/opt/torch"],
                "remotes": {"*": [{"endpoint": "http://s3:8333", "buckets": ["models"]}]},
            }
        },
    }
    found = config(values)
    assert (found["clusterName"], found["namespaces"]) == ("lab", ["a", "b"])
    assert found["sidecar"] == {
        "image": "backstay-sidecar:0.1.0",
        "pullPolicy": "IfNotPresent",
        "cpu": "500m",
        "memory": "1Gi",
        "graceSeconds": 60,
    }
    assert (found["nodeLostSeconds"], found["drainTaints"]) == (45, ["x"])
    assert found["leaderElection"] == {
        "enabled": True,
        "leaseName": "backstay-operator",
        "namespace": NAMESPACE,
    }
    assert found["log"] == {"level": "info", "format": "text"}
    settings = read_config(found)
    assert settings.cluster.node_lost_seconds == 45
    assert settings.sidecar.memory == "1Gi"
    allow = settings.allow
    assert allow.service_accounts == ("default", "writer")
    assert allow.refuses_remote("x", "http://s3:8333", "models") == ("", "")
    assert allow.refuses_remote("x", "http://s3:8333", "other")[0] == "bucket"


def test_the_defaults_of_the_values_are_those_of_the_operator() -> None:
    settings = read_config(config())
    least = read_config({"sidecar": {"image": "backstay-sidecar:0.1.0"}})
    assert settings.cluster == least.cluster
    assert settings.allow == least.allow
    assert settings.lease == replace(least.lease, namespace=NAMESPACE)
    assert settings.sidecar == replace(least.sidecar, pull_policy="IfNotPresent")
    assert (settings.metrics_port, settings.health_port) == (least.metrics_port, least.health_port)


def test_another_release_name_keeps_names_apart() -> None:
    names = {tree["metadata"]["name"] for tree in objects({}, release="blue")}
    names.discard("trainingjobs.backstay.dev")
    assert all(name.startswith("blue-backstay") for name in names)


def test_selectors_choose_the_operators_pods() -> None:
    trees = objects(EVERYTHING)
    deployment = the("Deployment", trees)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    service = the("Service", trees)
    for selector in (
        deployment["selector"]["matchLabels"],
        service["spec"]["selector"],
        the("PodDisruptionBudget", trees)["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    monitor = the("ServiceMonitor", trees)["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= service["metadata"]["labels"].items()


def test_a_jobs_network_policy_lets_the_operator_in_whatever_the_release_is_called() -> None:
    values = {"nameOverride": "x", "fullnameOverride": "y"}
    template = the("Deployment", objects(values, release="blue"))["spec"]["template"]
    policy = build_network_policy(read_job(job()), "uid", NAMESPACE)
    (source,) = policy["spec"]["ingress"][1]["from"]
    assert source["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_notes_say_what_to_run_next() -> None:
    (notes,) = [text for path, text in rendered().items() if path.endswith("NOTES.txt")]
    assert "kubectl -n backstay-system rollout status deployment/backstay-operator" in notes
    assert "kubectl get trainingjobs" in notes
    (notes,) = [
        text
        for path, text in rendered({"namespaces": ["a", "b"]}).items()
        if path.endswith("NOTES.txt")
    ]
    assert "in the namespaces a, b" in notes
    assert "TrainingJobs in other namespaces are left alone" in notes
