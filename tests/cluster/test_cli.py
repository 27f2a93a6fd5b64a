"""The command against a TrainingJob in the cluster: as a person calls it, by kubectl alone."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cluster.kube import Object
from cluster.machine import program
from cluster.object_store import PORT, Store
from cluster.training import RECOVER_SECONDS, START_SECONDS, Job

COMMAND_SECONDS = 120
SECONDS_BETWEEN = {"everySeconds": 15}
"""A pull reads what is not overwritten meanwhile; the small model makes 20 steps a second."""


@pytest.fixture(scope="module")
def job(make_job: Callable[..., Job]) -> Iterator[Job]:
    """One that trains until the tests are over, and saves every now and then."""
    found = make_job("cli")
    checkpoint = found.manifest["spec"]["checkpoint"]
    for tier in ("memory", "local", "neighbor", "remote"):
        checkpoint[tier].pop("everySteps")
        checkpoint[tier] |= SECONDS_BETWEEN
    found.apply()
    found.wait_training(timeout=START_SECONDS)
    yield found
    found.delete()
    found.wait("its pods are gone", lambda: not found.pods(), RECOVER_SECONDS)


def backstay(job: Job, *argv: str, plugin: bool = False) -> subprocess.CompletedProcess[str]:
    """`backstay` (or `kubectl backstay`) on a cluster; its packages come from this checkout."""
    entry = "kubectl_main" if plugin else "main"
    folder = str(Path(program("kubectl")).parent)
    environment = os.environ | {
        "KUBECONFIG": str(job.kube.kubeconfig),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run(
        [sys.executable, "-c", f"from backstay_cli.main import {entry} as main; main()", *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )


def told(job: Job, *argv: str) -> Object:
    """The JSON that a command prints about the job."""
    done = backstay(job, *argv, "-n", job.namespace, "--job", job.name, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: Object = json.loads(done.stdout)
    return found


def test_status_tells_what_the_operator_wrote_and_what_the_leader_says(job: Job) -> None:
    found = told(job, "status")
    assert found["status"]["ready"] == "3/3"
    assert found["job"]["run"] == f"{job.namespace}/cli"
    assert len(found["job"]["replicas"]) == 3
    text = backstay(job, "status", "-n", job.namespace, "--job", "cli", plugin=True).stdout
    assert "AllReplicasTraining" in text
    assert "neighbor" in text


def test_the_plugin_takes_the_only_job_of_the_namespace(job: Job) -> None:
    done = backstay(job, "checkpoints", "-n", job.namespace, plugin=True)
    assert f"checkpoints of {job.namespace}/cli" in done.stdout, done.stderr


def test_checkpoints_tell_the_tiers_and_what_is_durable(job: Job) -> None:
    found = told(job, "checkpoints")
    assert found["run"] == f"{job.namespace}/cli"
    assert any(one["durable"] and "remote" in one["complete_in"] for one in found["checkpoints"])


def test_a_pulled_checkpoint_is_good_and_stock_safetensors_reads_it(
    job: Job, tmp_path: Path
) -> None:
    pulled = told(job, "pull", "--step", "latest", "--out", str(tmp_path / "ckpt"))
    assert pulled["world_size"] == 3
    assert set(pulled["bytes_by_tier"]) <= {"memory", "local", "neighbor"}
    for rank in range(3):
        assert load_file(tmp_path / "ckpt" / f"{rank:05d}.safetensors")
    done = backstay(job, "verify", str(tmp_path / "ckpt"))
    assert "3 of 3 copies are good" in done.stdout, done.stderr


def test_verify_reads_every_copy_and_tells_when_the_bucket_is_out_of_reach(job: Job) -> None:
    done = backstay(job, "verify", "-n", job.namespace, "--job", "cli", "-o", "json")
    assert done.returncode == 0, done.stderr
    copies = json.loads(done.stdout)["copies"]
    assert {copy["rank"] for copy in copies} == {0, 1, 2}
    assert {copy["verdict"] for copy in copies} == {"good"}
    assert "copies in the bucket are left out" in done.stderr


def test_a_flush_is_durable(job: Job) -> None:
    found = told(job, "flush")
    assert (found["done"], found["tier"]) == (True, "remote")
    assert found["step"] > 0


def test_validate_finds_nothing_against_a_running_jobs_own_manifest(
    job: Job, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    named = job.manifest["metadata"] | {"namespace": job.namespace}
    path.write_text(json.dumps(job.manifest | {"metadata": named}))  # JSON is YAML
    done = backstay(job, "validate", "--server", str(path), "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert [one for one in found["findings"] if one["verdict"] != "ok"] == []
    broken = {**job.manifest, "spec": {**job.manifest["spec"], "replicas": 0}}
    path.write_text(json.dumps(broken))
    done = backstay(job, "validate", "--server", str(path))
    assert done.returncode == 2
    assert "the API server refuses it" in done.stdout


def test_a_dry_run_tells_what_a_restore_would_take_and_writes_nothing(job: Job) -> None:
    before = job.kube.get("tj", job.name, job.namespace)["metadata"]["generation"]
    found = told(job, "restore", "--dry-run")
    assert (found["source"], found["preview"]["outcome"]) == ("the leader", "base")
    taken = [one for one in found["preview"]["candidates"] if one["taken"]]
    assert [one["checkpoint"] for one in taken] == [found["preview"]["checkpoint"]]
    step = found["preview"]["checkpoint"].partition("-")[0].lstrip("0")
    done = backstay(job, "restore", "--step", step, "-n", job.namespace, "--job", "cli")
    if done.returncode == 0:  # else a newer one took its place meanwhile
        assert 'patch tj cli --type merge -p \'{"spec":{"restore":{"step":' in done.stdout
    assert job.kube.get("tj", job.name, job.namespace)["metadata"]["generation"] == before


def test_the_first_start_is_explained(job: Job) -> None:
    found = told(job, "explain-restore")
    assert found["source"] == "the leader"
    assert found["restore"]["outcome"] == "fresh"


def test_a_support_bundle_has_all_parts_and_no_secret(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    told(job, "support-bundle", "--out", str(out))
    with tarfile.open(out) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        parts = {member.name.partition("/")[2]: read(archive, member) for member in files}
    assert {"trainingjob.json", "leader/job.json", "sidecars/2/metrics.txt"} <= parts.keys()
    assert any(path.startswith("operator/logs/") for path in parts)
    secrets = [
        f"{job.name}-backstay",
        job.manifest["spec"]["checkpoint"]["remote"]["credentialsSecret"],
    ]
    for name in secrets:
        for value in job.kube.get("secret", name, job.namespace)["data"].values():
            for form in (value.encode(), base64.b64decode(value)):
                assert [path for path, data in parts.items() if form in data] == []


def read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def test_status_shows_what_the_operator_wrote_while_the_token_is_lost(job: Job) -> None:
    secret = job.kube.get("secret", "cli-backstay", job.namespace)
    assert secret is not None
    job.kube.delete("secret", "cli-backstay", job.namespace)
    try:
        done = backstay(job, "status", "-n", job.namespace, "--job", "cli")
    finally:
        meta = {key: secret["metadata"][key] for key in ("name", "labels", "ownerReferences")}
        job.kube.apply(secret | {"metadata": meta}, namespace=job.namespace)
    assert done.returncode == 0, done.stderr
    assert "AllReplicasTraining" in done.stdout
    assert "its leader can't be asked" in done.stderr


def test_when_no_pod_runs_the_bucket_is_read(job: Job, store: Store, tmp_path: Path) -> None:
    job.set_spec(suspend=True)
    job.wait("no pod is left", lambda: not job.pods(), RECOVER_SECONDS)
    where = ("-n", job.namespace, "--job", "cli")
    away = backstay(job, "checkpoints", *where)
    assert away.returncode == 5
    assert store.endpoint in away.stderr
    with job.kube.port_forward(store.namespace, "pod/s3", PORT) as port:
        here = (*where, "--endpoint", f"http://127.0.0.1:{port}")
        pulled = backstay(job, "pull", *here, "--out", str(tmp_path / "ckpt"), "-o", "json")
        assert pulled.returncode == 0, pulled.stderr
        assert set(json.loads(pulled.stdout)["bytes_by_tier"]) == {"remote"}
        verified = backstay(job, "verify", *here)
    assert "3 of 3 copies are good" in verified.stdout, verified.stderr
    assert load_file(tmp_path / "ckpt" / "00000.safetensors")


def test_a_job_that_is_not_there_is_told_in_words(job: Job) -> None:
    done = backstay(job, "status", "-n", job.namespace, "--job", "nobody")
    assert done.returncode == 3
    assert '"nobody" not found' in done.stderr
