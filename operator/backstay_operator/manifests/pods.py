"""One replica's pod: the user's template with a native sidecar, its volumes and environment."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from backstay_operator.api.job import EPHEMERAL, HOST_PATH, LocalSpec, TrainingJob
from backstay_operator.api.memory import SHM_BYTES
from backstay_operator.api.names import (
    GROUP,
    LABEL_GENERATION,
    LABEL_JOB,
    LABEL_REPLICA,
    LABEL_RUN,
    SIDECAR,
    TRAINER,
)
from backstay_operator.manifests.launcher import launcher_env
from backstay_operator.manifests.objects import TOKEN_KEY, claim_name, owned_name
from backstay_operator.manifests.wiring import (
    ACCESS_KEY,
    CA_KEY,
    CA_MOUNT,
    CONFIG_MOUNT,
    LOCAL_MOUNT,
    MEMORY_MOUNT,
    POD_FILE,
    SECRET_KEY,
    SESSION_KEY,
    TOPOLOGY_FILE,
    Wiring,
    hostname,
    pod_name,
)
from backstay_protocol import codec
from backstay_protocol.names import (
    ENV_LOG_FORMAT,
    ENV_POD,
    ENV_REPLICA,
    ENV_S3_ACCESS_KEY,
    ENV_S3_AMBIENT,
    ENV_S3_CA_FILE,
    ENV_S3_SECRET_KEY,
    ENV_S3_SESSION_TOKEN,
    ENV_TOKEN,
    ENV_TOPOLOGY,
    ENV_VOLUME,
    PORT_API,
    PORT_HEALTH,
    URL_HEALTHZ,
    URL_PRESTOP,
    URL_READYZ,
)
from backstay_protocol.topology import PodIdentity

ANNOTATION_IDENTITY = f"{GROUP}/pod"
MEMORY_VOLUME = "backstay-memory"
LOCAL_VOLUME = "backstay-local"
CA_VOLUME = "backstay-s3-ca"
CONFIG_VOLUME = "backstay-config"
SHM_VOLUME = "backstay-shm"
_LOST_NODE_SECONDS = 600


def build_pod(job: TrainingJob, identity: PodIdentity, wiring: Wiring) -> dict[str, Any]:
    """The pod of `identity`. The user's containers are unchanged but for environment and mounts."""
    template = copy.deepcopy(dict(job.spec.pod_template))
    spec = template["spec"]
    spec["containers"] = [
        _trainer(container, job, identity, wiring) if container["name"] == TRAINER else container
        for container in spec["containers"]
    ]
    spec["initContainers"] = [*(spec.get("initContainers") or []), _sidecar(job, wiring)]
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(job, identity)]
    spec["tolerations"] = [*(spec.get("tolerations") or []), *_tolerations()]
    spec |= {
        "hostname": hostname(job.name, identity.replica),
        "subdomain": job.name,
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": wiring.sidecar.grace_seconds,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, identity, template.get("metadata") or {}),
        "spec": spec,
    }


def _metadata(
    job: TrainingJob, identity: PodIdentity, template: Mapping[str, Any]
) -> dict[str, Any]:
    own_labels = {
        LABEL_JOB: job.name,
        LABEL_RUN: job.spec.checkpoint.run_name,
        LABEL_REPLICA: str(identity.replica),
        LABEL_GENERATION: str(identity.generation),
    }
    own_annotations = {ANNOTATION_IDENTITY: codec.dumps(identity).decode()}
    return {
        "name": pod_name(job.name, identity.replica, identity.generation),
        "namespace": job.namespace,
        "labels": {**(template.get("labels") or {}), **own_labels},
        "annotations": {**(template.get("annotations") or {}), **own_annotations},
    }


def _trainer(
    container: Mapping[str, Any], job: TrainingJob, identity: PodIdentity, wiring: Wiring
) -> dict[str, Any]:
    own = launcher_env(job, identity, wiring.addresses, wiring.sidecar.grace_seconds)
    own |= {
        **wiring.trainer_env,
        ENV_VOLUME: MEMORY_MOUNT,
        ENV_REPLICA: str(identity.replica),
    }
    mounts: list[dict[str, Any]] = [{"name": MEMORY_VOLUME, "mountPath": MEMORY_MOUNT}]
    theirs = container.get("volumeMounts") or []
    if not any(mount.get("mountPath") == "/dev/shm" for mount in theirs):
        mounts.append({"name": SHM_VOLUME, "mountPath": "/dev/shm"})
    if job.spec.checkpoint.local is not None:
        mounts.append({"name": LOCAL_VOLUME, "mountPath": LOCAL_MOUNT, "readOnly": True})
    trust, trust_mounts = _store_authority(job, wiring)
    own |= trust
    mounts += trust_mounts
    result = {
        **container,
        "env": _merge_env(own, container.get("env") or []),
        "volumeMounts": [*theirs, *mounts],
    }
    result.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if "preStop" not in (container.get("lifecycle") or {}):
        hook = {"httpGet": {"path": URL_PRESTOP, "port": PORT_HEALTH}}
        result["lifecycle"] = {**(container.get("lifecycle") or {}), "preStop": hook}
    return result


