"""A pod dict as processes of this machine: what a kubelet reads out of it, as far as it matters.

Mounts become folders: wherever a mount path begins a value of the environment or a word of the
command, the folder takes its place. Images are ignored; the programs are those of this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backstay_cli.errors import UsageError
from backstay_cli.local.processes import ProcessSpec
from backstay_operator.api.job import TrainingJob
from backstay_operator.api.names import SIDECAR, TRAINER
from backstay_operator.api.template import LAUNCHER_ENV
from backstay_operator.manifests.pods import SHM_VOLUME
from backstay_protocol.names import ENV_EXIT_WITH_PARENT

_FOREIGN_PREFIXES = ("BACKSTAY_", "PET_", "TORCHELASTIC_")


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where the pod's volumes lie, and what it may read."""

    volumes: Mapping[str, str]
    """Volume name -> folder."""
    secrets: Mapping[tuple[str, str], str]
    """(Secret, key) -> value."""
    manifest_folder: str
    logs: str


def container_specs(pod: Mapping[str, Any], folders: Folders) -> list[ProcessSpec]:
    """The sidecar, then the user's containers, ready to be started in that order."""
    spec = pod["spec"]
    sidecars = [c for c in spec["initContainers"] if c["name"] == SIDECAR]
    return [_process(container, pod, folders) for container in [*sidecars, *spec["containers"]]]


def check_job(job: TrainingJob) -> None:
    """Raises UsageError for what only a cluster can do."""
    if job.spec.suspend:
        raise UsageError("spec.suspend: got true, so nothing would run; write `suspend: false`")
    spec = job.spec.pod_template["spec"]
    if spec.get("initContainers"):
        raise UsageError(
            "spec.podTemplate.spec.initContainers: a local run starts none; do that work before "
            "the run and remove them"
        )
    for index, container in enumerate(spec["containers"]):
        if not container.get("command") and not container.get("args"):
            raise UsageError(
                f"spec.podTemplate.spec.containers[{index}].command: missing; a local run knows no "
                "image's entry point; write `command: [torchrun, train.py]`"
            )


def _process(container: Mapping[str, Any], pod: Mapping[str, Any], folders: Folders) -> ProcessSpec:
    name = container["name"]
    mounts = {
        mount["mountPath"].rstrip("/"): folders.volumes[mount["name"]]
        for mount in container.get("volumeMounts") or []
        if mount["name"] != SHM_VOLUME  # this machine's own /dev/shm serves
        and mount["name"] in folders.volumes
    }
    env = _environment(container, mounts, folders.secrets)
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    return ProcessSpec(
        name=name,
        argv=tuple(_program(_folders_for_mounts(word, mounts), i) for i, word in enumerate(words)),
        env=env,
        cwd=_directory(container, folders) if name != SIDECAR else folders.manifest_folder,
        log=os.path.join(folders.logs, pod["metadata"]["name"], f"{name}.log"),
    )


def _environment(
    container: Mapping[str, Any],
    mounts: Mapping[str, str],
    secrets: Mapping[tuple[str, str], str],
) -> dict[str, str]:
    env = base_environment()
    for entry in container.get("env") or []:
        value = entry.get("value", "")
        if "valueFrom" in entry:
            found = _value_from(entry, secrets)
            if found is None:
                continue
            value = found
        env[entry["name"]] = _expand(_folders_for_mounts(value, mounts), env)
    if container["name"] != TRAINER:
        env[ENV_EXIT_WITH_PARENT] = "1"
    return env


def base_environment() -> dict[str, str]:
    """The runner's own environment without what belongs to another job or launcher."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in LAUNCHER_ENV
    }
    own_programs = os.path.dirname(sys.executable)
    env["PATH"] = os.pathsep.join(filter(None, [own_programs, env.get("PATH", "")]))
    return env


def _value_from(entry: Mapping[str, Any], secrets: Mapping[tuple[str, str], str]) -> str | None:
    source = entry["valueFrom"]
    reference = source.get("secretKeyRef") or source.get("configMapKeyRef") or {}
    found = secrets.get((reference.get("name", ""), reference.get("key", "")))
    if found is None:
        found = os.environ.get(entry["name"])
    if found is None and not reference.get("optional"):
        raise UsageError(
            f"env {entry['name']} comes from {next(iter(source), 'nowhere')}, which a local run "
            f"does not have; set {entry['name']} in the environment of `backstay local run`"
        )
    return found


def _expand(value: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` as the kubelet expands it; `$$(NAME)` stays."""
    parts = value.split("$(")
    done = parts[0]
    for part in parts[1:]:
        name, closed, rest = part.partition(")")
        if done.endswith("$"):
            done = f"{done[:-1]}$({part}"
        elif closed and name in env:
            done += env[name] + rest
        else:
            done += f"$({part}"
    return done


def _folders_for_mounts(word: str, mounts: Mapping[str, str]) -> str:
    for path in sorted(mounts, key=len, reverse=True):
        if word == path or word.startswith(f"{path}/"):
            return mounts[path] + word[len(path) :]
    return word


def _program(word: str, index: int) -> str:
    """The first word: a program beside this Python comes before any other of its name."""
    if index or os.sep in word:
        return word
    own = os.path.join(os.path.dirname(sys.executable), word)
    return own if os.access(own, os.X_OK) else word


def _directory(container: Mapping[str, Any], folders: Folders) -> str:
    wanted = container.get("workingDir") or "."
    path = os.path.normpath(os.path.join(folders.manifest_folder, wanted))
    if not os.path.isdir(path):
        raise UsageError(
            f"container {container['name']}: workingDir {wanted!r} is not a folder here ({path}); "
            "in a local run it is relative to the manifest's folder"
        )
    return path
