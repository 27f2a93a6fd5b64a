from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from backstay.client import SidecarClient
from backstay.preflight import Observed, observe, state_to_come, warnings
from backstay.structure import walk
from backstay_protocol.messages import TierState
from support.fake_sidecar import FakeSidecar, fresh_reply

GOOD = Observed(
    volume="/memory",
    volume_bytes=100 << 30,
    state_bytes=10 << 30,
    num_slots=2,
    num_local_ranks=4,
    tiers=("memory", "local", "remote"),
    states=(TierState(tier="remote"),),
)


def test_a_sound_job_gets_no_warning() -> None:
    assert warnings(GOOD) == []


def test_a_small_volume_is_warned_of_with_the_size_that_is_needed() -> None:
    (warning,) = warnings(replace(GOOD, volume_bytes=80 << 30))

    assert "holds 80 GiB" in warning
    assert "2 slots for 4 ranks need about 88 GiB" in warning
    assert "spec.checkpoint.memory.sizeLimit" in warning


def test_a_job_without_a_remote_tier_is_told_that_nothing_is_durable() -> None:
    seen = replace(GOOD, tiers=("memory", "local"))
    (warning,) = warnings(seen)

    assert "nothing is durable" in warning
    assert warnings(seen, of_the_job=False) == []


def test_a_tier_in_trouble_is_named_with_its_trouble() -> None:
    states = (TierState(tier="remote", ok=False, message="bucket `x` does not exist"),)

    assert warnings(replace(GOOD, states=states)) == [
        "the remote tier is in trouble: bucket `x` does not exist"
    ]


def test_optimizer_state_counts_before_it_exists() -> None:
    model = nn.Linear(8, 8, bias=False)
    adam = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    sgd = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}

    assert state_to_come(walk(adam)) == 2 * 256
    assert state_to_come(walk(sgd)) == 256
    model(torch.ones(8)).sum().backward()
    adam["optimizer"].step()
    assert state_to_come(walk(adam)) == 0


def test_it_looks_at_the_volume_and_asks_the_sidecar(tmp_path) -> None:
    with FakeSidecar(str(tmp_path)) as sidecar:
        client = SidecarClient(sidecar.memory.socket)
        seen = observe(client, str(tmp_path), walk({"x": torch.ones(4)}), fresh_reply(), 2)

    room = os.statvfs(tmp_path)
    assert seen.volume_bytes == room.f_blocks * room.f_frsize
    assert (seen.state_bytes, seen.num_slots, seen.num_local_ranks) == (16, 2, 2)
    assert [state.tier for state in seen.states] == ["memory", "local", "remote"]


def test_a_sidecar_that_is_down_is_no_reason_to_stop(tmp_path) -> None:
    client = SidecarClient(f"{tmp_path}/agent.sock")

    assert observe(client, "/nowhere", walk({}), fresh_reply(), 1).states == ()
