"""Several processes: sharded and replicated state, in the same world and in another."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.multiprocessing as mp

from support import load_workers

pytestmark = pytest.mark.timeout(400)

CASES = {
    2: {
        "fsdp": ("fsdp", "error"),
        "fsdp_columns": ("fsdp", "error"),
        "fsdp_local": ("fsdp_local", "error"),
        "scalars": ("scalars", "error"),
        "gradients": ("gradients", "error"),
        "ddp": ("ddp", "error"),
        "positions": ("positions", "error"),
    },
    1: {
        "fsdp": ("fsdp", "error"),
        "fsdp_columns": ("fsdp", "error"),
        "fsdp_local": ("fsdp_local", "error"),
        "scalars": ("scalars", "error"),
        "gradients": ("gradients", "error"),
        "ddp": ("ddp", "error"),
        "positions": ("positions", "error"),
        "mergeable": ("positions", "error"),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("worlds"))
    mp.spawn(load_workers.save, (2, path), nprocs=2)
    return path


@pytest.fixture(scope="module")
def results(folder) -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for world_size, cases in CASES.items():
        mp.spawn(load_workers.load, (world_size, folder, cases), nprocs=world_size)
        for rank in range(world_size):
            with open(f"{folder}/result-{world_size}-{rank}.json") as file:
                found[world_size, rank] = json.load(file)
    return found


@pytest.mark.parametrize("place", [(2, 0), (2, 1), (1, 0)], ids=["2-0", "2-1", "1-0"])
@pytest.mark.parametrize(
    "case",
    [
        "fsdp from fsdp",
        "fsdp_columns from fsdp",
        "fsdp_local from fsdp_local",
        "scalars from scalars",
    ],
)
def test_sharded_state_goes_on_bit_for_bit(results, place, case) -> None:
    result = results[place][f"{case}, error"]

    assert "error" not in result, result
    assert result["wrong"] == []
    assert result["names"] == result["expected_names"]
    assert result["notes"] == []


@pytest.mark.parametrize("place", [(2, 0), (2, 1), (1, 0)], ids=["2-0", "2-1", "1-0"])
def test_sharded_gradients_come_back_and_absent_ones_stay_absent(results, folder, place) -> None:
    result = results[place]["gradients from gradients, error"]
    with open(f"{folder}/gradients/gradients-0.json") as file:
        expected = json.load(file)

    assert "error" not in result, result
    assert expected["bias"] is None
    assert result["gradients"] == expected
    assert result["wrong"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_and_each_ranks_own_buffers_go_on_bit_for_bit(results, rank) -> None:
    result = results[2, rank]["ddp from ddp, error"]

    assert "error" not in result, result
    assert any("running_mean" in name for name in result["names"])
    assert (result["wrong"], result["names"]) == ([], result["expected_names"])


def test_replicas_fit_into_one_process(results) -> None:
    result = results[1, 0]["ddp from ddp, error"]

    assert "error" not in result, result
    assert result["names"] == result["expected_names"]


def test_each_rank_gets_its_own_values_back(results) -> None:
    values = [results[2, rank]["positions from positions, error"]["values"] for rank in (0, 1)]

    assert values == [{"data": {"seen": 0}}, {"data": {"seen": 10}}]


def test_values_of_each_rank_do_not_fit_another_world_and_the_way_out_is_told(results) -> None:
    error = results[1, 0]["positions from positions, error"]["error"]

    assert "from 2 ranks to 1" in error
    assert "its own data." in error
    assert 'on_world_change="reset"' in error
    assert "merge_state_dicts" in error


def test_a_merge_hook_gets_every_saved_ranks_state(results) -> None:
    result = results[1, 0]["mergeable from positions, error"]

    assert "error" not in result, result
    assert result["values"] == {"data": {"seen": 10}}
