"""One flipped byte in each tier in turn: found, struck out, all ranks fall back together."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from backstay_protocol import slots
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, RemoteLayout
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE
from support.s3 import S3Server
from support.training_job import TrainingJob, every_tier

pytestmark = pytest.mark.timeout(180)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def make(folder: Path, server: S3Server) -> TrainingJob:
    tiers = every_tier(
        folder / "disk", endpoint=server.endpoint, bucket=server.make_bucket(), keep_last=3
    )
    keys = (server.access_key, server.secret_key)
    return TrainingJob(folder, steps=40, tiers=tiers, s3_keys=keys, step_seconds=0.25)


def stop_at(job: TrainingJob, tier: str, step: int) -> CheckpointId:
    """Stop all ranks once the tier holds the step; the newest checkpoint that is complete there."""
    job.wait_complete(tier, step)
    job.kill_ranks()
    return settled(job, tier)


def settled(job: TrainingJob, tier: str) -> CheckpointId:
    """The newest checkpoint of the tier once nothing moves any more."""

    def newest() -> CheckpointId | None:
        there = (c.checkpoint for c in job.checkpoints() if tier in c.complete_in)
        return max(there, default=None)

    seen = [None, None, None]
    while len(set(seen[-3:])) != 1 or seen[-1] is None:
        job.wait(lambda: True, "a look")
        job.clock.sleep(0.5)
        seen.append(newest())
    return seen[-1]


def begin_again(job: TrainingJob) -> None:
    lives = len(job.events(0, "restored"))
    for replica in range(job.replicas):
        if not job.sidecars.alive(replica):
            job.sidecars.start(replica)
    job.start_ranks()
    ranks = range(job.world_size)
    job.wait(
        lambda: all(len(job.events(r, "restored")) == lives + 1 for r in ranks), "another life"
    )


def assert_named(job: TrainingJob, tier: str) -> None:
    """The report of the restore names the bad copy."""
    last = job.job().restores[-1]
    assert any(tier in sentence for sentence in last.bad), last


def test_a_flipped_byte_in_memory_is_replaced_by_another_copy(
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    with make(tmp_path, s3_server) as job:
        job.start()
        job.wait_complete(NEIGHBOR, 4)
        checkpoint = stop_at(job, LOCAL, 6)
        memory = job.sidecars.memory(1)
        for slot in (0, 1):
            manifest = slots.peek(memory, 1, slot)
            if manifest is not None and manifest.step == checkpoint.step:
                assert manifest.sealed
                flip(Path(memory.slot(1, slot)), manifest.size // 2)
        begin_again(job)
        step, _ = job.assert_same_restore()
        assert step == checkpoint.step
        assert_named(job, MEMORY)


def test_a_flipped_byte_on_the_local_disk_is_replaced_by_another_copy(
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    with make(tmp_path, s3_server) as job:
        job.start()
        checkpoint = stop_at(job, NEIGHBOR, 6)
        job.lose_node(0, disk=False)
        disk = job.sidecars.disk(0)
        flip(Path(DiskLayout.shard(disk.shards, checkpoint, 0)), 8000)
        begin_again(job)
        step, _ = job.assert_same_restore()
        assert step == checkpoint.step
        assert_named(job, LOCAL)
        assert NEIGHBOR in job.tiers_read() or REMOTE in job.tiers_read()


def test_a_flipped_byte_at_the_neighbour_is_replaced_by_another_copy(
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    with make(tmp_path, s3_server) as job:
        job.start()
        job.wait_complete(NEIGHBOR, 6)
        checkpoint = stop_at(job, REMOTE, 6)
        job.lose_node(0, disk=True)
        held = job.sidecars.disk(1).replicas
        flip(Path(DiskLayout.shard(held, checkpoint, 0)), 8000)
        begin_again(job)
        step, _ = job.assert_same_restore()
        assert step == checkpoint.step
        assert_named(job, NEIGHBOR)
        assert REMOTE in job.tiers_read()


def test_a_flipped_byte_in_the_bucket_takes_all_ranks_to_the_older_durable_one(
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    with make(tmp_path, s3_server) as job:
        job.start()
        checkpoint = stop_at(job, REMOTE, 6)
        for replica in range(job.replicas):
            job.lose_node(replica, disk=True)
        remote = job.sidecars.topology.tiers.remote
        assert remote is not None
        client, key = s3_server.client(), ""
        key = RemoteLayout(remote.prefix, job.sidecars.topology.run).shard(checkpoint, 1)
        data = bytearray(client.get_object(remote.bucket, key).read())
        data[len(data) // 2] ^= 1
        client.put_object(remote.bucket, key, io.BytesIO(bytes(data)), len(data))
        begin_again(job)
        step, _ = job.assert_same_restore()
        assert step < checkpoint.step
        assert job.tiers_read() == {REMOTE}
        assert_named(job, REMOTE)
