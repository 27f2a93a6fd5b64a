"""A pod as it goes to the API server: `pods.build_pod` and what only a real cluster needs.

Owner, security, placement, queue, addresses. The control loop's applier calls it; the local runner
does not. Pure.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from backstay_operator.api.job import HOST_PATH, TrainingJob
from backstay_operator.api.names import SIDECAR
from backstay_operator.manifests.objects import owner_reference
from backstay_operator.manifests.pods import LOCAL_VOLUME, build_pod
from backstay_operator.manifests.wiring import (
    ANNOTATION_CHOICE,
    ANNOTATION_SPEC,
    LABEL_ROLE,
    LOCAL_MOUNT,
    ROLE_FLUSH,
    ROLE_REPLICA,
    Wiring,
)
from backstay_protocol.names import ENV_NODE, ENV_POD_IP
from backstay_protocol.topology import PodIdentity

SHARED_GROUP = 65532  # group of the memory volume: trainer and sidecar meet in it
SIDECAR_USER = 65532
_ANY_ADDRESS = "0.0.0.0"  # the pod's own address, and 127.0.0.1 for port-forwards
_HOST_LABEL = "kubernetes.io/hostname"
_NEAR_WEIGHT = 100
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
GROUP_INDEX_LABEL = "kueue.x-k8s.io/pod-group-pod-index"
GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
_FLUSH_FLAG = "--flush"


def build_cluster_pod(
    job: TrainingJob, identity: PodIdentity, wiring: Wiring, *, near_node: str = ""
) -> dict[str, Any]:
    """The pod of `identity`; `near_node`: where its predecessor's disk is, preferred."""
    pod = build_pod(job, identity, wiring)
    _own(pod, job, wiring, ROLE_REPLICA)
    _queue(pod, job, identity)
    spec = pod["spec"]
    if near_node:
        spec["affinity"] = _near(spec.get("affinity") or {}, near_node)
    _harden(spec)
    sidecar = next(c for c in spec["initContainers"] if c["name"] == SIDECAR)
    _place_sidecar(sidecar, job, spec, wiring)
    for container in spec["containers"]:
        _narrow_disk(container, job)
    _narrow_volume(spec, job)
    return pod


def build_flush_pod(
    job: TrainingJob, identity: PodIdentity, wiring: Wiring, node: str
) -> dict[str, Any]:
    """The sidecar alone, on the node of the replica's data, to finish what its pod left undone.

    It goes by the replica's name, so that the sidecars of all flush pods find each other as ever.
    """
    pod = build_cluster_pod(job, identity, wiring)
    spec = pod["spec"]
    sidecar = next(c for c in spec["initContainers"] if c["name"] == SIDECAR)
    for field in ("restartPolicy", "startupProbe"):
        sidecar.pop(field, None)
    sidecar["args"] = [*sidecar["args"], _FLUSH_FLAG]
    names = {mount["name"] for mount in sidecar["volumeMounts"]}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] in names]
    spec["containers"] = [sidecar]
    for field in ("initContainers", "schedulingGates", "affinity", "topologySpreadConstraints"):
        spec.pop(field, None)
    if node:
        spec["nodeName"] = node
    metadata = pod["metadata"]
    metadata["name"] = f"{metadata['name']}-flush"
    metadata["labels"][LABEL_ROLE] = ROLE_FLUSH
    for label in (QUEUE_LABEL, GROUP_LABEL, GROUP_INDEX_LABEL):
        metadata["labels"].pop(label, None)
    metadata["annotations"].pop(GROUP_COUNT, None)
    return pod