def _store_authority(
    job: TrainingJob, wiring: Wiring
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Environment and mounts by which a container trusts the object store. It is no secret."""
    remote = job.spec.checkpoint.remote
    if remote is None or remote.embedded:
        return {}, []
    if wiring.s3_ca_file:
        return {ENV_S3_CA_FILE: wiring.s3_ca_file}, []
    if not remote.ca_secret:
        return {}, []
    mount = {"name": CA_VOLUME, "mountPath": CA_MOUNT, "readOnly": True}
    return {ENV_S3_CA_FILE: f"{CA_MOUNT}/{CA_KEY}"}, [mount]


def _merge_env(own: Mapping[str, str], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours first, so that theirs may refer to them; a name that the user sets too is the user's."""
    names = {entry["name"] for entry in theirs}
    ours = [{"name": k, "value": v} for k, v in own.items() if k not in names]
    return [*ours, *theirs]


def _sidecar(job: TrainingJob, wiring: Wiring) -> dict[str, Any]:
    settings = wiring.sidecar
    mounts = [
        {"name": MEMORY_VOLUME, "mountPath": MEMORY_MOUNT},
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_MOUNT, "readOnly": True},
    ]
    if job.spec.checkpoint.local is not None:
        mounts.append({"name": LOCAL_VOLUME, "mountPath": LOCAL_MOUNT})
    mounts += _store_authority(job, wiring)[1]
    amounts = {"cpu": settings.cpu, "memory": settings.memory}
    return {
        "name": SIDECAR,
        "image": settings.image,
        "command": [*settings.command],
        "args": ["--grace-seconds", str(settings.grace_seconds)],
        "restartPolicy": "Always",
        "env": _sidecar_env(job, wiring),
        "ports": [
            {"name": "api", "containerPort": PORT_API},
            {"name": "health", "containerPort": PORT_HEALTH},
        ],
        "resources": {"requests": amounts, "limits": {"memory": settings.memory}},
        "startupProbe": _probe(URL_HEALTHZ, period=1, failures=30),
        "livenessProbe": _probe(URL_HEALTHZ, period=10, failures=6),
        "readinessProbe": _probe(URL_READYZ, period=10, failures=3),
        "volumeMounts": mounts,
    }


def _sidecar_env(job: TrainingJob, wiring: Wiring) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": ENV_VOLUME, "value": MEMORY_MOUNT},
        {"name": ENV_TOPOLOGY, "value": f"{CONFIG_MOUNT}/{TOPOLOGY_FILE}"},
        {"name": ENV_POD, "value": f"{CONFIG_MOUNT}/{POD_FILE}"},
        {"name": ENV_LOG_FORMAT, "value": wiring.sidecar.log_format},
        _from_secret(ENV_TOKEN, wiring.token_secret or owned_name(job.name), TOKEN_KEY),
    ]
    remote = job.spec.checkpoint.remote
    env += [{"name": k, "value": v} for k, v in _store_authority(job, wiring)[0].items()]
    if remote is not None and remote.workload_identity:
        env.append({"name": ENV_S3_AMBIENT, "value": "1"})
    elif remote is not None:
        secret = remote.credentials_secret or owned_name(job.name)
        env += [
            _from_secret(ENV_S3_ACCESS_KEY, secret, ACCESS_KEY, optional=True),
            _from_secret(ENV_S3_SECRET_KEY, secret, SECRET_KEY, optional=True),
            _from_secret(ENV_S3_SESSION_TOKEN, secret, SESSION_KEY, optional=True),
        ]
    return env


def _from_secret(name: str, secret: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": PORT_HEALTH},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def _volumes(job: TrainingJob, identity: PodIdentity) -> list[dict[str, Any]]:
    checkpoint = job.spec.checkpoint
    volumes: list[dict[str, Any]] = [
        _memory(MEMORY_VOLUME, checkpoint.memory.size_limit_bytes),
        _memory(SHM_VOLUME, SHM_BYTES),
        {"name": CONFIG_VOLUME, "projected": {"sources": _config_sources(job)}},
    ]
    remote = checkpoint.remote
    if remote is not None and remote.ca_secret:
        volumes.append(_authority(remote.ca_secret))
    if checkpoint.local is not None:
        volumes.append(_local(checkpoint.local, job, identity))
    return volumes


def _memory(name: str, size_bytes: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": str(size_bytes)}}


def _authority(secret: str) -> dict[str, Any]:
    """Optional: without it pods run all the same, and the sidecar says what is missing."""
    items = [{"key": CA_KEY, "path": CA_KEY}]
    source = {"secretName": secret, "items": items, "defaultMode": 0o444, "optional": True}
    return {"name": CA_VOLUME, "secret": source}


def _config_sources(job: TrainingJob) -> list[dict[str, Any]]:
    annotation = {"fieldPath": f"metadata.annotations['{ANNOTATION_IDENTITY}']"}
    return [
        {"configMap": {"name": owned_name(job.name)}},
        {"downwardAPI": {"items": [{"path": POD_FILE, "fieldRef": annotation}]}},
    ]


def _local(local: LocalSpec, job: TrainingJob, identity: PodIdentity) -> dict[str, Any]:
    if local.volume == HOST_PATH:
        return {
            "name": LOCAL_VOLUME,
            "hostPath": {"path": local.path, "type": "DirectoryOrCreate"},
        }
    if local.volume == EPHEMERAL:
        claim: dict[str, Any] = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": local.size}},
        }
        if local.storage_class_name:
            claim["storageClassName"] = local.storage_class_name
        return {
            "name": LOCAL_VOLUME,
            "ephemeral": {"volumeClaimTemplate": {"spec": claim}},
        }
    name = claim_name(job.name, identity.replica)
    return {"name": LOCAL_VOLUME, "persistentVolumeClaim": {"claimName": name}}


def _tolerations() -> list[dict[str, Any]]:
    """We decide ourselves when a node is lost; the default 300 s would race with us."""
    return [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LOST_NODE_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]
