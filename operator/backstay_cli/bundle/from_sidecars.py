"""What a job's sidecars say: the leader's view of all, each one's own status and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from backstay_cli.bundle.archive import Bundle
from backstay_cli.client import SidecarClient
from backstay_cli.leader import SILENT_SECONDS
from backstay_protocol.messages import AgentStatus, CheckpointList, JobView, ReplicaView
from backstay_protocol.names import (
    PORT_API,
    PORT_HEALTH,
    URL_CHECKPOINTS,
    URL_JOB,
    URL_METRICS,
    URL_STATUS,
)
from backstay_protocol.pull import Endpoint, get_bytes

_AT_ONCE = 8
_METRICS_SECONDS = 5.0


def gather_sidecars(
    leader: SidecarClient, bundle: Bundle, reach: Callable[[ReplicaView], str]
) -> None:
    """`reach`: `host:port` of a replica's sidecar as seen from here; empty: out of reach."""
    view: JobView | None = None
    with bundle.attempt("leader/job.json"):
        view = leader.get(JobView, URL_JOB)
        bundle.json("leader/job.json", view, f"GET {URL_JOB} of the leader")
    bundle.fetch(
        "leader/checkpoints.json",
        f"GET {URL_CHECKPOINTS} of the leader",
        lambda: leader.get(CheckpointList, URL_CHECKPOINTS),
    )
    if view is None:
        return
    chosen = _chosen(view.replicas, bundle)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda one: _one(one, leader, bundle, reach), chosen))


def _chosen(views: Iterable[ReplicaView], bundle: Bundle) -> list[ReplicaView]:
    """Those that are silent or in trouble first."""
    order = sorted(
        views,
        key=lambda v: (v.seen_seconds_ago <= SILENT_SECONDS, all(t.ok for t in v.tiers), v.replica),
    )
    left = order[bundle.limits.pods :]
    if left:
        bundle.missing("sidecars", f"{len(left)} of {len(order)} are left out (--pods)")
    return order[: bundle.limits.pods]


def _one(
    view: ReplicaView, leader: SidecarClient, bundle: Bundle, reach: Callable[[ReplicaView], str]
) -> None:
    folder = f"sidecars/{view.replica}"
    address = reach(view)
    if not address:
        bundle.missing(folder, "its sidecar can't be reached")
        return
    client = leader.other(address)
    bundle.fetch(
        f"{folder}/status.json",
        f"GET {URL_STATUS} of replica {view.replica}",
        lambda: client.get(AgentStatus, URL_STATUS),
    )
    host, _, port = address.rpartition(":")
    if port == str(PORT_API):  # not forwarded: the health port is the next one
        add_metrics(f"{host}:{PORT_HEALTH}", view.replica, bundle)


def add_metrics(address: str, replica: int, bundle: Bundle) -> None:
    """Of a replica's sidecar, from its health port."""
    path = f"sidecars/{replica}/metrics.txt"
    with bundle.attempt(path):
        endpoint = Endpoint(f"http://{address}{URL_METRICS}")
        data = get_bytes(endpoint, timeout=_METRICS_SECONDS)
        bundle.text(path, data.decode(errors="replace"), f"metrics of replica {replica}")
