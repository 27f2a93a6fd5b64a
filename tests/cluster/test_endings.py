"""Jobs that people end or pause: what is left, and what they go on from."""

from __future__ import annotations

from collections.abc import Callable

from cluster.installed_chart import Chart
from cluster.kube import is_true
from cluster.machine import Cluster
from cluster.object_store import Store
from cluster.training import (
    GONE_SECONDS,
    RECOVER_SECONDS,
    START_SECONDS,
    Job,
    counting,
    generation_of,
)


def test_a_deleted_job_leaves_nothing_but_its_checkpoints_operator_or_not(
    make_job: Callable[..., Job], chart: Chart
) -> None:
    job = make_job("gone")
    job.apply()
    before = job.wait_training(timeout=START_SECONDS)
    job.delete()
    job.wait("nothing of it is left", lambda: not job.objects(), GONE_SECONDS)

    job.apply()
    status = job.wait_training(before["attempt"], timeout=START_SECONDS)
    assert status["lastRestore"]["step"] > 0, "the same name is the same run"
    with chart.stopped():
        job.delete()
        job.wait("nothing of it is left", lambda: not job.objects(), GONE_SECONDS)
    assert job.objects() == []


def test_what_the_pods_could_not_bring_out_before_they_ended_other_pods_do(
    make_job: Callable[..., Job], store: Store, breakable: Cluster
) -> None:
    job = make_job("late", command=counting(40, seconds_per_step=0.5, exit_seconds=3))
    job.apply()
    job.wait("step 10", lambda: job.status.get("step", 0) >= 10, START_SECONDS)
    with store.paused(breakable):
        job.wait("its pods have ended", lambda: _ended(job), RECOVER_SECONDS)
        assert job.status.get("durableStep", 0) < 40
        assert not is_true(job.tree, "Succeeded")
        job.wait("a pod on each node brings it out", lambda: len(_flushing(job)) == 3, 120)
    job.wait("it succeeds", lambda: is_true(job.tree, "Succeeded"), RECOVER_SECONDS)
    assert job.status["durableStep"] == 40
    names = store.names(f"{job.namespace}/late/checkpoints/{40:012d}-")
    assert any(name.endswith("/commit.json") for name in names)
    job.wait("those pods are gone", lambda: not _flushing(job), 60)
    job.delete()


def _ended(job: Job) -> bool:
    """Whether all trainers have ended well."""
    ends = [
        (one["state"].get("terminated") or {}).get("exitCode")
        for pod in job.pods()
        for one in pod["status"].get("containerStatuses", [])
        if one["name"] == "trainer"
    ]
    return ends == [0, 0, 0]


def _flushing(job: Job) -> list[str]:
    """Pods that only have a sidecar in them."""
    containers = {
        pod["metadata"]["name"]: [one["name"] for one in pod["spec"]["containers"]]
        for pod in job.pods()
    }
    return [name for name, found in containers.items() if "trainer" not in found]


def test_a_suspended_job_keeps_no_pod_and_goes_on_from_its_last_step(long_job: Job) -> None:
    before = long_job.status
    old = [generation_of(long_job.pod(replica)) for replica in range(3)]
    long_job.set_spec(suspend=True)
    try:
        long_job.wait("no pods", lambda: not long_job.pods(), RECOVER_SECONDS)
        long_job.wait(
            "it says that it is suspended", lambda: is_true(long_job.tree, "Suspended"), 60
        )
        durable = long_job.status["durableStep"]
    finally:
        long_job.set_spec(suspend=False)
    status = long_job.wait_training(before["attempt"])
    assert status["lastRestore"]["step"] >= durable >= before["durableStep"]
    assert status["lastRestore"]["step"] >= before["step"], "the last save was made by all"
    new = [generation_of(long_job.pod(replica)) for replica in range(3)]
    assert min(new) > max(old)
    assert not is_true(long_job.tree, "Suspended")
