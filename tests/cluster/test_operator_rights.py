"""The operator under the chart's own rights and settings, on a real API server without nodes.

It must get as far as it can: everything a job needs is made, its status is written, a refused job
says why. Shows that chart, definition and operator fit, before any cluster is booted.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import machine
from cluster.harness import layout
from support.api_server import ApiServer, running
from support.bad_jobs import LOCAL, POD, job
from support.rendered_chart import NAMESPACE, objects, the

JOBS = "/apis/backstay.dev/v1alpha1/namespaces/team-a/trainingjobs"
CORE = "/api/v1/namespaces/team-a"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ACCOUNT = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not (layout.bin_dir() / "kube-apiserver").exists():
        machine.build_programs()
    with running(layout.bin_dir(), tmp_path_factory.mktemp("api-server")) as it:
        for name in (NAMESPACE, "team-a", "team-b"):
            it.must("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        it.must(
            "POST", "/api/v1/namespaces/team-a/serviceaccounts", {"metadata": {"name": "default"}}
        )
        it.until(
            lambda: it.call("GET", "/api/v1/namespaces/kube-system").code == 200, "kube-system"
        )
        yield it


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def released(api: ApiServer, values: dict[str, Any]) -> Iterator[str]:
    """Definition, account and roles of a release; the operator's token."""
    trees = objects(values)
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    paths = []
    for tree in trees:
        namespace = tree["metadata"].get("namespace", "")
        folder = {
            "ServiceAccount": ACCOUNT,
            "ClusterRole": f"{RBAC}/clusterroles",
            "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
            "Role": f"{RBAC}/namespaces/{namespace}/roles",
            "RoleBinding": f"{RBAC}/namespaces/{namespace}/rolebindings",
            "CustomResourceDefinition": definitions,
        }.get(tree["kind"])
        if folder:
            api.must("POST", folder, tree)
            paths.append(f"{folder}/{tree['metadata']['name']}")
    api.until(lambda: api.call("GET", JOBS).code == 200, "TrainingJobs are served")
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = api.must("POST", f"{ACCOUNT}/backstay-operator/token", request)["status"]["token"]
    try:
        yield token
    finally:
        for path in paths:
            api.must("DELETE", path)
        api.until(lambda: api.call("GET", JOBS).code == 404, "TrainingJobs are gone")


@contextmanager
def operator(api: ApiServer, values: dict[str, Any], token: str, folder: Path) -> Iterator[Path]:
    """The operator as a process; its log."""
    config = the("ConfigMap", objects(values), "backstay-operator")["data"]["operator.yaml"]
    (folder / "operator.yaml").write_text(config)
    environment = os.environ | {
        "KUBECONFIG": str(api.kubeconfig(folder / "kubeconfig", token)),
        "BACKSTAY_OPERATOR_CONFIG": str(folder / "operator.yaml"),
        "POD_NAME": "operator-0",
        "POD_NAMESPACE": NAMESPACE,
    }
    log = folder / "operator.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "backstay_operator"],
            env=environment,
            stdout=stream,
            stderr=stream,
        )
    try:
        yield log
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def condition(api: ApiServer, name: str, kind: str) -> dict[str, Any]:
    status = api.must("GET", f"{JOBS}/{name}").get("status") or {}
    found = [c for c in status.get("conditions") or [] if c["type"] == kind]
    return found[0] if found else {}


def named(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    tree = job(changes)
    tree["metadata"] = {"name": name, "namespace": "team-a"}
    return tree


CLAIMS = {LOCAL: {"volume": "pvc", "size": "1Gi"}}


@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["everywhere", "one namespace"])
def test_the_operator_makes_what_a_job_needs_with_the_rights_it_is_given(
    api: ApiServer, tmp_path: Path, namespaces: list[str]
) -> None:
    values = {
        "namespaces": namespaces,
        "clusterName": "lab" if namespaces else "",
        "operator": {"ports": {"metrics": free_port(), "health": free_port()}},
    }
    with (
        released(api, values) as token,
        operator(api, values, token, tmp_path) as log,
    ):
        api.must("POST", JOBS, named("gpt", CLAIMS))

        def words() -> str:
            return log.read_text(errors="replace")[-6000:]

        def has_pods() -> bool:
            return len(api.must("GET", f"{CORE}/pods")["items"]) == 2

        api.until(has_pods, "two pods", words)
        made = {
            "services/gpt": CORE,
            "configmaps/gpt-backstay": CORE,
            "secrets/gpt-backstay": CORE,
            "poddisruptionbudgets/gpt": "/apis/policy/v1/namespaces/team-a",
            "networkpolicies/gpt": "/apis/networking.k8s.io/v1/namespaces/team-a",
        }
        for name, folder in made.items():
            assert api.call("GET", f"{folder}/{name}").code == 200, f"{name}\n{words()}"
        assert len(api.must("GET", f"{CORE}/persistentvolumeclaims")["items"]) == 2
        api.until(lambda: condition(api, "gpt", "Accepted") != {}, "a status", words)
        assert condition(api, "gpt", "Accepted")["status"] == "True"
        status = api.must("GET", f"{JOBS}/gpt")["status"]
        assert status["generations"]["pods"]
        assert status["ready"] == "0/2"
        _refuses(api, words)
        told = log.read_text(errors="replace").splitlines()
        assert [line for line in told if "orbidden" in line or "permissions" in line] == []
        _clean(api)


def _refuses(api: ApiServer, words: Any) -> None:
    """What may not be, with the reason and what to change, and no pods."""
    refused = {
        "admin": ({f"{POD}.serviceAccountName": "admin"}, "NotAllowed", "serviceAccounts"),
        "folder": ({f"{LOCAL}.path": "/etc"}, "NotAllowed", "policy.allow.localPaths"),
        "small": (
            {f"{POD}.containers.0.resources": {"limits": {"memory": "1Gi"}}},
            "MemoryTooSmall",
            "raise resources.limits.memory to 1216Mi or more",
        ),
    }
    for name, (changes, _, _) in refused.items():
        api.must("POST", JOBS, named(name, changes))
    for name, (_, reason, text) in refused.items():
        api.until(lambda n=name: condition(api, n, "Accepted") != {}, f"{name} refused", words)
        found = condition(api, name, "Accepted")
        assert (found["status"], found["reason"]) == ("False", reason), found
        assert text in found["message"]
    pods = api.must("GET", f"{CORE}/pods")["items"]
    assert {pod["metadata"]["labels"]["backstay.dev/job"] for pod in pods} == {"gpt"}


def _clean(api: ApiServer) -> None:
    """There is no garbage collector here."""
    for tree in api.must("GET", JOBS)["items"]:
        api.must("DELETE", f"{JOBS}/{tree['metadata']['name']}")
    for folder in (
        f"{CORE}/pods",
        f"{CORE}/configmaps",
        f"{CORE}/secrets",
        f"{CORE}/persistentvolumeclaims",
        "/apis/policy/v1/namespaces/team-a/poddisruptionbudgets",
        "/apis/networking.k8s.io/v1/namespaces/team-a/networkpolicies",
    ):
        api.must("DELETE", folder, {"gracePeriodSeconds": 0})
    api.must("DELETE", f"{CORE}/services/gpt")
    for claim in api.must("GET", f"{CORE}/persistentvolumeclaims")["items"]:
        path = f"{CORE}/persistentvolumeclaims/{claim['metadata']['name']}"
        api.must("PATCH", path, {"metadata": {"finalizers": None}})
