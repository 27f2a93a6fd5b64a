"""The control plane: its network and its processes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from cluster.harness import layout, linux
from cluster.harness.api import Api, Refused
from cluster.harness.layout import Layout
from cluster.harness.linux import run
from cluster.harness.settings import Settings

FIRST = ["etcd", "kube-apiserver", "forward"]
# These end when the API server does not know them yet.
COMPONENTS = [*FIRST, "kube-controller-manager", "kube-scheduler"]


def make_network(cluster: Layout) -> None:
    """The control plane's namespace, which holds the bridge that is the network."""
    run("ip", "netns", "add", cluster.netns)
    script = [
        "link set lo up",
        # A bridge without an address of its own takes the lowest of its ports' and changes it
        # when nodes come and go: the others then send to the old one for half a minute.
        f"link add br0 address {layout.BRIDGE_MAC} type bridge",
        f"addr add {layout.CONTROL_IP}/{layout.NODE_PREFIX_LEN} dev br0",
        "link set br0 up",
    ]
    script += [
        f"route add {layout.pod_cidr(i)} via {layout.node_ip(i)}"
        for i in range(layout.MAX_NODES + 1)
    ]
    run("ip", "-n", cluster.netns, "-batch", "-", input="\n".join(script))


def netns_file(cluster: Layout) -> str:
    """The file that stands for the control plane's network namespace."""
    return f"/run/netns/{cluster.netns}"


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def command(cluster: Layout, component: str, settings: Settings) -> list[str]:
    """The command line of one component."""
    pki, config, bins = cluster.pki, cluster.config, layout.bin_dir()
    if component == "forward":
        return [*layout.module("forward"), netns_file(cluster), str(settings.port), "6443"]
    flags: dict[str, list[str]] = {
        "etcd": [
            f"--data-dir={cluster.state / 'etcd'}",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # A test cluster's etcd does not have to outlive a power cut of the machine.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
        "kube-apiserver": [
            f"--advertise-address={layout.CONTROL_IP}",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--service-cluster-ip-range={layout.SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            # Webhooks and aggregated APIs are called at pod addresses: no kube-proxy here.
            "--enable-aggregator-routing=true",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={pki}/ca.crt",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-proxy.crt",
            f"--proxy-client-key-file={pki}/front-proxy.key",
            f"--service-account-issuer=https://kubernetes.default.svc.{layout.CLUSTER_DOMAIN}",
            f"--service-account-key-file={pki}/service-account.key",
            f"--service-account-signing-key-file={pki}/service-account.key",
            f"--default-not-ready-toleration-seconds={settings.toleration_seconds}",
            f"--default-unreachable-toleration-seconds={settings.toleration_seconds}",
        ],
        "kube-controller-manager": [
            f"--kubeconfig={config}/controller-manager.kubeconfig",
            f"--authentication-kubeconfig={config}/controller-manager.kubeconfig",
            f"--authorization-kubeconfig={config}/controller-manager.kubeconfig",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={pki}/service-account.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            "--leader-elect=false",
            "--node-monitor-period=1s",
            # The default of 20 calls a second makes its start take 5 s.
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            f"--node-monitor-grace-period={settings.grace_seconds}s",
        ],
        "kube-scheduler": [
            f"--kubeconfig={config}/scheduler.kubeconfig",
            f"--authentication-kubeconfig={config}/scheduler.kubeconfig",
            f"--authorization-kubeconfig={config}/scheduler.kubeconfig",
            "--leader-elect=false",
        ],
    }
    program = str(bins / component)
    return ["nsenter", f"--net={netns_file(cluster)}", program, *flags[component]]


def pid_file(cluster: Layout, component: str) -> Path:
    """Where a component's process number is kept."""
    return cluster.run / f"{component}.pid"


def start(cluster: Layout, component: str, settings: Settings) -> None:
    """Start one component unless it runs."""
    path = pid_file(cluster, component)
    if linux.read_pid(path):
        return
    log = cluster.logs / f"{component}.log"
    argv = command(cluster, component, settings)
    linux.write_pid(
        path, linux.spawn(argv, log, f"{cluster.cgroup}/control-plane", layout.module_env())
    )


def stop(cluster: Layout, component: str) -> None:
    """End one component at once, as a crash would."""
    pid = linux.read_pid(pid_file(cluster, component))
    if pid:
        linux.kill_and_wait(pid, signal.SIGKILL)


def adopt_node(api: Api, index: int) -> bool:
    """Tell a node that has registered its range of pod addresses."""
    cidr = layout.pod_cidr(index)
    role = "control-plane" if index == layout.CONTROL_NODE else "worker"
    labels = {f"node-role.kubernetes.io/{role}": ""}
    patch = {"metadata": {"labels": labels}, "spec": {"podCIDR": cidr, "podCIDRs": [cidr]}}
    path = f"/api/v1/nodes/{layout.node_name(index)}"
    try:
        api.call("PATCH", path, patch, "application/merge-patch+json")
        return True
    except (OSError, Refused):
        return False
