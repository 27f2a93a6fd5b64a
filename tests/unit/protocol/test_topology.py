from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.topology import (
    LocalTier,
    ManualChoice,
    MemoryTier,
    NeighborTier,
    Peer,
    PodIdentity,
    RemoteTier,
    RestoreOptions,
    Retention,
    Schedule,
    Tiers,
    Topology,
    read_pod,
    read_topology,
)


def topology(**fields: Any) -> Topology:
    defaults: dict[str, Any] = {
        "namespace": "ns",
        "job": "job",
        "run_name": "run",
        "uid": "u",
        "replicas": 2,
        "processes_per_replica": 4,
        "peers": tuple(Peer(replica=i, address=f"h{i}:7070") for i in (0, 1)),
        "tiers": Tiers(
            memory=MemoryTier(schedule=Schedule(every_steps=5), slots=3),
            local=LocalTier(root="/d", retention=Retention(keep_last=3, keep_every=100)),
            neighbor=NeighborTier(schedule=Schedule(every_seconds=60)),
            remote=RemoteTier(endpoint="https://s3.example:9000", bucket="b", prefix="p"),
        ),
        "restore": RestoreOptions(choice=ManualChoice(token="t", step=5)),
        "first_generation": 3,
    }
    return Topology(**(defaults | fields))


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_bytes(codec.dumps(topology()))
    assert read_topology(str(tmp_path / "topology.json")) == topology()
    pod = PodIdentity(replica=1, generation=7, current={0: 6, 1: 7}, replaces=5, uid="x")
    (tmp_path / "pod.json").write_bytes(codec.dumps(pod))
    assert read_pod(str(tmp_path / "pod.json")) == pod


def test_what_follows_from_it() -> None:
    job = topology()
    assert (job.run, job.owner, job.world_size) == ("ns/run", "local/u", 8)
    assert job.ranks_of(1) == range(4, 8)
    assert job.address_of(1) == "h1:7070"


@pytest.mark.parametrize(
    ("gone", "outermost"),
    [
        ((), "remote"),
        (("remote",), "neighbor"),
        (("remote", "neighbor"), "local"),
        (("remote", "neighbor", "local"), "memory"),
    ],
)
def test_the_outermost_tier_is_the_hardest_to_lose(gone: tuple[str, ...], outermost: str) -> None:
    assert replace(topology().tiers, **dict.fromkeys(gone)).outermost == outermost


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Schedule(every_steps=-1), "can't be negative"),
        (lambda: Schedule(every_seconds=-1), "can't be negative"),
        (lambda: Schedule(every_steps=1, every_seconds=1), "not both"),
        (lambda: Retention(keep_last=0), "keepLast must be 1 or more"),
        (lambda: Retention(keep_every=-1), "keepEvery 0 or more"),
        (lambda: MemoryTier(slots=0), "memory.slots is 0"),
        (lambda: MemoryTier(slots=9), "1 to 8"),
        (lambda: RemoteTier(endpoint="s3:9000", bucket="b"), "expected http"),
        (lambda: RemoteTier(endpoint="http://", bucket="b"), "expected http"),
        (lambda: RemoteTier(endpoint="http://h/path", bucket="b"), "expected http"),
        (lambda: topology(replicas=0, peers=()), "must be 1 or more"),
        (lambda: topology(peers=(Peer(replica=0, address="h"),)), "each replica 0..1 once"),
    ],
)
def test_what_can_not_be_is_refused_with_a_reason(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()


def test_a_wrong_file_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"namespace": 1}')
    with pytest.raises(ProtocolError, match=r"Topology\.namespace: expected str"):
        read_topology(str(tmp_path / "t.json"))
    with pytest.raises(FileNotFoundError):
        read_pod(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("choice", "version", "fits"),
    [
        (ManualChoice(token="t", run="team/other"), "1.0", False),
        (ManualChoice(token="t", run="team/other"), "1.1", True),
        (ManualChoice(token="t", run="team/other"), "1.2", True),
        (ManualChoice(token="t", step=5), "1.0", True),
        (ManualChoice(token="t", fresh=True), "1.0", True),
    ],
)
def test_another_run_is_nothing_for_parts_that_do_not_know_of_it(
    choice: ManualChoice, version: str, fits: bool
) -> None:
    assert (choice.unknown_to(version) == "") == fits
