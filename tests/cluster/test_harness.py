"""Proves the cluster itself, and the images in it: what every other cluster test stands on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backstay_protocol import codec
from backstay_protocol.names import (
    ENV_REPLICA,
    ENV_TOKEN,
    ENV_TOPOLOGY,
    ENV_VOLUME,
    PORT_API,
    PORT_HEALTH,
    URL_HEALTHZ,
    URL_READYZ,
)
from backstay_protocol.topology import Peer, Tiers, Topology
from cluster.built_images import Image
from cluster.kube import Kube, KubectlError, Object, is_true
from cluster.machine import NODES, Cluster
from cluster.object_store import Store

TRAINER = "backstay-example-trainer"
PORT = 8000
SERVE = f"cd /mem && exec python -m http.server {PORT}"
SERVICE = "peers"


def pod(name: str, image: Image, script: str, **spec: Any) -> Object:
    """A pod whose only container runs a shell script."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "harness"}},
        "spec": {
            "hostname": name,
            "subdomain": SERVICE,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "main",
                    "image": image.reference,
                    "command": ["sh", "-c", script],
                    "volumeMounts": [
                        {"name": volume["name"], "mountPath": f"/{volume['name']}"}
                        for volume in spec.get("volumes", [])
                    ],
                }
            ],
            **spec,
        },
    }


def with_native_sidecar(document: Object, script: str) -> Object:
    """The pod with a second container beside the first, and the same volumes in both."""
    main = document["spec"]["containers"][0]
    command = ["sh", "-c", script]
    sidecar = {**main, "name": "side", "command": command, "restartPolicy": "Always"}
    document["spec"]["initContainers"] = [sidecar]
    return document


def volumes() -> list[Object]:
    """Memory and the node's disk."""
    return [
        {"name": "mem", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
        {"name": "disk", "hostPath": {"path": "/var/lib/backstay", "type": "DirectoryOrCreate"}},
    ]


def headless_service() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": "harness"},
            "ports": [{"port": PORT}],
        },
    }


def fetch(kube: Kube, namespace: str, name: str, url: str) -> bool:
    """Whether a pod gets an answer from a URL."""
    code = f"import urllib.request as r; print(r.urlopen('{url}', timeout=3).status)"
    try:
        return kube.exec(namespace, name, "python", "-c", code, container="main").strip() == "200"
    except KubectlError:
        return False


@pytest.fixture
def pair(kube: Kube, namespace: str, images: dict[str, Image]) -> str:
    """Two pods with native sidecars on two nodes; their namespace."""
    documents = [
        with_native_sidecar(
            pod(name, images[TRAINER], SERVE, nodeName=f"node-{node}", volumes=volumes()),
            "echo beside > /mem/side; while :; do sleep 1; done",
        )
        for name, node in (("one", 1), ("two", 2))
    ]
    if not kube.get("node", "node-1"):
        pytest.skip("the nodes of this cluster are not those of the harness")
    kube.apply(headless_service(), *documents, namespace=namespace)
    kube.wait_ready(namespace, "one", "two")
    return namespace


def test_every_node_is_ready_and_has_a_zone(kube: Kube, cluster: Cluster) -> None:
    assert cluster.all_ready()
    zones = {
        node["metadata"]["name"]: node["metadata"]["labels"].get("topology.kubernetes.io/zone")
        for node in kube.list("nodes")
    }
    if cluster.name:
        assert {zones[f"node-{i}"] for i in range(1, NODES + 1)} == {"zone-a", "zone-b", "zone-c"}


def test_pods_reach_each_other_by_name_and_share_memory_with_their_sidecar(
    kube: Kube, pair: str
) -> None:
    assert kube.exec(pair, "one", "cat", "/mem/side", container="main") == "beside\n"
    kube.wait("one reaches two", lambda: fetch(kube, pair, "one", f"http://two.{SERVICE}:{PORT}/"))
    kube.wait("two reaches one", lambda: fetch(kube, pair, "two", f"http://one.{SERVICE}:{PORT}/"))


def test_a_network_policy_is_enforced(kube: Kube, pair: str) -> None:
    url = f"http://two.{SERVICE}:{PORT}/"
    kube.wait("one reaches two", lambda: fetch(kube, pair, "one", url))
    closed = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "closed"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }
    kube.apply(closed, namespace=pair)
    kube.wait("one is kept from two", lambda: not fetch(kube, pair, "one", url))
    kube.delete("networkpolicy", "closed", pair)
    kube.wait("one reaches two again", lambda: fetch(kube, pair, "one", url))


def test_the_disk_outlives_a_power_loss_and_memory_does_not(
    kube: Kube, pair: str, breakable: Cluster
) -> None:
    write = f"echo kept > /disk/{pair}; echo lost > /mem/lost"
    kube.exec(pair, "two", "sh", "-c", write, container="main")
    breakable.node_kill(2)
    kube.wait("node-2 NotReady", lambda: not is_true(kube.get("node", "node-2"), "Ready"))
    assert (breakable.disk(2) / "lib/backstay" / pair).read_text() == "kept\n"
    breakable.node_start(2)

    def restarted() -> bool:
        status = (kube.get("pod", "two", pair) or {})["status"]
        return status["containerStatuses"][0]["restartCount"] == 1 and "running" in str(status)

    kube.wait("pod two runs again", restarted, namespace=pair)
    kube.wait_ready(pair, "two")
    files = kube.exec(pair, "two", "ls", "/disk", "/mem", container="main").split()
    assert pair in files
    assert "lost" not in files
    (breakable.disk(2) / "lib/backstay" / pair).unlink()


