"""Starts, cuts off, kills and enters the cluster's nodes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from cluster.harness import archives, layout, linux
from cluster.harness.layout import Layout
from cluster.harness.linux import run
from cluster.harness.settings import Settings

ZONES = "abcdefgh"
PARTITION = "partition"
CONTROL_TAINT = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}


def _link(index: int) -> str:
    """The node's end of the cable in the control plane's namespace."""
    return f"cable{index}"


def _pid_file(cluster: Layout, index: int) -> Path:
    return cluster.run / f"{layout.node_name(index)}.pid"


def _cgroup(cluster: Layout, index: int) -> str:
    return f"{cluster.cgroup}/{layout.node_name(index)}"


def first_process(cluster: Layout, index: int) -> int | None:
    """The node's first process, or None if the node is off."""
    return linux.read_pid(_pid_file(cluster, index))


def _containerd_config() -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing",
]

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
path = "/var/lib/containerd/opt"

[{cri}]
sandbox_image = "{layout.PAUSE_IMAGE}"
# Without CAP_SYS_RESOURCE no process may be protected better than containerd is.
restrict_oom_score_adj = true

[{cri}.containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
SystemdCgroup = false

[{cri}.cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/var/lib/cni/net.d"
"""


def _cni_config(index: int) -> dict[str, Any]:
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": layout.pod_cidr(index)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": "/var/lib/cni/networks",
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _kubelet_config(cluster: Layout, index: int, settings: Settings) -> dict[str, Any]:
    name = layout.node_name(index)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(cluster.pki / f"{name}.crt"),
        "tlsPrivateKeyFile": str(cluster.pki / f"{name}.key"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [layout.SERVICE_DNS_IP],
        "clusterDomain": layout.CLUSTER_DOMAIN,
        "resolvConf": "",
        "nodeStatusUpdateFrequency": "2s",
        # Posted even when unchanged: a node that was out of touch is Ready again sooner.
        "nodeStatusReportFrequency": "2s",
        "nodeLeaseDurationSeconds": 4,
        # All nodes share one real disk: its use must not evict pods or images.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "systemReserved": {"memory": settings.reserved_memory, "cpu": settings.reserved_cpu},
        "maxPods": 100,
    } | ({"registerWithTaints": [CONTROL_TAINT]} if index == layout.CONTROL_NODE else {})


def _proxy_config(cluster: Layout, index: int, settings: Settings) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(cluster.config / "proxy.kubeconfig")},
        "mode": settings.proxy_mode,
        "clusterCIDR": layout.POD_CIDR,
        "hostnameOverride": layout.node_name(index),
        # The table's size can only be set for the whole machine.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def _configure(cluster: Layout, index: int, settings: Settings) -> Path:
    """Write the node's configuration files; the returned one is for nodeinit."""
    name = layout.node_name(index)
    folder, bins = cluster.config, layout.bin_dir()
    logs = cluster.logs / name
    logs.mkdir(parents=True, exist_ok=True)
    disk = cluster.disk(index)
    net = disk / "lib/cni/net.d"
    net.mkdir(parents=True, exist_ok=True)
    (net / "10-pods.conflist").write_text(json.dumps(_cni_config(index), indent=2))
    files = {
        "kubelet": json.dumps(_kubelet_config(cluster, index, settings), indent=2),
        "proxy": json.dumps(_proxy_config(cluster, index, settings), indent=2),
        "containerd": _containerd_config(),
    }
    paths = {kind: folder / f"{name}.{kind}" for kind in files}
    for kind, text in files.items():
        paths[kind].write_text(text)
    labels = "topology.kubernetes.io/region=test"
    if index != layout.CONTROL_NODE:
        zone = ZONES[(index - 1) % settings.zones]
        labels += f",topology.kubernetes.io/zone=zone-{zone}"
    commands = {
        "containerd": ["containerd", "--config", str(paths["containerd"]), "--log-level", "warn"],
        "kubelet": [
            str(bins / "kubelet"),
            f"--config={paths['kubelet']}",
            f"--kubeconfig={folder}/{name}.kubeconfig",
            f"--hostname-override={name}",
            f"--node-ip={layout.node_ip(index)}",
            f"--node-labels={labels}",
        ],
        "kube-proxy": [str(bins / "kube-proxy"), f"--config={paths['proxy']}"],
    }
    if settings.network_policy:
        commands["kube-router"] = [
            str(bins / "kube-router"),
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
            "--run-loadbalancer=false",
            "--enable-ipv6=false",
            f"--kubeconfig={folder}/kube-router.kubeconfig",
            f"--hostname-override={name}",
            f"--service-cluster-ip-range={layout.SERVICE_CIDR}",
        ]
    others = [i for i in range(layout.MAX_NODES + 1) if i != index]
    own_images = [archives.pause_archive()]
    if index == layout.CONTROL_NODE:
        own_images.append(archives.dns_archive())
    config = folder / f"{name}.json"
    config.write_text(
        json.dumps(
            {
                "name": name,
                "cgroup": _cgroup(cluster, index),
                "disk": str(disk),
                "logs": str(logs),
                "ip": f"{layout.node_ip(index)}/{layout.NODE_PREFIX_LEN}",
                "routes": [[layout.pod_cidr(i), layout.node_ip(i)] for i in others],
                "service_cidr": layout.SERVICE_CIDR,
                "control_ip": layout.CONTROL_IP,
                "mounts": [mount.split(":") for mount in settings.mounts],
                "images": [str(path) for path in own_images],
                "commands": commands,
            },
            indent=2,
        )
    )
    return config


def start(cluster: Layout, index: int, settings: Settings) -> None:
    """Power a node on, unless it is on. Its disk is as it was left."""
    if first_process(cluster, index):
        return
    linux.empty_cgroup(_cgroup(cluster, index))
    linux.make_cgroup(_cgroup(cluster, index))
    config = _configure(cluster, index, settings)
    store = cluster.disk(index) / "lib/containerd"
    if settings.seed and not store.exists():
        archives.plant(Path(settings.seed), store)
    done = run(*layout.module("nodeinit"), str(config), env=layout.module_env())
    pid = int(done.stdout)
    linux.write_pid(_pid_file(cluster, index), pid)
    link = _link(index)
    run("ip", "-n", cluster.netns, "link", "del", link, check=False)
    run(
        "ip", "-n", cluster.netns, "link", "add", link, "type", "veth",
        "peer", "name", "eth0", "netns", str(pid),
    )  # fmt: skip
    run("ip", "-n", cluster.netns, "link", "set", link, "master", "br0", "up")


def kill(cluster: Layout, index: int) -> None:
    """Power loss: every process of the node ends at once, its memory and network go."""
    run("ip", "-n", cluster.netns, "link", "del", _link(index), check=False)
    pid = first_process(cluster, index)
    if pid and not linux.kill_and_wait(pid):
        raise RuntimeError(f"{layout.node_name(index)} does not end")
    linux.empty_cgroup(_cgroup(cluster, index))


def partition(cluster: Layout, index: int, others: list[int]) -> None:
    """Cut a node off from some others, or from all: the node runs on.

    From all, the cable is pulled at the switch. From some, the node drops what comes from
    them and what goes to them, for itself and for its pods. The control plane is node 0.
    """
    if not others:
        run("ip", "-n", cluster.netns, "link", "set", _link(index), "nomaster")
        return
    addresses = []
    for other in others:
        addresses += [layout.node_ip(other), layout.pod_cidr(other)]
        if other == layout.CONTROL_NODE:
            addresses.append(layout.CONTROL_IP)
    group = "{ " + ", ".join(addresses) + " }"
    rules = f"""
add table inet {PARTITION}
add chain inet {PARTITION} from {{ type filter hook prerouting priority -310; }}
add chain inet {PARTITION} to {{ type filter hook postrouting priority 310; }}
add rule inet {PARTITION} from ip saddr {group} drop
add rule inet {PARTITION} to ip daddr {group} drop
"""
    done = enter(cluster, index, ["nft", "-f", "-"], input=rules, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())


def heal(cluster: Layout, index: int) -> None:
    """End every partition of the node."""
    run("ip", "-n", cluster.netns, "link", "set", _link(index), "master", "br0", "up")
    enter(cluster, index, ["nft", "delete", "table", "inet", PARTITION], capture_output=True)


def partitioned(cluster: Layout, index: int) -> bool:
    """Whether the node is cut off from anything."""
    done = run("ip", "-n", cluster.netns, "-o", "link", "show", "dev", _link(index), check=False)
    if done.returncode != 0:
        return False
    listing = enter(
        cluster, index, ["nft", "list", "table", "inet", PARTITION], capture_output=True
    )
    return "master br0" not in done.stdout or listing.returncode == 0


def enter(
    cluster: Layout, index: int, argv: list[str], **kwargs: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command on the node."""
    pid = first_process(cluster, index)
    if not pid:
        raise RuntimeError(f"{layout.node_name(index)} is off")
    return subprocess.run(
        ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-C", *argv], **kwargs
    )


def load(cluster: Layout, index: int, archive: Path) -> str:
    """Import an image archive (OCI or Docker) into the node's containerd."""
    with open(archive, "rb") as data:
        done = enter(
            cluster, index, ["ctr", "-n", "k8s.io", "images", "import", "-"],
            stdin=data, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.strip()
