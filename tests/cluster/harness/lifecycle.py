"""Boots, loads, describes and removes a whole cluster. Called by the command line only."""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster.harness import (
    addons,
    archives,
    control,
    debian,
    layout,
    linux,
    node,
    pki,
    programs,
)
from cluster.harness.api import Api
from cluster.harness.layout import Layout
from cluster.harness.settings import Settings


@contextmanager
def locked(cluster: Layout) -> Iterator[None]:
    """Only one `up` or `down` of a cluster at a time."""
    cluster.state.parent.mkdir(parents=True, exist_ok=True)
    with open(cluster.state.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def healthy(cluster: Layout, settings: Settings) -> bool:
    """Whether every process that `up` starts runs and the API server answers."""
    pids = [linux.read_pid(control.pid_file(cluster, name)) for name in control.COMPONENTS]
    pids += [node.first_process(cluster, i) for i in range(settings.nodes + 1)]
    return all(pids) and Api(cluster, settings.port).ready()


def up(cluster: Layout, wanted: Settings, timeout: float) -> Path:
    """Boot the cluster; when it runs already, change nothing. Returns the kubeconfig's path."""
    running = Settings.read(cluster)
    if running and wanted.same_cluster(running) and healthy(cluster, running):
        return cluster.kubeconfig
    _check_programs(wanted)
    clock = _Stopwatch()
    down(cluster)
    settings = _prepare(cluster, wanted)
    control.make_network(cluster)
    linux.make_cgroup(f"{cluster.cgroup}/control-plane")
    for name in control.FIRST:
        control.start(cluster, name, settings)
    for index in range(settings.nodes + 1):
        node.start(cluster, index, settings)
    api = Api(cluster, settings.port)
    _wait(api.ready, timeout, f"the API server does not get ready: see {cluster.logs}")
    clock.tell("API server ready")
    for name in control.COMPONENTS:
        control.start(cluster, name, settings)
    addons.install(api)
    _wait_for_nodes(cluster, settings, api, timeout)
    clock.tell(f"{settings.nodes} nodes ready")
    _wait_for_addons(cluster, settings, api, timeout)
    clock.tell("DNS and all else ready")
    return cluster.kubeconfig


class _Stopwatch:
    def __init__(self) -> None:
        self.started = time.monotonic()

    def tell(self, what: str) -> None:
        seconds = time.monotonic() - self.started
        print(f"{what} after {seconds:.1f} s", file=sys.stderr, flush=True)


def _check_programs(wanted: Settings) -> None:
    optional = {"helm"} if wanted.network_policy else {"helm", "kube-router"}
    lacking = debian.missing() + programs.missing(optional)
    if lacking:
        sys.exit(f"missing: {', '.join(lacking)}; `scripts/cluster build` makes or installs them")


def _prepare(cluster: Layout, wanted: Settings) -> Settings:
    """Folders, settings, images and certificates."""
    for folder in (cluster.run, cluster.logs, cluster.config):
        folder.mkdir(parents=True, exist_ok=True)
    images = [Path(path) for path in wanted.images]
    seed = str(archives.seed(cluster, images)) if images else ""
    settings = replace(wanted, port=control.free_port(), seed=seed)
    settings.write(cluster)
    pki.create_all(cluster, settings.nodes, settings.port)
    return settings


def _wait(condition: Callable[[], object], timeout: float, otherwise: str) -> None:
    if not linux.wait_for(condition, timeout, 0.2):
        sys.exit(otherwise)


def _wait_for_nodes(cluster: Layout, settings: Settings, api: Api, timeout: float) -> None:
    everyone = range(settings.nodes + 1)
    adopted: set[int] = set()

    def all_ready() -> bool:
        adopted.update(i for i in everyone if i not in adopted and control.adopt_node(api, i))
        ready = api.nodes()
        return len(ready) == len(everyone) == len(adopted) and all(ready.values())

    _wait(all_ready, timeout, f"not all nodes get ready: see {cluster.logs}")


def _wait_for_addons(cluster: Layout, settings: Settings, api: Api, timeout: float) -> None:
    for index in range(settings.nodes + 1):
        answers = partial(addons.dns_answers, node.first_process(cluster, index) or 0)
        name = layout.node_name(index)
        _wait(answers, timeout, f"CoreDNS does not answer on {name}: see {cluster.logs}")
    # Pods are refused until their namespace has its service account.
    account = partial(api.exists, "/api/v1/namespaces/default/serviceaccounts/default")
    _wait(account, timeout, f"the controller manager does not work: see {cluster.logs}")


def down(cluster: Layout, *, keep_logs: bool = False) -> None:
    """End the cluster's processes and remove all that `up` made."""
    linux.empty_cgroup(cluster.cgroup)
    if Path(control.netns_file(cluster)).exists():
        linux.run("ip", "netns", "del", cluster.netns)
    if f" {cluster.state}/" in Path("/proc/self/mountinfo").read_text():
        raise RuntimeError(f"something is still mounted below {cluster.state}")
    for path in cluster.state.iterdir() if cluster.state.exists() else []:
        if path == cluster.logs and keep_logs:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def load(cluster: Layout, settings: Settings, paths: list[str]) -> None:
    """Import image archives into every worker that is on."""
    nodes = [i for i in range(1, settings.nodes + 1) if node.first_process(cluster, i)]
    for path in paths:
        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(partial(node.load, cluster, archive=Path(path)), nodes))
        print(done[-1] if done else "no node is on")


def status(cluster: Layout, settings: Settings) -> None:
    """Print what runs."""
    for name in control.COMPONENTS:
        print(f"{name:26}{linux.read_pid(control.pid_file(cluster, name)) or 'stopped'}")
    try:
        ready = Api(cluster, settings.port).nodes()
    except OSError:
        ready = {}
    for index in range(settings.nodes + 1):
        pid = node.first_process(cluster, index)
        words = [str(pid) if pid else "off"]
        words.append("Ready" if ready.get(layout.node_name(index)) else "NotReady")
        if node.partitioned(cluster, index):
            words.append("partitioned")
        print(f"{layout.node_name(index):26}{' '.join(words)}")
    print(f"{'KUBECONFIG':26}{cluster.kubeconfig}")
