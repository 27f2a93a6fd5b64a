"""A pod dict as programs of this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay_cli.errors import UsageError
from backstay_cli.local.podspec import Folders, container_specs
from backstay_cli.local.wire import store_authority
from backstay_operator.api import TrainingJob


def specs(tmp_path: Path, trainer: dict[str, Any], **more: Any) -> list[Any]:
    pod = {
        "metadata": {"name": "gpt-0-1"},
        "spec": {
            "initContainers": [
                {"name": "backstay-sidecar", "command": ["python", "-m", "backstay_sidecar"]}
            ],
            "containers": [{"name": "trainer", **trainer}, *more.pop("others", [])],
        },
    }
    folders = Folders(
        volumes={"backstay-memory": "/dev/shm/x/memory", "backstay-shm": "/never"},
        secrets={("mine", "token"): "secret-value"},
        manifest_folder=str(tmp_path),
        logs=str(tmp_path / "logs"),
    )
    return container_specs(pod, folders)


def test_the_sidecar_comes_first_and_programs_beside_this_python_win(tmp_path: Path) -> None:
    sidecar, trainer = specs(tmp_path, {"command": ["torchrun"], "args": ["train.py", "torchrun"]})
    here = os.path.dirname(sys.executable)
    assert sidecar.argv[0] == f"{here}/python"
    assert trainer.argv == (f"{here}/torchrun", "train.py", "torchrun")
    assert trainer.env["PATH"].split(":")[0] == here
    assert trainer.log == str(tmp_path / "logs" / "gpt-0-1" / "trainer.log")
    assert sidecar.env["BACKSTAY_EXIT_WITH_PARENT"] == "1"


def test_mount_paths_become_folders_in_values_and_words(tmp_path: Path) -> None:
    mounts = [
        {"name": "backstay-memory", "mountPath": "/backstay/memory"},
        {"name": "backstay-shm", "mountPath": "/dev/shm"},
    ]
    env = [
        {"name": "A", "value": "/backstay/memory"},
        {"name": "B", "value": "/backstay/memory/x"},
        {"name": "C", "value": "/backstay/memoryless"},
        {"name": "D", "value": "/dev/shm/y"},
    ]
    command = ["cat", "/backstay/memory/file"]
    _, trainer = specs(tmp_path, {"command": command, "env": env, "volumeMounts": mounts})
    assert trainer.argv[1] == "/dev/shm/x/memory/file"
    assert [trainer.env[name] for name in "ABCD"] == [
        "/dev/shm/x/memory",
        "/dev/shm/x/memory/x",
        "/backstay/memoryless",
        "/dev/shm/y",
    ]


def test_references_to_other_variables_are_expanded_as_a_kubelet_does(tmp_path: Path) -> None:
    env = [
        {"name": "HOST", "value": "h"},
        {"name": "URL", "value": "http://$(HOST)/$(NOBODY)/$$(HOST)/$(open"},
    ]
    _, trainer = specs(tmp_path, {"command": ["true"], "env": env})
    assert trainer.env["URL"] == "http://h/$(NOBODY)/$(HOST)/$(open"


def test_secrets_are_the_runners_or_come_from_the_persons_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(name: str, secret: str, **more: Any) -> dict[str, Any]:
        reference = {"name": secret, "key": "token", **more}
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}

    monkeypatch.setenv("THEIRS", "from-environment")
    env = [entry("OURS", "mine"), entry("THEIRS", "other"), entry("NONE", "other", optional=True)]
    _, trainer = specs(tmp_path, {"command": ["true"], "env": env})
    assert (trainer.env["OURS"], trainer.env["THEIRS"]) == ("secret-value", "from-environment")
    assert "NONE" not in trainer.env
    with pytest.raises(UsageError, match="set LOST in the environment"):
        specs(tmp_path, {"command": ["true"], "env": [entry("LOST", "other")]})


def test_the_working_folder_is_relative_to_the_manifests(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    _, trainer = specs(tmp_path, {"command": ["true"], "workingDir": "sub"})
    assert trainer.cwd == str(tmp_path / "sub")
    _, trainer = specs(tmp_path, {"command": ["true"]})
    assert trainer.cwd == str(tmp_path)
    with pytest.raises(UsageError, match="is not a folder here"):
        specs(tmp_path, {"command": ["true"], "workingDir": "/nowhere"})


def test_other_containers_of_the_user_run_too(tmp_path: Path) -> None:
    found = specs(
        tmp_path, {"command": ["true"]}, others=[{"name": "board", "command": ["sleep", "1"]}]
    )
    assert [spec.name for spec in found] == ["backstay-sidecar", "trainer", "board"]


def test_what_belongs_to_other_jobs_stays_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BACKSTAY_FAULTS", "PET_NNODES", "TORCHELASTIC_RUN_ID", "RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    _, trainer = specs(tmp_path, {"command": ["true"]})
    assert trainer.env["LD_LIBRARY_PATH"] == "/lib"
    foreign = [n for n in trainer.env if n.startswith(("BACKSTAY_", "PET_", "TORCHELASTIC"))]
    assert foreign == []
    assert "RANK" not in trainer.env


def with_authority(job: TrainingJob, secret: str) -> TrainingJob:
    checkpoint = job.spec.checkpoint
    assert checkpoint.remote is not None
    remote = replace(checkpoint.remote, ca_secret=secret)
    spec = replace(job.spec, checkpoint=replace(checkpoint, remote=remote))
    return replace(job, spec=spec)


def test_a_file_of_this_machine_stands_for_the_secret_of_the_stores_authority(
    tmp_path: Path, job: TrainingJob
) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("a certificate")
    named = {"BACKSTAY_S3_CA_FILE": str(file)}
    for secret in ("my-ca", ""):
        assert store_authority(with_authority(job, secret), named) == str(file)
    assert store_authority(with_authority(job, ""), {}) == ""
    with pytest.raises(UsageError, match="my-ca") as caught:
        store_authority(with_authority(job, "my-ca"), {})
    assert "BACKSTAY_S3_CA_FILE" in caught.value.hint
    with pytest.raises(UsageError, match="/no/such"):
        store_authority(with_authority(job, ""), {"BACKSTAY_S3_CA_FILE": "/no/such"})
