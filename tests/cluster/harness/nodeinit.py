"""One node: makes its namespaces, then runs in them as the node's first process.

Run as: python -m cluster.harness.nodeinit CONFIG.json

The process that is started joins the node's cgroup and new namespaces, forks the
node's first process, prints that one's process number and ends. The first process
mounts what makes the machine look like one of its own, starts containerd, kubelet and
kube-proxy, starts them again when they end, and reaps orphans. Killing it is the
node's power loss: the kernel then ends every process of the node, its mounts (with
all memory-backed volumes) and its network.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from cluster.harness import linux
from cluster.harness.linux import mount

# What the kubelet would set for the whole machine: it gets files of its own instead.
PRIVATE_SYSCTLS = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
]


def launch(config: dict[str, Any]) -> None:
    """Fork the first process of the node and print its number."""
    groups = linux.hierarchies()
    # Opened before the namespace is made: a file open for writing would keep / writable.
    log = os.open(config["logs"] + "/init.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    linux.join_cgroup(config["cgroup"])
    linux.unshare(
        linux.CLONE_NEWNS
        | linux.CLONE_NEWPID
        | linux.CLONE_NEWNET
        | linux.CLONE_NEWUTS
        | linux.CLONE_NEWIPC
        | linux.CLONE_NEWCGROUP
    )
    child = os.fork()
    if child:
        print(child, flush=True)
        return
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for number, handle in ((0, quiet), (1, log), (2, log)):
        os.dup2(handle, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    make_mounts(config, groups)
    make_network(config)
    Node(config).serve()


def make_mounts(config: dict[str, Any], groups: list[tuple[str, str, str]]) -> None:
    """The node's own view of the file system."""
    disk = Path(config["disk"])
    mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    mount("sysfs", "/sys", "sysfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    mount("tmpfs", "/sys/fs/cgroup", "tmpfs", data="mode=755")
    for point, fstype, data in groups:
        target = Path("/sys/fs/cgroup") / Path(point).name
        target.mkdir()
        mount(fstype, str(target), fstype, data=data)
    mount("tmpfs", "/run", "tmpfs", data="mode=755")
    private = Path("/run/private-sysctl")
    private.mkdir()
    for name in PRIVATE_SYSCTLS:
        real = Path("/proc/sys") / name
        if real.exists():
            copy = private / name.replace("/", "-")
            copy.write_text(real.read_text())
            mount(str(copy), str(real), flags=linux.MS_BIND)
    boot = private / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    mount(str(boot), "/proc/sys/kernel/random/boot_id", flags=linux.MS_BIND)
    if Path("/etc/machine-id").exists():
        machine = private / "machine-id"
        machine.write_text(uuid.uuid5(uuid.NAMESPACE_DNS, config["name"]).hex + "\n")
        mount(str(machine), "/etc/machine-id", flags=linux.MS_BIND)
    for source, target in config["mounts"]:
        show(Path(source), Path(target))
    for top in {f"/{Path(target).parts[1]}" for _, target in config["mounts"]}:
        mount("none", top, flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)
    mount(config["logs"], config["logs"], flags=linux.MS_BIND)
    mount(str(disk), "/var", flags=linux.MS_BIND)
    # /var and /run are the node's; the machine's other files can be read but not changed.
    mount("none", "/", flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)
    for folder in ("lib/containerd", "lib/kubelet", "lib/cni", "log/pods", "log/containers", "tmp"):
        Path("/var", folder).mkdir(parents=True, exist_ok=True)
    for name in ("run", "lock"):
        if not Path("/var", name).is_symlink():
            Path("/var", name).symlink_to("/run" if name == "run" else "/run/lock")
    Path("/run/lock").mkdir()
    mount("none", "/", flags=linux.MS_REC | linux.MS_SHARED)


def show(source: Path, target: Path) -> None:
    """Show a folder of the machine read-only under another path, which need not exist.

    The path is made in an overlay over its top folder: nothing is written to the machine.
    """
    top = Path("/", target.parts[1])
    parts = Path("/run/overlay") / top.name
    upper, work = parts / "upper", parts / "work"
    if not parts.exists():
        upper.mkdir(parents=True)
        work.mkdir()
        data = f"lowerdir={top},upperdir={upper},workdir={work}"
        mount("overlay", str(top), "overlay", data=data)
    target.mkdir(parents=True, exist_ok=True)
    mount(str(source), str(target), flags=linux.MS_BIND)
    mount("none", str(target), flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)


def make_network(config: dict[str, Any]) -> None:
    """Wait for the cable, then set the addresses and routes."""
    socket.sethostname(config["name"])
    if not linux.wait_for(lambda: Path("/sys/class/net/eth0").exists(), 30, 0.02):
        raise RuntimeError("no eth0")
    script = ["link set lo up", f"addr add {config['ip']} dev eth0", "link set eth0 up"]
    script += [f"route add {cidr} via {via}" for cidr, via in config["routes"]]
    # Only so that a route exists: kube-proxy rewrites the destination.
    script.append(f"route add {config['service_cidr']} dev eth0")
    linux.run("ip", "-batch", "-", input="\n".join(script))
    for name in ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables"):
        Path("/proc/sys/net", name).write_text("1")


class Node:
    """Keeps the node's daemons running."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.running: dict[int, str] = {}
        self.env = os.environ | {"TMPDIR": "/var/tmp", "HOME": "/root", "PYTHONPATH": ""}

    def serve(self) -> None:
        """Start everything, then wait for ends."""
        self.start("containerd")
        if not linux.wait_for(self.containerd_answers, 60, 0.1):
            print("containerd does not answer", flush=True)
        for path in self.config["images"]:
            with open(path, "rb") as archive:
                command = ["ctr", "-n", "k8s.io", "images", "import", "-"]
                subprocess.run(
                    command, stdin=archive, stdout=sys.stdout, stderr=sys.stderr, check=True
                )
        linux.wait_for(self.control_plane_answers, 60, 0.1)
        for name in self.config["commands"]:
            if name != "containerd":
                self.start(name)
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(1)
                continue
            name = self.running.pop(pid, None)
            if name:
                print(f"{name} ended with status {status}; starting it again", flush=True)
                time.sleep(1)
                self.start(name)

    def start(self, name: str) -> None:
        """Start one daemon, its output going to a file of its name."""
        with open(f"{self.config['logs']}/{name}.log", "ab") as log:
            process = subprocess.Popen(
                self.config["commands"][name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        self.running[process.pid] = name

    def containerd_answers(self) -> bool:
        """Whether images can be imported."""
        return subprocess.run(["ctr", "version"], capture_output=True).returncode == 0

    def control_plane_answers(self) -> bool:
        """Whether anything listens on the API server's port."""
        try:
            socket.create_connection((self.config["control_ip"], 6443), timeout=0.5).close()
            return True
        except OSError:
            return False


if __name__ == "__main__":
    launch(json.loads(Path(sys.argv[1]).read_text()))
