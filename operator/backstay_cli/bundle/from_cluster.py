"""A TrainingJob in a cluster, by kubectl with the person's own rights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from backstay_cli.buckets import cluster_bucket
from backstay_cli.bundle.archive import Bundle
from backstay_cli.bundle.from_sidecars import add_metrics, gather_sidecars
from backstay_cli.bundle.listing import list_bucket
from backstay_cli.cluster import OPERATOR_SELECTOR, ClusterJob, Kubectl
from backstay_cli.errors import CommandError
from backstay_cli.leader import cluster_leader
from backstay_cli.where import Where
from backstay_operator.api.names import CRD_NAME, LABEL_JOB
from backstay_operator.manifests.objects import owned_name
from backstay_protocol.names import PORT_HEALTH

_OWNED = ("configmap", "service", "poddisruptionbudget", "networkpolicy", "persistentvolumeclaim")
_AT_ONCE = 8
_LINES = 20_000
_NODE_STATUS = ("conditions", "allocatable", "capacity", "nodeInfo")


async def gather_cluster(where: Where, bundle: Bundle) -> None:
    """Everything of it. Raises CommandError where the TrainingJob itself can't be read."""
    with where.cluster_job() as job:
        bundle.about = f"TrainingJob {job.namespace}/{job.name}"
        kubectl = job.kubectl
        _know_secrets(job, bundle)
        bundle.json("trainingjob.json", job.tree, "the TrainingJob, spec and status")
        pods = _pods(job, bundle)
        _objects(job, pods, bundle)
        _logs(kubectl, _chosen(pods, bundle), "logs", bundle)
        _operator(kubectl, bundle)
        _sidecars(job, bundle)
        with bundle.attempt("remote"):
            list_bucket(cluster_bucket(job, where.endpoint), bundle)


def _know_secrets(job: ClusterJob, bundle: Bundle) -> None:
    """What must not be in the bundle, as far as it may be read; only names of keys go in."""
    remote = job.tree["spec"]["checkpoint"].get("remote") or {}
    names = [owned_name(job.name), remote.get("credentialsSecret"), remote.get("caSecret")]
    keys: dict[str, list[str]] = {}
    for name in filter(None, names):
        with bundle.attempt(f"secrets.json: Secret {name}"):
            found = job.kubectl.secret(name)
            bundle.masker.know(*found.values())
            keys[name] = sorted(found)
    bundle.json("secrets.json", keys, "which keys the job's Secrets have; no values")


def _pods(job: ClusterJob, bundle: Bundle) -> list[dict[str, Any]]:
    pods: list[dict[str, Any]] = []
    with bundle.attempt("pods.json"):
        pods = job.kubectl.get("pods", f"--selector={LABEL_JOB}={job.name}")["items"]
        bundle.json("pods.json", pods, "the job's pods, spec and status")
    return pods


def _objects(job: ClusterJob, pods: list[dict[str, Any]], bundle: Bundle) -> None:
    kubectl = job.kubectl
    ours = {job.name} | {pod["metadata"]["name"] for pod in pods}
    bundle.fetch("events.json", "Events of job and pods", lambda: _events(kubectl, job.name, ours))
    bundle.fetch("nodes.json", "nodes of the pods", lambda: _nodes(kubectl, pods))
    for kind in _OWNED:
        with bundle.attempt(f"objects/{kind}.json"):
            found = kubectl.get(kind, f"--selector={LABEL_JOB}={job.name}")["items"]
            bundle.json(f"objects/{kind}.json", found, f"the job's {kind}")
    bundle.fetch(
        "namespace.json",
        "the namespace with its labels",
        lambda: kubectl.get("namespace", job.namespace),
    )
    bundle.fetch("definition.json", "the definition's versions", lambda: _definition(kubectl))
    bundle.fetch(
        "kubernetes.json",
        "versions of kubectl and API server",
        lambda: json.loads(kubectl.run("version", "-o", "json")),
    )


def _events(kubectl: Kubectl, job: str, ours: set[str]) -> list[dict[str, Any]]:
    """Of the job, its pods, and pods that are gone (they begin with its name)."""
    found = []
    for event in kubectl.get("events")["items"]:
        about = event.get("involvedObject") or event.get("regarding") or {}
        name = str(about.get("name", ""))
        if name in ours or name.startswith(f"{job}-"):
            found.append(event)
    return found


