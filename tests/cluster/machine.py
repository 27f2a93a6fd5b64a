"""The cluster under test: one that is booted here, or a given one (BACKSTAY_TEST_KUBECONFIG).

Boots and breaks it through the harness' command line. Knows nothing of Backstay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.harness import layout
from cluster.harness.layout import Layout
from cluster.kube import Kube

ENV_KUBECONFIG = "BACKSTAY_TEST_KUBECONFIG"
ENV_REGISTRY = "BACKSTAY_TEST_REGISTRY"
ENV_LOAD = "BACKSTAY_TEST_LOAD"
ENV_TRAINER = "BACKSTAY_TEST_TRAINER"
ENV_KEEP = "BACKSTAY_CLUSTER_KEEP"
TORCH_FOLDER = "/opt/torch"
NODES = 3
BUILD_SECONDS = 3600
COMMAND_SECONDS = 240


@dataclass(frozen=True)
class Cluster:
    """A cluster that answers. Nodes are numbered: workers from 1, 0 is the control plane's."""

    kubeconfig: Path
    name: str = ""
    """Empty: not ours, so that its nodes can't be broken."""

    @property
    def kube(self) -> Kube:
        """Its client."""
        return Kube(program("kubectl"), self.kubeconfig)

    def tool(self, *argv: str) -> str:
        """Run a command of the harness on this cluster; what it prints."""
        if not self.name:
            pytest.skip(f"{ENV_KUBECONFIG} is set: the nodes of a foreign cluster are not broken")
        return tool(*argv, name=self.name)

    def node_kill(self, node: int) -> None:
        """Power loss: every process of the node ends at once."""
        self.tool("node-kill", str(node))

    def node_start(self, node: int) -> None:
        """Power on; the node's disk is as it was."""
        self.tool("node-start", str(node))

    def node_partition(self, node: int, *others: int) -> None:
        """Cut a node off from all others, or from these (0: the control plane)."""
        self.tool("node-partition", str(node), *(f"--from={other}" for other in others))

    def node_heal(self, node: int) -> None:
        """End every partition of the node."""
        self.tool("node-heal", str(node))

    def node_exec(self, node: int, *argv: str) -> str:
        """What a command on the node prints."""
        return self.tool("node-exec", str(node), "--", *argv)

    def control_stop(self, component: str) -> None:
        """Crash a component of the control plane."""
        self.tool("control-stop", component)

    def control_start(self, component: str) -> None:
        """Start it again."""
        self.tool("control-start", component)

    def disk(self, node: int) -> Path:
        """The node's /var, seen from this machine, also while the node is off."""
        if not self.name:
            pytest.skip(f"{ENV_KUBECONFIG} is set: the disks of a foreign cluster are out of reach")
        return Layout.load(self.name).disk(node)

    def repair(self) -> None:
        """Every node on and whole again, after a test that broke some."""
        for node in range(1, NODES + 1):
            self.node_start(node)
            self.node_heal(node)
        self.kube.wait("every node Ready", self.all_ready, timeout=90)

    def all_ready(self) -> bool:
        """Whether every node is Ready."""
        lines = self.kube.run("get", "nodes", "--no-headers").splitlines()
        return bool(lines) and all(line.split()[1] == "Ready" for line in lines)


def tool(*argv: str, name: str = "", timeout: float = COMMAND_SECONDS) -> str:
    """Run a command of the harness."""
    environment = layout.module_env() | ({"BACKSTAY_CLUSTER_NAME": name} if name else {})
    command = [*layout.module("__main__"), *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"scripts/cluster {' '.join(argv)} failed:\n{tail}")
    return done.stdout.strip()


def program(name: str) -> str:
    """Path of kubectl or helm: the harness' own, else the one on the path."""
    own = layout.bin_dir() / name
    found = str(own) if own.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"no {name}: `scripts/cluster build {name}` makes one")
    return found


def site_packages() -> str:
    """The folder of this interpreter's packages, torch among them, if pods can use it; else ''."""
    if sys.version_info[:2] != (3, 11):  # that of the images' base
        return ""
    folder = sysconfig.get_path("purelib")
    return folder if Path(folder, "torch").is_dir() else ""


@contextmanager
def given(kubeconfig: str) -> Iterator[Cluster]:
    """A cluster that somebody else runs."""
    path = Path(kubeconfig)
    if not path.is_file():
        raise FileNotFoundError(f"{ENV_KUBECONFIG}={kubeconfig}: no such file")
    yield Cluster(path)


def build_programs() -> None:
    """What the harness needs: all of it, or for a given cluster only its clients."""
    given = os.environ.get(ENV_KUBECONFIG)
    clients = [name for name in ("kubectl", "helm") if not shutil.which(name)] if given else []
    if clients or not given:
        tool("build", *clients, timeout=BUILD_SECONDS)


@contextmanager
def booted(archives: list[Path]) -> Iterator[Cluster]:
    """A cluster of our own on this machine; nothing of it is left at the end."""
    with _free_name() as name:
        torch = site_packages()
        argv = [f"--nodes={NODES}", *(f"--image={path}" for path in archives)]
        argv += [f"--mount={torch}:{TORCH_FOLDER}"] if torch else []
        try:
            cluster = Cluster(Path(tool("up", *argv, name=name)), name)
            for node in range(1, NODES + 1):
                # As an administrator would make it: pods of any user may keep their files there.
                folder = cluster.disk(node) / "lib/backstay"
                folder.mkdir(exist_ok=True)
                folder.chmod(0o1777)
            yield cluster
        finally:
            if not os.environ.get(ENV_KEEP):
                tool("down", name=name)


@contextmanager
def _free_name() -> Iterator[str]:
    """A cluster name that no other session holds; what a killed one left under it is taken over."""
    base = Layout.load("tests").state.parent
    base.mkdir(parents=True, exist_ok=True)
    for name in ("tests", "tests-2", "tests-3", "tests-4"):
        with open(base / f"{name}.session", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield name
            return
    raise RuntimeError("four test sessions run clusters on this machine already")
