"""A node that is emptied on purpose: nothing is evicted before a common save is safe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest

from cluster.installed_chart import Chart
from cluster.kube import is_true
from cluster.training import RECOVER_SECONDS, START_SECONDS, Job, counting

DRAIN = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={RECOVER_SECONDS}s")


@pytest.fixture
def crowded(long_job: Job, chart: Chart) -> Iterator[str]:
    """A node with a replica and without the operator; nothing is kept off it afterwards."""
    node = long_job.node(long_job.replica_away_from(chart.node()))
    yield node
    long_job.kube.run("uncordon", node)


def test_an_eviction_is_refused_for_as_long_as_the_job_needs_the_pod(long_job: Job) -> None:
    pod = long_job.pod_name(1)
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": long_job.namespace},
    }
    path = f"/api/v1/namespaces/{long_job.namespace}/pods/{pod}/eviction"
    done = long_job.kube.process("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    assert done.returncode != 0
    assert "disruption budget" in done.stderr
    assert long_job.pod_name(1) == pod


def test_a_drain_waits_for_a_common_save_and_no_step_of_it_is_lost(
    long_job: Job, crowded: str
) -> None:
    before = long_job.status
    leaving = [
        int(pod["metadata"]["labels"]["backstay.dev/replica-index"])
        for pod in long_job.pods()
        if pod["spec"]["nodeName"] == crowded
    ]
    done = long_job.kube.process("drain", crowded, *DRAIN, timeout=RECOVER_SECONDS + 30)
    assert done.returncode == 0, done.stderr
    assert "disruption budget" in done.stderr, "the hold was in force"
    assert f"node/{crowded} drained" in done.stdout
    status = long_job.wait_training(before["attempt"])
    assert all(long_job.node(replica) != crowded for replica in leaving)
    (saved,) = {
        int(found[1]) for note in long_job.events() if (found := _SAFE.search(note)) is not None
    }
    assert status["lastRestore"]["step"] >= saved >= before["step"]
    recovery = status["recoveries"][-1]
    assert recovery["reason"] == "Draining"
    assert "not all was safe" not in " ".join(long_job.events())


def test_a_drain_says_so_when_no_common_save_comes_about_in_time(
    make_job: Callable[..., Job],
) -> None:
    slow = counting(1000, seconds_per_step=60, exit_seconds=1)
    job = make_job("slow", command=slow, replicas=2, drainHoldSeconds=15)
    job.apply()
    job.wait("it trains", lambda: is_true(job.tree, "Running"), START_SECONDS)
    node = job.node(1)
    job.kube.run("cordon", node)
    try:
        job.wait(
            "it is told",
            lambda: any("not all was safe within 15 s" in note for note in job.events()),
            RECOVER_SECONDS,
        )
        job.wait(
            "the pod is on its way out",
            lambda: any("deletionTimestamp" in pod["metadata"] for pod in job.pods()),
            60,
        )
    finally:
        job.kube.run("uncordon", node)
        job.delete()
    job.wait("its pods are gone", lambda: not job.pods(), 150)


_SAFE = re.compile(r"step (\d+) is safe; leaving")
