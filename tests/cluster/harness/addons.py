"""What the API server is told first: DNS, and who may do what."""

from __future__ import annotations

import socket
import struct
from typing import Any

from cluster.harness import layout, linux
from cluster.harness.api import Api

RBAC = "rbac.authorization.k8s.io"
READ = ["get", "list", "watch"]
DNS_LABELS = {"k8s-app": "kube-dns"}
COREFILE = f""".:53 {{
    errors
    health
    ready
    kubernetes {layout.CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        pods insecure
        ttl 2
        fallthrough in-addr.arpa ip6.arpa
    }}
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
    reload 2s
}}
"""


def _rule(group: str, *resources: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": READ}


def _role(api: Api, name: str, subject: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    meta = {"name": name}
    api.apply(
        f"/apis/{RBAC}/v1/clusterroles/{name}",
        {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": meta, "rules": rules},
    )
    api.apply(
        f"/apis/{RBAC}/v1/clusterrolebindings/{name}",
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": name},
            "subjects": [subject],
        },
    )


def _core(api: Api, resource: str, kind: str, name: str, body: dict[str, Any]) -> None:
    document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}} | body
    api.apply(f"/api/v1/namespaces/kube-system/{resource}/{name}", document)


def _dns_pod() -> dict[str, Any]:
    def probe(path: str, port: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": port}, "periodSeconds": 1, "failureThreshold": 10}

    return {
        "metadata": {"labels": DNS_LABELS},
        "spec": {
            "serviceAccountName": "coredns",
            "priorityClassName": "system-cluster-critical",
            "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
            "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
            "dnsPolicy": "Default",
            "containers": [
                {
                    "name": "coredns",
                    "image": layout.DNS_IMAGE,
                    "imagePullPolicy": "Never",
                    "args": ["-conf", "/etc/coredns/Corefile"],
                    "ports": [{"containerPort": 53, "protocol": p} for p in ("UDP", "TCP")],
                    "readinessProbe": probe("/ready", 8181),
                    "livenessProbe": probe("/health", 8080),
                    "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
                    "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}},
                }
            ],
            "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
        },
    }


def install(api: Api) -> None:
    """CoreDNS as a deployment on the control plane's node; the rights of kube-router."""
    account = {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}
    slices = _rule("discovery.k8s.io", "endpointslices")
    _role(
        api, "system:coredns", account,
        [_rule("", "endpoints", "services", "pods", "namespaces"), slices],
    )  # fmt: skip
    _role(
        api, "system:kube-router", {"apiGroup": RBAC, "kind": "User", "name": "system:kube-router"},
        [
            _rule("", "endpoints", "services", "pods", "namespaces", "nodes"),
            _rule("networking.k8s.io", "networkpolicies"),
            slices,
        ],
    )  # fmt: skip
    _core(api, "serviceaccounts", "ServiceAccount", "coredns", {})
    _core(api, "configmaps", "ConfigMap", "coredns", {"data": {"Corefile": COREFILE}})
    ports = [{"name": f"dns-{p.lower()}", "port": 53, "protocol": p} for p in ("UDP", "TCP")]
    spec = {"clusterIP": layout.SERVICE_DNS_IP, "ports": ports, "selector": DNS_LABELS}
    _core(api, "services", "Service", "kube-dns", {"spec": spec})
    api.apply(
        "/apis/apps/v1/namespaces/kube-system/deployments/coredns",
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "coredns", "labels": DNS_LABELS},
            "spec": {"selector": {"matchLabels": DNS_LABELS}, "template": _dns_pod()},
        },
    )


def dns_answers(node_process: int) -> bool:
    """Whether a process on the node can resolve the API server's service."""

    def ask() -> bool:
        labels = f"kubernetes.default.svc.{layout.CLUSTER_DOMAIN}".split(".")
        name = b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"
        query = struct.pack(">6H", 1, 0x0100, 1, 0, 0, 0) + name + struct.pack(">2H", 1, 1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(0.3)
            client.sendto(query, (layout.SERVICE_DNS_IP, 53))
            answer = client.recv(512)
        return answer[3] & 15 == 0 and struct.unpack(">H", answer[6:8])[0] > 0

    return linux.in_netns(f"/proc/{node_process}/ns/net", ask)
