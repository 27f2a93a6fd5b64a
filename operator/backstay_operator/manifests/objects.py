"""The objects of a job beside its pods: Service, Secret, ConfigMap, budget, policy, claims.

Pure builders: values in, plain dicts out. The control loop's applier sends them. All but the claims
are owned by the job and go with it (the Service with the leader's pod); a claim holds checkpoints,
so it stays until a person deletes it.
"""

from __future__ import annotations

import base64
from typing import Any

from backstay_operator.api.job import LocalSpec, TrainingJob
from backstay_operator.api.names import API_VERSION, KIND, LABEL_JOB, LABEL_REPLICA, LABEL_RUN
from backstay_operator.manifests.wiring import TOPOLOGY_FILE, hostname
from backstay_protocol import codec
from backstay_protocol.names import PORT_API, PORT_HEALTH
from backstay_protocol.topology import Topology

MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR_NAME = "backstay-operator"
TOKEN_KEY = "token"
OPERATOR_LABELS = {
    "app.kubernetes.io/part-of": "backstay",
    "app.kubernetes.io/component": "operator",
}
"""As the chart labels the operator's pods, whatever the release is called."""


def owned_name(job: str) -> str:
    """Name of the job's Secret and ConfigMap."""
    return f"{job}-backstay"


def claim_name(job: str, replica: int) -> str:
    """Name of one replica's claim, with `local.volume: pvc`."""
    return f"{hostname(job, replica)}-backstay"


def owner_reference(job: TrainingJob, uid: str) -> dict[str, Any]:
    """Deletes the object with its job, and holds nobody up."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def build_service(
    job: TrainingJob, uid: str, leader: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Headless: a DNS name for every pod, before it is ready (torchrun needs it to become so).

    Of the leader's pod as well: when the job is deleted the names are there until that pod has
    ended, for the last common save goes by them.
    """
    metadata = _metadata(job, uid, job.name)
    if leader is not None:
        metadata["ownerReferences"].append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": leader["metadata"]["name"],
                "uid": leader["metadata"]["uid"],
                "controller": False,
                "blockOwnerDeletion": False,
            }
        )
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB: job.name},
            "ports": [
                {"name": "api", "port": PORT_API, "protocol": "TCP", "targetPort": PORT_API},
                {
                    "name": "health",
                    "port": PORT_HEALTH,
                    "protocol": "TCP",
                    "targetPort": PORT_HEALTH,
                },
            ],
        },
    }


def build_secret(job: TrainingJob, uid: str, token: str) -> dict[str, Any]:
    """The job's bearer token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": _metadata(job, uid, owned_name(job.name)),
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def token_of(secret: dict[str, Any]) -> str:
    """The token in a Secret that `build_secret` made; "" where it has none."""
    encoded = (secret.get("data") or {}).get(TOKEN_KEY, "")
    return base64.b64decode(encoded).decode(errors="replace").strip()


def build_config_map(job: TrainingJob, uid: str, topology: Topology) -> dict[str, Any]:
    """What sidecars read when they start."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, uid, owned_name(job.name)),
        "data": {TOPOLOGY_FILE: codec.dumps(topology).decode()},
    }


def build_disruption_budget(job: TrainingJob, uid: str) -> dict[str, Any]:
    """No eviction behind our back: a drain's taint is answered by saving, then deleting."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, uid, job.name),
        "spec": {
            "minAvailable": job.spec.replicas,
            "selector": {"matchLabels": {LABEL_JOB: job.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def build_network_policy(job: TrainingJob, uid: str, operator_namespace: str) -> dict[str, Any]:
    """Every port inside the job (torch listens where it likes); the API for the operator.

    The health port is open to scrapers of every namespace: it tells no secret and takes no order
    but to save.
    """
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
        "podSelector": {"matchLabels": dict(OPERATOR_LABELS)},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, uid, job.name),
        "spec": {
            "podSelector": {"matchLabels": {LABEL_JOB: job.name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {LABEL_JOB: job.name}}}]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": PORT_API}]},
                {
                    "from": [{"namespaceSelector": {}}],
                    "ports": [{"protocol": "TCP", "port": PORT_HEALTH}],
                },
            ],
        },
    }


def build_claim(job: TrainingJob, local: LocalSpec, replica: int) -> dict[str, Any]:
    """One replica's disk. Not owned: it outlives the job, as the run does."""
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": local.size}},
    }
    if local.storage_class_name:
        spec["storageClassName"] = local.storage_class_name
    metadata = {
        "name": claim_name(job.name, replica),
        "namespace": job.namespace,
        "labels": {**_labels(job), LABEL_REPLICA: str(replica)},
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": spec,
    }


def _metadata(job: TrainingJob, uid: str, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": _labels(job),
        "ownerReferences": [owner_reference(job, uid)],
    }


def _labels(job: TrainingJob) -> dict[str, str]:
    return {
        LABEL_JOB: job.name,
        LABEL_RUN: job.spec.checkpoint.run_name,
        MANAGED_BY: OPERATOR_NAME,
    }
