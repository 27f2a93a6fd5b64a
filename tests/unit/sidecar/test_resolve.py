"""From the leader's decision to paths and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay_protocol.files import write_atomically
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import CopySource, LeaderDecision, ShardPlan, Source
from backstay_sidecar.restore.resolve import LocalFiles, Resolver
from support.restore_fakes import FakeStore

BASE = CheckpointId(5, 7_000_001)


def manifest(rank: int, fingerprint: str = "f0") -> Manifest:
    return Manifest(
        run="ns/run",
        step=BASE.step,
        attempt=BASE.attempt,
        rank=rank,
        world_size=2,
        replica=rank,
        plan="plan",
        size=10,
        created=1.0,
        digests=("d",),
        fingerprint=fingerprint,
    )


@pytest.fixture
def memory(tmp_path: Path) -> MemoryLayout:
    layout = MemoryLayout(str(tmp_path / "memory"))
    Path(layout.rank_folder(0)).mkdir(parents=True)
    return layout


@pytest.fixture
def disk(tmp_path: Path) -> DiskLayout:
    return DiskLayout(str(tmp_path / "disk"), "ns/run", 0)


def put_file(area: str, rank: int, fingerprint: str = "f0") -> None:
    path = DiskLayout.shard(area, BASE, rank)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(b"0123456789")
    write_atomically(DiskLayout.manifest(area, BASE, rank), manifest(rank, fingerprint).to_json())


def put_slot(memory: MemoryLayout, slot: int, fingerprint: str = "f0") -> None:
    Path(memory.slot(0, slot)).write_bytes(b"0123456789")
    write_atomically(memory.slot_manifest(0, slot), manifest(0, fingerprint).to_json())


def resolved(
    memory: MemoryLayout,
    disk: DiskLayout,
    *sources: tuple[str, int],
    rank: int = 0,
    unreachable: tuple[str, ...] = (),
) -> list[Source]:
    resolver = Resolver(
        0,
        LocalFiles(memory, disk),
        lambda replica: f"http://host-{replica}:7070",
        {"Authorization": "Bearer t"},
        FakeStore(),
        RemoteLayout("p", "ns/run"),
    )
    plan = ShardPlan(
        rank=rank,
        size=10,
        chunk_size=64,
        fingerprint="f0",
        sources=tuple(CopySource(tier=tier, holder=holder) for tier, holder in sources),
    )
    decision = LeaderDecision(
        round="r",
        serial=1,
        attempt=7_000_002,
        base=BASE,
        shards=(plan,),
        unreachable={0: unreachable},
    )
    return list(resolver.resolve(decision).shards[0].sources)


def test_a_slot_of_this_pod_is_named_by_its_path(memory: MemoryLayout, disk: DiskLayout) -> None:
    put_slot(memory, 0, "another")
    put_slot(memory, 1)
    (source,) = resolved(memory, disk, ("memory", 0))
    assert (source.path, source.slot, source.slot_rank) == (memory.slot(0, 1), 1, 0)
    assert source.manifest_path == memory.slot_manifest(0, 1)


def test_files_of_this_pod_are_named_by_their_paths_nearest_first(
    memory: MemoryLayout, disk: DiskLayout
) -> None:
    put_slot(memory, 0)
    put_file(disk.shards, 0)
    put_file(disk.replicas, 0)
    found = resolved(memory, disk, ("remote", -1), ("neighbor", 0), ("local", 0), ("memory", 0))
    assert [source.tier for source in found] == ["memory", "local", "neighbor", "remote"]
    assert found[1].path == DiskLayout.shard(disk.shards, BASE, 0)
    assert found[2].path == DiskLayout.shard(disk.replicas, BASE, 0)


def test_a_file_with_other_bytes_than_the_decision_names_is_not_offered_by_path(
    memory: MemoryLayout, disk: DiskLayout
) -> None:
    put_file(disk.shards, 0, "another")
    (source,) = resolved(memory, disk, ("local", 0))
    assert source.path == ""


def test_a_copy_in_a_siblings_folder_on_the_same_disk_is_found(
    memory: MemoryLayout, disk: DiskLayout, tmp_path: Path
) -> None:
    sibling = DiskLayout(str(tmp_path / "disk"), "ns/run", 3)
    put_file(sibling.replicas, 1)
    (source,) = resolved(memory, disk, ("neighbor", 0), rank=1, unreachable=())
    assert source.path == DiskLayout.shard(sibling.replicas, BASE, 1)


def test_other_sidecars_are_named_by_url_with_the_jobs_token(
    memory: MemoryLayout, disk: DiskLayout
) -> None:
    (source,) = resolved(memory, disk, ("local", 1))
    shard = f"http://host-1:7070/v1/checkpoints/{BASE}/shards/0"
    assert source.url == f"{shard}?tier=local"
    assert source.manifest_url == f"{shard}/manifest?tier=local"
    assert source.headers == {"Authorization": "Bearer t"}


def test_a_remote_copy_is_a_presigned_url_without_the_jobs_token(
    memory: MemoryLayout, disk: DiskLayout
) -> None:
    (source,) = resolved(memory, disk, ("remote", -1))
    assert source.url.startswith(f"https://store/p/ns/run/checkpoints/{BASE}/00000.safetensors?")
    assert source.headers == {}


def test_what_this_replica_could_not_reach_comes_last(
    memory: MemoryLayout, disk: DiskLayout
) -> None:
    found = resolved(
        memory, disk, ("memory", 1), ("local", 1), ("remote", -1), unreachable=("0/memory/1",)
    )
    assert [source.tier for source in found] == ["local", "remote", "memory"]


def test_a_fresh_start_has_no_sources(memory: MemoryLayout, disk: DiskLayout) -> None:
    resolver = Resolver(0, LocalFiles(memory, disk), str, {}, None, None)
    decision = LeaderDecision(round="r", serial=1, attempt=1, base=None, reason="nothing there")
    result = resolver.resolve(decision)
    assert (result.base, result.shards, result.reason) == (None, (), "nothing there")