def test_torch_of_this_interpreter_can_be_imported_in_a_pod(
    kube: Kube, namespace: str, images: dict[str, Image], torch_folder: str
) -> None:
    script = "python -c 'import backstay, torch; print(torch.ones(2).sum().item())' && torchrun -h"
    if not torch_folder:
        pytest.skip("torch is in the trainer's image")
    volume = {"name": "torch", "hostPath": {"path": torch_folder, "type": "Directory"}}
    document = pod("torch", images[TRAINER], script, restartPolicy="Never", volumes=[volume])
    mount = {"name": "torch", "mountPath": torch_folder, "readOnly": True}
    document["spec"]["containers"][0] |= {
        "volumeMounts": [mount],
        "securityContext": {"readOnlyRootFilesystem": True, "runAsNonRoot": True},
    }
    kube.apply(document, namespace=namespace)

    def phase() -> str:
        return (kube.get("pod", "torch", namespace) or {})["status"]["phase"]

    kube.wait("the pod's end", lambda: phase() in ("Succeeded", "Failed"), timeout=120)
    log = kube.logs(namespace, "torch")
    assert phase() == "Succeeded", log
    assert log.startswith("2.0\n"), log


def test_the_sidecar_image_starts_beside_a_trainer_and_answers_its_probes(
    kube: Kube, namespace: str, images: dict[str, Image]
) -> None:
    topology = Topology(
        namespace=namespace,
        job="job",
        run_name="run",
        uid="1",
        replicas=1,
        processes_per_replica=1,
        peers=(Peer(replica=0, address=f"job.{SERVICE}:{PORT_API}"),),
        tiers=Tiers(),
    )
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "job"},
        "data": {"topology.json": codec.dumps(topology).decode()},
    }
    memory = volumes()[0]
    files = {"name": "config", "configMap": {"name": "job"}}
    document = pod("job", images[TRAINER], "sleep 600", volumes=[memory, files])
    document["spec"]["initContainers"] = [sidecar_container(images["backstay-sidecar"])]
    kube.apply(headless_service(), config, document, namespace=namespace)
    kube.wait_ready(namespace, "job")
    for path in (URL_HEALTHZ, URL_READYZ):
        url = f"http://job.{SERVICE}:{PORT_HEALTH}{path}"
        kube.wait(url, lambda url=url: fetch(kube, namespace, "job", url), namespace=namespace)


def sidecar_container(image: Image) -> Object:
    """The sidecar under the strictest security context."""
    env = {
        ENV_TOPOLOGY: "/config/topology.json",
        ENV_REPLICA: "0",
        ENV_VOLUME: "/mem",
        ENV_TOKEN: "a-token-for-tests-only",
    }
    return {
        "name": "sidecar",
        "image": image.reference,
        "restartPolicy": "Always",
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "startupProbe": {
            "httpGet": {"path": URL_HEALTHZ, "port": PORT_HEALTH},
            "periodSeconds": 1,
            "failureThreshold": 60,
        },
        "volumeMounts": [
            {"name": "mem", "mountPath": "/mem"},
            {"name": "config", "mountPath": "/config"},
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def test_pods_can_use_the_store(kube: Kube, store: Store) -> None:
    with store.client() as client:
        client._put_object(store.bucket, "harness/object", b"1")
    assert store.names("harness/") == ["harness/object"]


def test_what_a_test_waits_for_in_vain_is_told_with_pods_events_and_logs(
    kube: Kube, namespace: str, images: dict[str, Image]
) -> None:
    document = pod("sad", images[TRAINER], "echo the last words; exit 3", restartPolicy="Never")
    kube.apply(document, namespace=namespace)
    kube.wait("an exit", lambda: "exitCode" in json.dumps(kube.get("pod", "sad", namespace)))
    with pytest.raises(AssertionError, match="not within 1 s: the impossible") as failure:
        kube.wait("the impossible", lambda: False, timeout=1, namespace=namespace)
    for words in ("sad on ", '"exitCode": 3', "the last words", "container main"):
        assert words in str(failure.value)


def test_the_images_run_without_root_and_without_pip(
    kube: Kube, namespace: str, images: dict[str, Image]
) -> None:
    script = "id -u; python -m pip --version"
    wanted = ["backstay-operator", "backstay-sidecar", TRAINER]
    documents = [pod(n, images[n], script, restartPolicy="Never") for n in wanted]
    kube.apply(*documents, namespace=namespace)
    for name in wanted:
        kube.wait(
            f"the end of {name}",
            lambda name=name: "exitCode" in json.dumps(kube.get("pod", name, namespace)),
            namespace=namespace,
        )
        log = kube.logs(namespace, name)
        assert log.startswith("65532\n")
        assert "No module named pip" in log
