"""kill -9 at every named point of save, commit and restore: nothing torn, nothing half visible.

Whatever dies, the world comes back, all ranks from one (step, attempt), and the job ends in
the very state of one that nothing happened to.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.s3 import S3Server
from support.training_job import TrainingJob, assert_equal, every_tier, undisturbed_states

pytestmark = pytest.mark.timeout(180)
STEPS = 8

TRAINER_POINTS = [
    "capture.before_withdraw@3",
    "capture.after_withdraw@3",
    "capture.mid_copy@2",
    "capture.before_publish@2",
    "capture.after_publish@3",
    "load.before_confirm@1",
]
SIDECAR_POINTS = [
    "seal.before@2",
    "seal.after@2",
    "local.mid_data@2",
    "local.before_rename@2",
    "local.after_data@2",
    "local.after_manifest@2",
    "neighbor.mid_pull@1",
    "neighbor.before_publish@2",
    "remote.mid_upload@2",
    "remote.before_manifest@2",
    "promise.before@1",
    "promise.after@1",
    "store.before@1",
    "store.after@1",
]
LEADER_POINTS = [
    "claim.after@1",
    "base.after@1",
    "go.before@1",
    "commit.before@1",
    "commit.after@1",
    "delete.after_intent@1",
    "delete.after_commit@1",
    "delete.mid_shards@1",
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return undisturbed_states(tmp_path_factory.mktemp("undisturbed"), STEPS)


def with_action(point: str) -> str:
    name, _, passage = point.partition("@")
    return f"{name}=kill@{passage}"


def run(
    folder: Path,
    server: S3Server,
    *,
    ranks: dict[int, str] | None = None,
    sidecars: dict[int, str] | None = None,
) -> TrainingJob:
    bucket = server.make_bucket()
    tiers = every_tier(folder / "disk", endpoint=server.endpoint, bucket=bucket)
    return TrainingJob(
        folder,
        steps=STEPS,
        tiers=tiers,
        step_seconds=0.3,
        s3_keys=(server.access_key, server.secret_key),
        faults=ranks or {},
    )


def assert_unharmed(
    job: TrainingJob, server: S3Server, expected: list[dict[str, torch.Tensor]]
) -> None:
    """The end is the undisturbed one, and every tier holds whole things only."""
    for rank, tensors in enumerate(expected):
        assert_equal(job.final(rank), tensors)
    lives = min(len(job.events(rank, "restored")) for rank in range(job.world_size))
    for life in range(1, lives + 1):
        job.assert_same_restore(-life)
    for replica in range(job.replicas):
        assert job.sidecars.on_disk(replica, "shards")  # reads and verifies each one
        job.sidecars.on_disk(replica, "replicas")
    client = server.client()
    remote = job.sidecars.topology.tiers.remote
    assert remote is not None
    names = {o.object_name for o in client.list_objects(remote.bucket, recursive=True)}
    commits = [n for n in names if n.endswith("/commit.json")]
    assert commits
    for name in commits:
        record = json.loads(client.get_object(remote.bucket, name).read())
        folder = name.rsplit("/", 1)[0]
        for shard in record["shards"]:
            assert f"{folder}/{shard['rank']:05d}.safetensors" in names
            assert f"{folder}/{shard['rank']:05d}.json" in names


@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_a_trainer_killed_while_it_saves_or_restores(
    point: str,
    tmp_path: Path,
    s3_server: S3Server,
    undisturbed: list[dict[str, torch.Tensor]],
) -> None:
    with run(tmp_path, s3_server, ranks={1: with_action(point)}) as job:
        job.start()
        job.finish()
        assert job.restarts >= 1, "the fault point was never reached"
        assert_unharmed(job, s3_server, undisturbed)


@pytest.mark.parametrize("replica", [1, 0], ids=["follower", "leader"])
@pytest.mark.parametrize("point", SIDECAR_POINTS)
def test_a_sidecar_killed_while_it_moves_shards_or_promises(
    point: str,
    replica: int,
    tmp_path: Path,
    s3_server: S3Server,
    undisturbed: list[dict[str, torch.Tensor]],
) -> None:
    with run(tmp_path, s3_server) as job:
        job.start(sidecar_faults={replica: with_action(point)})
        job.finish()
        assert job.buried.get(replica) == -9, "the fault point was never reached"
        assert_unharmed(job, s3_server, undisturbed)


@pytest.mark.parametrize("point", LEADER_POINTS)
def test_a_leader_killed_while_it_begins_commits_or_deletes(
    point: str,
    tmp_path: Path,
    s3_server: S3Server,
    undisturbed: list[dict[str, torch.Tensor]],
) -> None:
    with run(tmp_path, s3_server) as job:
        job.start(sidecar_faults={0: with_action(point)})
        job.finish()
        assert job.buried.get(0) == -9, "the fault point was never reached"
        assert_unharmed(job, s3_server, undisturbed)


def test_a_load_that_dies_in_the_middle_is_done_again_by_all(
    tmp_path: Path,
    s3_server: S3Server,
    undisturbed: list[dict[str, torch.Tensor]],
) -> None:
    with run(tmp_path, s3_server, ranks={0: with_action("capture.after_publish@2")}) as job:
        job.start()
        job.wait(lambda: job.restarts == 1, "the first restart")
        job.finish()
        job.kill_ranks()
        job.rearm({1: with_action("load.mid@1")})
        job.start_ranks()
        job.finish()
        assert job.restarts == 2, "the fault point was never reached"
        assert_unharmed(job, s3_server, undisturbed)
