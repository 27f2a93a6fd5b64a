"""Jobs that people end or pause: what is left, and what they go on from."""

from __future__ import annotations

from collections.abc import Callable

from cluster.installed_chart import Chart
from cluster.kube import is_true
from cluster.training import GONE_SECONDS, RECOVER_SECONDS, START_SECONDS, Job, generation_of


def test_a_deleted_job_leaves_nothing_but_its_checkpoints_operator_or_not(
    make_job: Callable[..., Job], chart: Chart
) -> None:
    job = make_job("gone")
    job.apply()
    job.wait_training(timeout=START_SECONDS)
    job.delete()
    job.wait("nothing of it is left", lambda: not job.objects(), GONE_SECONDS)

    job.apply()
    status = job.wait_training(timeout=START_SECONDS)
    assert status["lastRestore"]["step"] > 0, "the same name is the same run"
    with chart.stopped():
        job.delete()
        job.wait("nothing of it is left", lambda: not job.objects(), GONE_SECONDS)
    assert job.objects() == []


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
