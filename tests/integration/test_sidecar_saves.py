"""A real sidecar and slots written beside it: what is saved gets sealed and to the disk, whole."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay_protocol import slots
from backstay_protocol.manifest import FORCED
from backstay_protocol.messages import AgentStatus, CaptureNotice, TierState
from backstay_protocol.names import LOCAL, MEMORY, URL_CAPTURES, URL_STATUS
from backstay_protocol.topology import LocalTier, Schedule, Tiers
from support.sidecar import SidecarJob, assert_whole, random_bytes

DATA = random_bytes(300_000, 1)
SEALING = ("seal.before", "seal.after")
STORING = ("local.mid_data", "local.before_rename", "local.after_data", "local.after_manifest")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SidecarJob]:
    with SidecarJob(tmp_path) as job:
        yield job


def sealed_steps(job: SidecarJob, rank: int = 0) -> list[int]:
    """Steps that are sealed in memory; the bytes are checked."""
    memory, found = job.memory(job.replica_of(rank)), []
    for slot_rank, slot in slots.list_slots(memory):
        manifest = slots.peek(memory, slot_rank, slot)
        if slot_rank == rank and manifest is not None and manifest.sealed:
            assert_whole(manifest, Path(memory.slot(rank, slot)).read_bytes()[: manifest.size])
            found.append(manifest.step)
    return sorted(found)


def local_steps(job: SidecarJob) -> list[int]:
    return [checkpoint.step for checkpoint, _ in job.on_disk(0)]


def tier(job: SidecarJob, name: str) -> TierState:
    status: AgentStatus = job.request(0, "GET", URL_STATUS).read(AgentStatus)
    return next(state for state in status.tiers if state.tier == name)


def test_a_capture_is_sealed_and_stored_when_the_trainer_tells_of_it(job: SidecarJob) -> None:
    job.start()
    job.save(rank=0, step=5, data=DATA)
    notice = CaptureNotice(rank=0, slot=0, step=5, attempt=1)
    assert job.request(0, "POST", URL_CAPTURES, notice, port="unix").status == 200
    job.wait_for(lambda: local_steps(job) == [5], "the local copy")
    assert sealed_steps(job) == [5]


def test_a_capture_that_nobody_tells_of_is_found(job: SidecarJob) -> None:
    job.start()
    job.save(rank=0, step=5, data=DATA)
    job.wait_for(lambda: local_steps(job) == [5], "the local copy")


def test_what_was_saved_while_the_sidecar_was_down_is_found_when_it_returns(
    job: SidecarJob,
) -> None:
    job.start()
    job.save(rank=0, step=5, data=DATA)
    job.wait_for(lambda: local_steps(job) == [5], "the local copy")
    job.kill()
    job.save(rank=0, step=10, data=DATA[::-1], slot=0)
    job.save(rank=0, step=15, data=DATA[1:], slot=1)
    job.start()
    job.wait_for(lambda: local_steps(job) == [5, 10, 15], "all copies")
    assert sealed_steps(job) == [10, 15]


@pytest.mark.parametrize("point", [*SEALING, *STORING])
def test_a_sidecar_killed_at_any_point_leaves_nothing_half_visible(
    job: SidecarJob, point: str
) -> None:
    job.start(faults=f"{point}=kill@2")
    job.save(rank=0, step=5, data=DATA, slot=0)
    job.wait_for(lambda: local_steps(job) == [5], "the first copy")
    job.save(rank=0, step=10, data=DATA[::-1], slot=1)
    assert job.wait_dead() == -9
    assert local_steps(job) in ([5], [5, 10]), "on_disk checks each byte"
    assert sealed_steps(job) in ([5], [5, 10])
    job.start()
    job.wait_for(lambda: local_steps(job) == [5, 10], "both copies")
    assert sealed_steps(job) == [5, 10]
    names = [path.name for path in Path(job.disk(0).shards).rglob("*") if path.is_file()]
    assert sorted(set(names)) == ["00000.json", "00000.safetensors"], "leftovers are cleaned"


def test_a_slot_that_is_rewritten_all_the_time_is_never_stored_torn(job: SidecarJob) -> None:
    job.start()
    for step in range(1, 31):
        job.save(rank=0, step=step, data=random_bytes(200_000, step), slot=step % 2)
    job.wait_for(lambda: 30 in local_steps(job), "the newest copy")
    for checkpoint, _ in job.on_disk(0):
        stored = Path(job.disk(0).shard(job.disk(0).shards, checkpoint, 0)).read_bytes()
        assert stored == random_bytes(200_000, checkpoint.step)


def test_a_full_disk_degrades_the_local_tier_alone_and_is_caught_up(job: SidecarJob) -> None:
    process = job.start()
    room = (200_000, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, room)
    job.save(rank=0, step=5, data=DATA, slot=0)
    job.wait_for(lambda: sealed_steps(job) == [5], "sealing goes on")
    job.wait_for(lambda: "no room for rank 0" in tier(job, LOCAL).message, "the reason")
    job.wait_for(lambda: not tier(job, LOCAL).ok, "the tier to be called degraded", 45)
    state = tier(job, LOCAL)
    assert "it needs 300000 bytes" in state.message
    assert state.backlog == 1
    assert tier(job, MEMORY).ok
    job.save(rank=0, step=10, data=DATA[::-1], slot=1)
    job.wait_for(lambda: sealed_steps(job) == [5, 10], "sealing still goes on")
    assert local_steps(job) == []
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room[1], room[1]))
    job.wait_for(lambda: local_steps(job) == [5, 10], "both copies")
    job.wait_for(lambda: tier(job, LOCAL).ok, "the tier to recover")
    assert "tier_degraded" in job.log()
    assert "tier_recovered" in job.log()


def test_a_sidecar_starts_with_a_disk_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("no folder")
    with SidecarJob(tmp_path) as job:
        job.start()
        job.save(rank=0, step=5, data=DATA)
        job.wait_for(lambda: sealed_steps(job) == [5], "sealing")
        job.wait_for(lambda: tier(job, LOCAL).message, "the reason")
        (tmp_path / "disk").unlink()
        job.wait_for(lambda: local_steps(job) == [5], "the local copy")


def test_a_slot_that_went_bad_after_sealing_is_struck_and_never_stored(tmp_path: Path) -> None:
    tiers = Tiers(local=LocalTier(root=str(tmp_path / "disk")))
    (tmp_path / "disk").write_text("no folder")
    with SidecarJob(tmp_path, tiers=tiers) as job:
        job.start()
        job.save(rank=0, step=5, data=DATA)
        job.wait_for(lambda: sealed_steps(job) == [5], "sealing")
        with open(job.memory(0).slot(0, 0), "r+b") as slot:
            slot.seek(100_000)
            slot.write(b"!")
        (tmp_path / "disk").unlink()
        job.wait_for(lambda: slots.peek(job.memory(0), 0, 0) is None, "the slot to be struck")
        assert "copy_struck tier=memory" in job.log()
        assert "chunk 1 of rank 0" in job.log()
        assert local_steps(job) == []


def test_a_copy_that_a_reader_has_proven_bad_is_read_again_struck_and_made_anew(
    job: SidecarJob,
) -> None:
    job.start()
    job.save(rank=0, step=5, data=DATA)
    job.wait_for(lambda: local_steps(job) == [5], "the local copy")
    (path,) = Path(job.disk(0).shards).glob("*/*.safetensors")
    with path.open("r+b") as file:
        file.seek(70_000)
        file.write(b"!")
    manifest = "/v1/checkpoints/5-1/shards/0/manifest?tier="
    assert job.request(0, "GET", f"{manifest}local").status == 200, "nobody has looked yet"
    assert job.request(0, "GET", f"{manifest}memory&verify=true").status == 200
    assert job.request(0, "GET", f"{manifest}local&verify=true").status == 404
    assert "copy_struck tier=local" in job.log()
    job.wait_for(lambda: path.exists() and path.read_bytes() == DATA, "another copy from memory")
    job.wait_for(lambda: local_steps(job) == [5], "it to be visible")


def test_each_tier_takes_what_its_own_schedule_names(tmp_path: Path) -> None:
    local = LocalTier(root=str(tmp_path / "disk"), schedule=Schedule(every_steps=10))
    with SidecarJob(tmp_path, tiers=Tiers(local=local)) as job:
        job.start()
        for step, reason in ((5, "schedule"), (10, "schedule"), (13, FORCED), (15, "schedule")):
            job.save(rank=0, step=step, data=random_bytes(100_000, step), reason=reason)
            job.wait_for(lambda step=step: sealed_steps(job) == [step], "sealing")  # type: ignore[misc]
            job.wait_for(lambda: tier(job, LOCAL).backlog == 0, "the disk")
        assert local_steps(job) == [10, 13]


def test_a_pod_with_several_ranks_keeps_all_of_them(tmp_path: Path) -> None:
    with SidecarJob(tmp_path, per_replica=3) as job:
        job.start()
        for rank in range(3):
            job.save(rank=rank, step=5, data=random_bytes(150_000, rank))
        job.wait_for(lambda: len(job.on_disk(0)) == 3, "all copies")
        assert [rank for _, rank in job.on_disk(0)] == [0, 1, 2]


def test_slots_in_which_nothing_makes_sense_disturb_nothing(job: SidecarJob) -> None:
    memory = job.memory(0)
    job.save(rank=0, step=5, data=DATA, slot=0)
    Path(memory.slot(0, 1)).write_bytes(b"x")
    Path(memory.slot_manifest(0, 1)).write_bytes(b"{}")
    os.makedirs(f"{memory.ranks}/not-a-rank")
    Path(memory.control(0)).write_bytes(b"short")
    job.start()
    job.wait_for(lambda: local_steps(job) == [5], "the good slot's copy")


def test_a_sidecar_with_nothing_to_do_costs_next_to_nothing(job: SidecarJob) -> None:
    process = job.start()
    job.save(rank=0, step=5, data=DATA)
    job.wait_for(lambda: local_steps(job) == [5], "the local copy")

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before, begun = ticks(), time.monotonic()
    job.wait_for(lambda: time.monotonic() - begun > 3, "three seconds", 5)
    used = (ticks() - before) / os.sysconf("SC_CLK_TCK")
    assert used / (time.monotonic() - begun) < 0.2