def spec_digest(job: TrainingJob) -> str:
    """Of all that a running pod can't take on: another one means other pods.

    The sidecar's image is not in it: an upgraded operator restarts nobody.
    """
    spec, checkpoint = job.spec, job.spec.checkpoint
    local = checkpoint.local
    parts = {
        "template": spec.pod_template,
        "replicas": spec.replicas,
        "processes": spec.processes_per_replica,
        "launcher": spec.launcher,
        "run": checkpoint.run_name,
        "memory": [checkpoint.memory.slots, checkpoint.memory.size_limit_bytes],
        "local": [local.volume, local.path, local.size, local.storage_class_name] if local else [],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _own(pod: dict[str, Any], job: TrainingJob, wiring: Wiring, role: str) -> None:
    metadata = pod["metadata"]
    metadata["ownerReferences"] = [owner_reference(job, wiring.uid)]
    metadata["labels"][LABEL_ROLE] = role
    metadata["annotations"][ANNOTATION_SPEC] = spec_digest(job)
    choice = wiring.restore.choice if wiring.restore is not None else None
    metadata["annotations"][ANNOTATION_CHOICE] = choice.token if choice is not None else ""


def _queue(pod: dict[str, Any], job: TrainingJob, identity: PodIdentity) -> None:
    """Kueue takes all pods of one group, or none."""
    queue = getattr(job.spec, "queue_name", "")
    if not queue:
        return
    pod["metadata"]["labels"] |= {
        QUEUE_LABEL: queue,
        GROUP_LABEL: job.name,
        GROUP_INDEX_LABEL: str(identity.replica),
    }
    pod["metadata"]["annotations"][GROUP_COUNT] = str(job.spec.replicas)


def _near(affinity: dict[str, Any], node: str) -> dict[str, Any]:
    """Preferred, never required: the node may be full, cordoned or gone by now."""
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    term = {
        "weight": _NEAR_WEIGHT,
        "preference": {
            "matchExpressions": [{"key": _HOST_LABEL, "operator": "In", "values": [node]}]
        },
    }
    preferred = node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    node_affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [*preferred, term]
    return {**affinity, "nodeAffinity": node_affinity}


def _harden(spec: dict[str, Any]) -> None:
    """A group that both sides share; the rest of the pod's context is the user's."""
    context = dict(spec.get("securityContext") or {})
    context.setdefault("fsGroup", SHARED_GROUP)
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    spec["securityContext"] = context
    spec.setdefault("enableServiceLinks", False)


def _place_sidecar(
    sidecar: dict[str, Any], job: TrainingJob, spec: dict[str, Any], wiring: Wiring
) -> None:
    context = spec["securityContext"]
    local = job.spec.checkpoint.local
    on_host = local is not None and local.volume == HOST_PATH
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if on_host:  # the kubelet makes such a folder for root, and no fsGroup reaches it
        security |= {"runAsUser": 0, "runAsNonRoot": False}
    else:
        user = context.get("runAsUser") or SIDECAR_USER
        security |= {"runAsUser": user, "runAsNonRoot": True}
    sidecar["securityContext"] = security
    sidecar["args"] = [*sidecar["args"], "--listen", _ANY_ADDRESS]
    sidecar["env"] = [
        _from_field(ENV_POD_IP, "status.podIP"),
        _from_field(ENV_NODE, "spec.nodeName"),
        *sidecar["env"],
    ]
    sidecar["terminationMessagePolicy"] = "FallbackToLogsOnError"
    if wiring.sidecar.pull_policy:
        sidecar["imagePullPolicy"] = wiring.sidecar.pull_policy
    _narrow_disk(sidecar, job)


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _narrow_disk(container: dict[str, Any], job: TrainingJob) -> None:
    """A node's disk is shared by all jobs: a container sees its own run's folder only."""
    local = job.spec.checkpoint.local
    if local is None or local.volume != HOST_PATH:
        return
    for mount in container.get("volumeMounts") or []:
        if mount["name"] == LOCAL_VOLUME:
            mount["mountPath"] = f"{LOCAL_MOUNT}/{job.run}"


def _narrow_volume(spec: dict[str, Any], job: TrainingJob) -> None:
    for volume in spec["volumes"]:
        if volume["name"] == LOCAL_VOLUME and "hostPath" in volume:
            volume["hostPath"]["path"] = f"{volume['hostPath']['path'].rstrip('/')}/{job.run}"
