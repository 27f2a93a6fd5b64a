"""Manifests that are wrong, for the API server and for `read_job`: both must refuse each.

The table is one, so that the definition's rules and the operator's reading can't drift apart.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]

GOOD: Tree = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": "default"},
    "spec": {
        "replicas": 2,
        "podTemplate": {
            "metadata": {"labels": {"team": "blue"}},
            "spec": {
                "containers": [
                    {"name": "trainer", "image": "gpt:1", "command": ["torchrun", "train.py"]}
                ]
            },
        },
        "checkpoint": {
            "memory": {"everySteps": 10, "sizeLimit": "1Gi"},
            "local": {},
            "neighbor": {"everySteps": 20},
            "remote": {
                "endpoint": "https://s3.example.org",
                "bucket": "models",
                "credentialsSecret": "keys",
                "everySteps": 100,
            },
        },
    },
}

POD = "spec.podTemplate.spec"
MEMORY, LOCAL = "spec.checkpoint.memory", "spec.checkpoint.local"
NEIGHBOR, REMOTE = "spec.checkpoint.neighbor", "spec.checkpoint.remote"
GONE = ...


def job(changes: Mapping[str, Any] | None = None) -> Tree:
    """The good manifest with some fields changed, or removed with `...`."""
    tree = copy.deepcopy(GOOD)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        node: Any = tree
        for name in parents:
            node = node[int(name)] if name.isdigit() else node.setdefault(name, {})
        if value is GONE:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return tree


@dataclass(frozen=True)
class Bad:
    """One wrong manifest."""

    id: str
    changes: Mapping[str, Any]
    words: str
    """Part of what the API server says."""


BAD = (
    Bad("long name", {"metadata.name": "a" * 51}, "at most 50 lower-case letters"),
    Bad("name with a dot", {"metadata.name": "gpt.large"}, "without dots"),
    Bad("no spec", {"spec": GONE}, "spec"),
    Bad("no replicas", {"spec.replicas": GONE}, "spec.replicas"),
    Bad("zero replicas", {"spec.replicas": 0}, "greater than or equal to 1"),
    Bad("too many replicas", {"spec.replicas": 10_001}, "less than or equal to 10000"),
    Bad("replicas in words", {"spec.replicas": "two"}, "integer"),
    Bad("launcher", {"spec.launcher": "mpi"}, '"torchrun", "static", "none"'),
    Bad("processes", {"spec.processesPerReplica": 0}, "greater than or equal to 1"),
    Bad(
        "processes without a launcher",
        {"spec.launcher": "none", "spec.processesPerReplica": 2},
        "write `launcher: torchrun`, or processesPerReplica 1",
    ),
    Bad("hang", {"spec.hangSeconds": -1}, "greater than or equal to 0"),
    Bad("suspend", {"spec.suspend": "no"}, "boolean"),
    Bad("queue", {"spec.queueName": "My Queue"}, "spec.queueName"),
    Bad("drain", {"spec.drainHoldSeconds": 86_401}, "less than or equal to 86400"),
    Bad("node lost", {"spec.nodeLostSeconds": -1}, "greater than or equal to 0"),
    Bad("final save", {"spec.finalSaveSeconds": 1.5}, "integer"),
    Bad("clean-up", {"spec.cleanupPodPolicy": "running"}, '"Running", "All", "None"'),
    Bad("time to live", {"spec.ttlSecondsAfterFinished": -1}, "greater than or equal to 0"),
    Bad("early deaths", {"spec.failurePolicy.earlyDeaths": 0}, "greater than or equal to 1"),
    Bad("no template", {"spec.podTemplate": GONE}, "spec.podTemplate"),
    Bad("no containers", {f"{POD}.containers": GONE}, "containers"),
    Bad("empty containers", {f"{POD}.containers": []}, "containers"),
    Bad("no trainer", {f"{POD}.containers.0.name": "main"}, "write `- name: trainer`"),
    Bad(
        "the sidecar's name",
        {f"{POD}.containers": [{"name": n, "image": "x"} for n in ("trainer", "backstay-sidecar")]},
        "choose another name",
    ),
    Bad("no image", {f"{POD}.containers.0.image": GONE}, "every container needs an image"),
    Bad(
        "another sidecar",
        {f"{POD}.initContainers": [{"name": "x", "image": "x", "restartPolicy": "Always"}]},
        "make it a normal container",
    ),
    Bad(
        "the sidecar's name for an init container",
        {f"{POD}.initContainers": [{"name": "backstay-sidecar", "image": "x"}]},
        "choose another name",
    ),
    Bad("restart policy", {f"{POD}.restartPolicy": "Never"}, "always OnFailure; remove it"),
    Bad("hostname", {f"{POD}.hostname": "x"}, "hostname is Backstay's to set"),
    Bad("subdomain", {f"{POD}.subdomain": "x"}, "subdomain is Backstay's to set"),
    Bad("no checkpoint", {"spec.checkpoint": GONE}, "spec.checkpoint"),
    Bad("run name", {"spec.checkpoint.runName": "My_Run"}, "spec.checkpoint.runName"),
    Bad("no memory", {MEMORY: GONE}, "spec.checkpoint.memory"),
    Bad("no schedule", {f"{MEMORY}.everySteps": GONE}, "write `everySteps: 100` or"),
    Bad("two schedules", {f"{MEMORY}.everySeconds": 5}, "got both everySteps and everySeconds"),
    Bad("zero steps", {f"{MEMORY}.everySteps": 0}, "greater than or equal to 1"),
    Bad("no size", {f"{MEMORY}.sizeLimit": GONE}, "spec.checkpoint.memory.sizeLimit"),
    Bad(
        "size in words", {f"{MEMORY}.sizeLimit": "2 gigabytes"}, "spec.checkpoint.memory.sizeLimit"
    ),
    Bad("size in parts", {f"{MEMORY}.sizeLimit": "500m"}, "spec.checkpoint.memory.sizeLimit"),
    Bad("slots", {f"{MEMORY}.slots": 9}, "less than or equal to 8"),
    Bad("not a multiple", {f"{LOCAL}.everySteps": 25}, "must be a multiple of memory.everySteps"),
    Bad("not a multiple either", {f"{NEIGHBOR}.everySteps": 5}, "must be a multiple of memory."),
    Bad("nor that", {f"{REMOTE}.everySteps": 101}, "must be a multiple of memory.everySteps"),
    Bad(
        "steps of seconds",
        {f"{MEMORY}.everySteps": GONE, f"{MEMORY}.everySeconds": 30},
        "memory captures by seconds, at no fixed steps",
    ),
    Bad(
        "more often than captured",
        {
            MEMORY: {"everySeconds": 30, "sizeLimit": "1Gi"},
            f"{LOCAL}.everySeconds": 5,
            f"{NEIGHBOR}.everySteps": GONE,
            f"{REMOTE}.everySteps": GONE,
        },
        "local.everySeconds must be at least memory.everySeconds",
    ),
    Bad("two schedules of local", {LOCAL: {"everySteps": 10, "everySeconds": 9}}, "remove one"),
    Bad("keep none", {f"{LOCAL}.keepLast": 0}, "greater than or equal to 1"),
    Bad("keep every none", {f"{REMOTE}.keepEvery": 0}, "greater than or equal to 1"),
    Bad("volume", {f"{LOCAL}.volume": "nfs"}, '"hostPath", "pvc", "ephemeral", "none"'),
    Bad("claim without a size", {f"{LOCAL}.volume": "pvc"}, "write `size: 100Gi`"),
    Bad("size without a claim", {f"{LOCAL}.size": "5Gi"}, "pvc and ephemeral only; remove it"),
    Bad("class without a claim", {f"{LOCAL}.storageClassName": "ssd"}, "ephemeral only; remove it"),
    Bad(
        "path of a claim",
        {LOCAL: {"volume": "ephemeral", "size": "5Gi", "path": "/x"}},
        "path has a meaning with the volume hostPath only",
    ),
    Bad("path upwards", {f"{LOCAL}.path": "/var/../etc"}, "spec.checkpoint.local.path"),
    Bad("relative path", {f"{LOCAL}.path": "var"}, "spec.checkpoint.local.path"),
    Bad("neighbor without disks", {LOCAL: GONE}, "neighbor needs disks to copy to"),
    Bad("neighbor of none", {LOCAL: {"volume": "none"}}, "neighbor needs disks to copy to"),
    Bad("lonely neighbor", {"spec.replicas": 1}, "neighbor needs another replica"),
    Bad("topology key", {f"{NEIGHBOR}.topologyKey": "a zone"}, "topologyKey"),
    Bad("copies", {f"{NEIGHBOR}.copies": 2}, "less than or equal to 1"),
    Bad("no endpoint", {f"{REMOTE}.endpoint": GONE}, "endpoint is missing; write"),
    Bad("ftp", {f"{REMOTE}.endpoint": "ftp://host"}, "spec.checkpoint.remote.endpoint"),
    Bad("endpoint with a path", {f"{REMOTE}.endpoint": "https://host/x"}, "remote.endpoint"),
    Bad("bad port", {f"{REMOTE}.endpoint": "https://host:http"}, "remote.endpoint"),
    Bad("contradiction", {f"{REMOTE}.secure": False}, "secure contradicts the endpoint's scheme"),
    Bad("embedded", {REMOTE: {"embedded": True}}, "`backstay local run` only"),
    Bad("no bucket", {f"{REMOTE}.bucket": GONE}, "bucket is missing; write"),
    Bad("bucket", {f"{REMOTE}.bucket": "My_B"}, "spec.checkpoint.remote.bucket"),
    Bad("prefix", {f"{REMOTE}.prefix": "/a"}, "spec.checkpoint.remote.prefix"),
    Bad("prefix upwards", {f"{REMOTE}.prefix": "a/../b"}, "spec.checkpoint.remote.prefix"),
    Bad("region", {f"{REMOTE}.region": "EU"}, "spec.checkpoint.remote.region"),
    Bad("no credentials", {f"{REMOTE}.credentialsSecret": GONE}, "credentials are missing; write"),
    Bad(
        "keys and an identity",
        {f"{REMOTE}.workloadIdentity": True, f"{POD}.serviceAccountName": "default"},
        "got both workloadIdentity and credentialsSecret",
    ),
    Bad(
        "identity of nobody",
        {f"{REMOTE}.workloadIdentity": True, f"{REMOTE}.credentialsSecret": GONE},
        "write `serviceAccountName: my-account`",
    ),
    Bad("attempt alone", {"spec.restore.attempt": 3}, "write `step: ...` beside it"),
    Bad("negative step", {"spec.restore.step": -1}, "greater than or equal to 0"),
    Bad("fresh and a step", {"spec.restore": {"fresh": True, "step": 3}}, "remove one of the two"),
    Bad(
        "fresh and another run",
        {"spec.restore": {"fresh": True, "from": {"namespace": "a", "runName": "b"}}},
        "remove one of the two",
    ),
    Bad("a run without a name", {"spec.restore": {"from": {"namespace": "a"}}}, "runName"),
    Bad("barrier", {"spec.restore.barrierSeconds": 0}, "greater than or equal to 1"),
    Bad("quarantine", {"spec.restore.quarantineAfter": 0}, "greater than or equal to 1"),
    Bad("misspelt field", {"spec.replica": 2}, "unknown field"),
    Bad("misspelt tier", {f"{REMOTE}.everyStep": 5}, "unknown field"),
)

VALID: Mapping[str, Mapping[str, Any]] = {
    "as little as possible": {LOCAL: GONE, NEIGHBOR: GONE, REMOTE: GONE},
    "all tiers": {},
    "a number as size": {f"{MEMORY}.sizeLimit": 1 << 30},
    "a fraction as size": {f"{MEMORY}.sizeLimit": "1.5Gi"},
    "by seconds": {
        MEMORY: {"everySeconds": 0.5, "sizeLimit": "1Gi"},
        f"{LOCAL}.everySeconds": 1,
        f"{NEIGHBOR}.everySteps": GONE,
        f"{REMOTE}.everySteps": GONE,
        f"{REMOTE}.everySeconds": 30,
    },
    "claims": {LOCAL: {"volume": "pvc", "size": "100Gi", "storageClassName": "local-path"}},
    "no disks": {LOCAL: {"volume": "none"}, NEIGHBOR: GONE},
    "a bare host": {f"{REMOTE}.endpoint": "minio:9000", f"{REMOTE}.secure": False},
    "an address": {f"{REMOTE}.endpoint": "http://[::1]:9000/"},
    "an identity": {
        f"{REMOTE}.workloadIdentity": True,
        f"{REMOTE}.credentialsSecret": GONE,
        f"{POD}.serviceAccountName": "default",
    },
    "everything": {
        "spec.processesPerReplica": 8,
        "spec.launcher": "static",
        "spec.hangSeconds": 600.5,
        "spec.suspend": True,
        "spec.queueName": "gpus",
        "spec.drainHoldSeconds": 60,
        "spec.nodeLostSeconds": 45,
        "spec.finalSaveSeconds": 0,
        "spec.cleanupPodPolicy": "None",
        "spec.ttlSecondsAfterFinished": 0,
        "spec.failurePolicy": {"earlyDeaths": 3},
        "spec.checkpoint.runName": "gpt-2",
        f"{MEMORY}.slots": 3,
        LOCAL: {
            "everySteps": 20,
            "keepLast": 3,
            "keepEvery": 1000,
            "path": "/var/lib/backstay",
        },
        NEIGHBOR: {"everySteps": 20, "topologyKey": "rack", "copies": 1},
        f"{REMOTE}.prefix": "team/project",
        f"{REMOTE}.region": "eu-west-1",
        f"{REMOTE}.caSecret": "ca",
        f"{REMOTE}.keepLast": 5,
        f"{REMOTE}.keepEvery": 10_000,
        "spec.restore": {
            "step": 100,
            "attempt": 1_700_000_000_000_001,
            "barrierSeconds": 60,
            "remoteWaitSeconds": 0,
            "maxRestarts": 0,
            "quarantineAfter": 1,
        },
    },
    "another run": {"spec.restore": {"from": {"namespace": "old", "runName": "gpt"}, "step": 7}},
    "fresh": {"spec.restore": {"fresh": True}},
}
"""Manifests that both must take, and read the same."""
