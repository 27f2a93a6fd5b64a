"""The operator is killed, or exchanged by helm: jobs don't notice, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.installed_chart import Chart
from cluster.kube import Object
from cluster.training import RECOVER_SECONDS, Job, generation_of, replica_of


def test_an_operator_that_is_killed_again_and_again_mends_a_job_all_the_same(
    long_job: Job, chart: Chart
) -> None:
    before = long_job.status
    newest = max(generation_of(pod) for pod in long_job.pods())
    others = {long_job.pod_name(replica) for replica in (0, 2)}
    old = long_job.pod_name(1)
    # At each sign of progress: nothing seen yet, the pod going, the next one made, it runs.
    signs: list[Callable[[], Any]] = [
        lambda: "deletionTimestamp" in long_job.pod(1)["metadata"] or _next(long_job, old),
        lambda: _next(long_job, old),
        lambda: (_next(long_job, old) or {}).get("status", {}).get("phase") == "Running",
    ]
    long_job.kube.delete("pod", old, long_job.namespace, "--wait=false")
    chart.kill()
    for sign in signs:
        long_job.wait("the recovery goes on", sign, RECOVER_SECONDS)
        chart.kill()
    long_job.wait_training(before["attempt"])
    pods = {replica_of(pod): pod for pod in long_job.pods()}
    assert len(long_job.pods()) == len(pods) == 3
    assert {pods[replica]["metadata"]["name"] for replica in (0, 2)} == others
    assert generation_of(pods[1]) == newest + 1, "one pod was replaced, once"


def test_an_upgrade_of_the_chart_restarts_no_pod_of_a_job(long_job: Job, chart: Chart) -> None:
    before, operator = long_job.status, chart.operators()[0]["metadata"]["name"]
    pods = _lives(long_job)
    chart.upgrade(sidecar={"graceSeconds": 90}, operator={"log": {"level": "debug"}})
    try:
        chart.kube.wait(
            "the new operator alone",
            lambda: (
                [p for p in chart.operators() if p["metadata"]["name"] != operator]
                == chart.operators()
            ),
            timeout=90,
            namespace=chart.namespace,
        )
        long_job.wait_durable(long_job.status["durableStep"] + 50)
        assert _lives(long_job) == pods
        assert long_job.status["attempt"] == before["attempt"]
    finally:
        chart.upgrade()
    long_job.wait_durable(long_job.status["durableStep"] + 50)
    assert _lives(long_job) == pods
    assert long_job.status["attempt"] == before["attempt"]


def test_taken_away_and_installed_again_the_operator_finds_its_jobs_as_they_were(
    long_job: Job, chart: Chart
) -> None:
    before, pods = long_job.status, _lives(long_job)
    chart.helm("uninstall", chart.release, "--wait")
    try:
        assert chart.operators() == []
        long_job.wait(
            "saves go on without an operator",
            lambda: _durable(long_job) > before["durableStep"] + 100,
            RECOVER_SECONDS,
        )
        assert _lives(long_job) == pods
    finally:
        chart.upgrade()
    long_job.wait_durable(_durable(long_job))
    assert _lives(long_job) == pods
    assert long_job.status["attempt"] == before["attempt"]


def _durable(job: Job) -> int:
    """The newest durable step, by the leader's own word."""
    newest = job.told("/v1/job")["newest_durable"]
    return int(newest.split("-")[0]) if newest else 0


def _next(job: Job, old: str) -> Object | None:
    """The pod that came after `old` for replica 1."""
    found = [pod for pod in job.pods() if replica_of(pod) == 1]
    return next((pod for pod in found if pod["metadata"]["name"] != old), None)


def _lives(job: Job) -> dict[str, int]:
    """Pod uid and container -> restarts."""
    return {
        f"{pod['metadata']['uid']}/{one['name']}": one["restartCount"]
        for pod in job.pods()
        for kind in ("containerStatuses", "initContainerStatuses")
        for one in pod["status"].get(kind, [])
    }