def _nodes(kubectl: Kubectl, pods: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Conditions, room, taints and labels; not the images that a node has."""
    names = {pod["spec"].get("nodeName") for pod in pods} - {None}
    found = []
    for node in kubectl.get("nodes")["items"]:
        if node["metadata"]["name"] not in names:
            continue
        status = node.get("status") or {}
        found.append(
            {
                "name": node["metadata"]["name"],
                "labels": node["metadata"].get("labels"),
                "spec": node.get("spec"),
                "status": {key: status.get(key) for key in _NODE_STATUS},
            }
        )
    return found


def _definition(kubectl: Kubectl) -> dict[str, Any]:
    found = kubectl.get("crd", CRD_NAME)
    versions = [version["name"] for version in (found.get("spec") or {}).get("versions") or ()]
    return {
        "annotations": found["metadata"].get("annotations"),
        "versions": versions,
        "status": found.get("status"),
    }


def _chosen(pods: list[dict[str, Any]], bundle: Bundle) -> list[dict[str, Any]]:
    """Those in trouble first, then by name."""
    order = sorted(pods, key=lambda pod: (not _in_trouble(pod), pod["metadata"]["name"]))
    left = order[bundle.limits.pods :]
    if left:
        bundle.missing("logs", f"of {len(left)} of {len(order)} pods are left out (--pods)")
    return order[: bundle.limits.pods]


def _in_trouble(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status") or {}
    restarted = any(one.get("restartCount") for one in _containers(status))
    return status.get("phase") != "Running" or restarted


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    kinds = ("initContainerStatuses", "containerStatuses")
    return [one for kind in kinds for one in status.get(kind) or ()]


def _logs(kubectl: Kubectl, pods: list[dict[str, Any]], folder: str, bundle: Bundle) -> None:
    """Of every container, and of the one before where it was restarted."""
    wanted: list[tuple[str, str, bool]] = []
    for pod in pods:
        name = pod["metadata"]["name"]
        for container in _containers(pod.get("status") or {}):
            wanted.append((name, container["name"], False))
            if container.get("restartCount"):
                wanted.append((name, container["name"], True))

    def one(asked: tuple[str, str, bool]) -> None:
        _log(kubectl, *asked, folder=folder, bundle=bundle)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(one, wanted))


def _log(
    kubectl: Kubectl, pod: str, container: str, previous: bool, *, folder: str, bundle: Bundle
) -> None:
    path = f"{folder}/{pod}/{container}{'.previous' if previous else ''}.log"
    command = ["logs", f"pod/{pod}", "-c", container, f"--tail={_LINES}"]
    with bundle.attempt(path):
        text = kubectl.run(*command, *(["--previous"] if previous else []))
        what = f"log of {container} in {pod}{', before its last restart' if previous else ''}"
        bundle.log(path, text.encode(), what)


def _operator(kubectl: Kubectl, bundle: Bundle) -> None:
    """Its pods, settings and logs, wherever it is installed."""
    with bundle.attempt("operator"):
        pods = kubectl.get("pods", "--all-namespaces", f"--selector={OPERATOR_SELECTOR}")["items"]
        bundle.json("operator/pods.json", pods, "the operator's pods")
        if not pods:
            raise CommandError("no pod of an operator is there")
        bundle.fetch(
            "operator/settings.json",
            "the operator's settings",
            lambda: kubectl.get("configmap", "--all-namespaces", f"--selector={OPERATOR_SELECTOR}")[
                "items"
            ],
        )
        for namespace in sorted({pod["metadata"].get("namespace", "") for pod in pods}):
            there = [pod for pod in pods if pod["metadata"].get("namespace", "") == namespace]
            _logs(kubectl.inside(namespace), there, "operator/logs", bundle)


def _sidecars(job: ClusterJob, bundle: Bundle) -> None:
    with bundle.attempt("leader"):
        gather_sidecars(cluster_leader(job), bundle, job.reach)
    with ExitStack() as forwards:
        for replica, pod in list(job.pods.items())[: bundle.limits.pods]:
            with bundle.attempt(f"sidecars/{replica}/metrics.txt"):
                address = forwards.enter_context(job.kubectl.forward(pod, PORT_HEALTH))
                add_metrics(address, replica, bundle)
