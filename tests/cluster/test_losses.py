"""Nodes that are lost with all that is on them, cut off while they live on, or lost all at once."""

from __future__ import annotations

import shutil

import pytest

from cluster.installed_chart import Chart
from cluster.machine import NODES, Cluster
from cluster.training import (
    RECOVER_SECONDS,
    Job,
    generation_of,
    last_recovery,
    node_number,
    replica_of,
)


@pytest.mark.smoke
def test_a_node_that_is_lost_costs_no_more_than_its_copies_on_a_neighbour(
    long_job: Job, chart: Chart, breakable: Cluster
) -> None:
    before = long_job.status
    replica = long_job.replica_away_from(chart.node())
    node, old = long_job.node(replica), long_job.pod_name(replica)
    breakable.node_kill(node_number(node))
    status = long_job.wait_training(before["attempt"])
    assert long_job.node(replica) != node
    assert long_job.pod_name(replica) != old
    recovery = last_recovery(status, "NodeLost")
    assert replica in recovery["replicas"]
    assert "remote" not in status["lastRestore"]["tiers"]
    assert "neighbor" in status["lastRestore"]["tiers"]
    assert any("delete by force" in note for note in long_job.events())


def test_the_node_that_is_lost_may_be_the_operators_own(
    long_job: Job, chart: Chart, breakable: Cluster
) -> None:
    before, node = long_job.status, chart.node()
    lost = [replica_of(pod) for pod in long_job.pods() if pod["spec"]["nodeName"] == node]
    assert lost, "no replica runs beside the operator"
    breakable.node_kill(node_number(node))
    status = long_job.wait_training(before["attempt"])
    assert chart.node() != node
    assert all(long_job.node(replica) != node for replica in lost)
    assert "remote" not in status["lastRestore"]["tiers"]


def test_what_a_node_that_was_cut_off_wrote_meanwhile_is_no_history(
    long_job: Job, chart: Chart, breakable: Cluster
) -> None:
    before = long_job.status
    replica = long_job.replica_away_from(chart.node())
    node, old = long_job.node(replica), long_job.pod_name(replica)
    running = _sidecars(breakable, node)
    breakable.node_partition(node_number(node))
    status = long_job.wait_training(before["attempt"])
    last_recovery(status, "NodeLost")
    assert _sidecars(breakable, node) == running, "the old pod goes on where nobody reaches it"
    assert long_job.node(replica) != node

    breakable.node_heal(node_number(node))
    here = [pod for pod in long_job.pods() if pod["spec"]["nodeName"] == node]
    long_job.wait(
        "the old pod has ended",
        lambda: _sidecars(breakable, node) == len(here),
        RECOVER_SECONDS,
    )
    long_job.wait_durable(long_job.status["durableStep"] + 50)
    assert sorted(replica_of(pod) for pod in long_job.pods()) == [0, 1, 2]
    assert old not in {pod["metadata"]["name"] for pod in long_job.pods()}
    assert long_job.status["attempt"] == status["attempt"], "the living world was left alone"
    base = status["lastRestore"]["step"]
    wrong = [
        one["checkpoint"]
        for one in long_job.checkpoints()
        if _attempt(one["checkpoint"]) < status["attempt"]
        and _step(one["checkpoint"]) > base
        and (one["on_lineage"] or one["durable"])
    ]
    assert wrong == []


def test_when_all_nodes_are_lost_with_their_disks_the_store_is_enough(
    long_job: Job, chart: Chart, breakable: Cluster
) -> None:
    before = long_job.status
    for node in range(1, NODES + 1):
        breakable.node_kill(node)
    for node in range(1, NODES + 1):
        shutil.rmtree(breakable.disk(node) / "lib/backstay" / long_job.namespace)
    for node in range(1, NODES + 1):
        breakable.node_start(node)
    status = long_job.wait_training(before["attempt"])
    assert set(status["lastRestore"]["tiers"]) == {"remote"}
    assert status["lastRestore"]["step"] >= before["durableStep"]
    newest = {replica: generation_of(long_job.pod(replica)) for replica in range(3)}
    assert len(long_job.pods()) == len(newest)
    chart.wait_ready()


def _sidecars(cluster: Cluster, node: str) -> int:
    """How many run on a node, whatever the API server knows of them."""
    found = cluster.node_exec(
        node_number(node), "sh", "-c", "pgrep -fc '[-]m backstay_sidecar' || true"
    )
    return int(found)


def _step(checkpoint: str) -> int:
    return int(checkpoint.split("-")[0])


def _attempt(checkpoint: str) -> int:
    return int(checkpoint.split("-")[1])
