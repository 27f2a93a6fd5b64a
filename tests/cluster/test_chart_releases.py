"""The chart in helm's own hands on a real API server: install, upgrade, uninstall, install again.

No controllers and no nodes: what is looked at is what helm makes, changes and leaves.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import machine
from cluster.harness import layout
from support.api_server import ApiServer, running
from support.bad_jobs import job
from support.rendered_chart import CHART, NAMESPACE

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.backstay.dev"
JOBS = "/apis/backstay.dev/v1alpha1/namespaces/default/trainingjobs"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/backstay-operator"


class Helm:
    """The program, as cluster administrator."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self._program = program
        self._kubeconfig = kubeconfig

    def run(self, *words: str, values: dict[str, Any] | None = None) -> str:
        """What it prints."""
        command = [str(self._program), f"--kubeconfig={self._kubeconfig}", "-n", NAMESPACE, *words]
        if values is not None:
            command.append("--values=-")
        done = subprocess.run(
            command, input=json.dumps(values), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    if not (layout.bin_dir() / "helm").exists():
        machine.build_programs()
    with running(layout.bin_dir(), tmp_path / "api-server") as it:
        yield it


@pytest.fixture
def helm(api: ApiServer, tmp_path: Path) -> Helm:
    return Helm(layout.bin_dir() / "helm", api.kubeconfig(tmp_path / "kubeconfig"))


def test_a_release_is_installed_upgraded_taken_away_and_installed_again_over_living_jobs(
    api: ApiServer, helm: Helm
) -> None:
    notes = helm.run("install", "backstay", str(CHART), "--create-namespace")
    assert "rollout status deployment/backstay-operator" in notes
    api.until(lambda: api.call("GET", JOBS).code == 200, "TrainingJobs are served")
    made = api.must("POST", JOBS, job())

    # an older definition is brought up to date by an upgrade
    older = {"metadata": {"annotations": {"backstay.dev/schema": "0"}}}
    api.must("PATCH", CRD, older)
    values = {"operator": {"replicas": 2, "nodeLostSeconds": 45}}
    before = api.must("GET", DEPLOYMENT)["spec"]["template"]
    helm.run("upgrade", "backstay", str(CHART), values=values)
    assert api.must("GET", CRD)["metadata"]["annotations"]["backstay.dev/schema"] == "1"
    after = api.must("GET", DEPLOYMENT)["spec"]
    assert after["replicas"] == 2
    assert after["template"] != before

    helm.run("uninstall", "backstay")
    assert api.call("GET", DEPLOYMENT).code == 404
    assert api.must("GET", CRD)["metadata"].get("deletionTimestamp") is None
    kept = api.must("GET", f"{JOBS}/gpt")
    assert kept["metadata"]["uid"] == made["metadata"]["uid"]
    assert not kept["metadata"].get("finalizers")

    helm.run("install", "backstay", str(CHART))
    assert api.must("GET", f"{JOBS}/gpt")["metadata"]["uid"] == made["metadata"]["uid"]


def test_without_the_definition_an_upgrade_leaves_it_alone(api: ApiServer, helm: Helm) -> None:
    helm.run("install", "backstay", str(CHART), "--create-namespace")
    uid = api.must("GET", CRD)["metadata"]["uid"]
    helm.run("upgrade", "backstay", str(CHART), values={"crds": {"install": False}})
    assert api.must("GET", CRD)["metadata"]["uid"] == uid
