"""The main job at small size: four failures, each survived from the expected tier, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE
from support.s3 import S3Server
from support.training_job import TrainingJob, assert_equal, every_tier, undisturbed_states

pytestmark = pytest.mark.timeout(240)
STEPS = 26


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return undisturbed_states(tmp_path_factory.mktemp("undisturbed"), STEPS)


def test_four_failures_leave_no_trace_in_the_final_state(
    tmp_path: Path,
    s3_server: S3Server,
    undisturbed: list[dict[str, torch.Tensor]],
) -> None:
    bucket = s3_server.make_bucket()
    tiers = every_tier(tmp_path / "disk", endpoint=s3_server.endpoint, bucket=bucket)
    keys = (s3_server.access_key, s3_server.secret_key)
    with TrainingJob(tmp_path, steps=STEPS, tiers=tiers, s3_keys=keys, step_seconds=0.25) as job:
        job.start()

        job.wait_complete(MEMORY, 4)
        job.kill_rank(1)
        job.wait(lambda: len(job.events(1, "restored")) == 2, "the second life")
        job.wait_step(6)
        # the other rank's part of replicated state lies nearest as the copy held for it
        assert MEMORY in job.tiers_read()
        assert job.tiers_read() <= {MEMORY, NEIGHBOR}
        step, first = job.assert_same_restore()
        assert step >= 4

        job.wait_complete(NEIGHBOR, 8)
        job.lose_node(0, disk=False)
        restart(job, lives=3)
        assert LOCAL in job.tiers_read()
        assert REMOTE not in job.tiers_read()
        step, second = job.assert_same_restore()
        assert step >= 8
        assert second > first

        job.wait_complete(NEIGHBOR, 14)
        job.lose_node(1, disk=True)
        restart(job, lives=4)
        assert NEIGHBOR in job.tiers_read()
        assert REMOTE not in job.tiers_read()
        step, third = job.assert_same_restore()
        assert step >= 14
        assert third > second

        job.wait_complete(REMOTE, 20)
        job.lose_node(0, disk=True)
        job.lose_node(1, disk=True)
        restart(job, lives=5)
        assert job.tiers_read() == {REMOTE}
        step, _ = job.assert_same_restore()
        assert step >= 20

        job.finish()
        for rank, expected in enumerate(undisturbed):
            assert_equal(job.final(rank), expected)


def restart(job: TrainingJob, lives: int) -> None:
    """Nodes come back empty, as new pods would; the world starts on them."""
    for replica in range(job.replicas):
        if not job.sidecars.alive(replica):
            job.sidecars.start(replica)
    job.start_ranks()
    ranks = range(job.world_size)
    job.wait(lambda: all(len(job.events(r, "restored")) == lives for r in ranks), f"life {lives}")


def test_a_job_that_ended_is_not_trained_again(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, steps=4, step_seconds=0.0) as job:
        job.start()
        job.finish()
        before = job.final()
        shutil.rmtree(job.out)
        job.out.mkdir()
        job.start_ranks()
        job.finish()
        assert job.restored()[0]["step"] == 4
        assert not job.events(0, "step")
        assert_equal(job.final(), before)
