"""Two ranks over gloo: DDP and FSDP2 shards, read by the stock reader; plans that never hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file

from support import capture_ranks

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    mp.spawn(capture_ranks.run, (str(path),), nprocs=capture_ranks.WORLD_SIZE)
    return path


def seen(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((folder / case / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_stock_dcp_reads_the_shards_as_the_whole_state(
    folder: Path, case: str, tmp_path: Path
) -> None:
    for rank in (0, 1):
        name = f"{rank:05d}.safetensors"
        (tmp_path / name).write_bytes((folder / case / name).read_bytes())
    expected = load_file(folder / case / "expected.safetensors")
    state = {name: torch.full_like(tensor, 77) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert [n for n, t in expected.items() if not torch.equal(t, state[n])] == []


def test_under_ddp_each_replica_is_written_once(folder: Path) -> None:
    first, second = (set(rank["names"]) for rank in seen(folder, "ddp"))
    expected = set(load_file(folder / "ddp" / "expected.safetensors"))
    assert first & second & expected == set()
    assert expected <= first | second
    assert {"model.0.weight", "model.2.weight"} & first
    assert any("exp_avg" in name for name in first)
    assert any("exp_avg" in name for name in second)


def test_under_fsdp_each_rank_writes_its_pieces_and_scalars_once(folder: Path) -> None:
    first, second = (set(rank["names"]) for rank in seen(folder, "fsdp"))
    assert "model.0.weight" in first & second
    scalars = {f"optimizer.state.{n}.step" for n in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert scalars <= first ^ second


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_buffers_are_rank_0s_by_name_and_each_others_own(folder: Path, case: str) -> None:
    ranks = seen(folder, case)
    assert ranks[0]["running_mean"] != ranks[1]["running_mean"]
    own = ["model.1.running_mean", "__backstay__.rank.1.model.1.running_mean"]
    for rank, name in enumerate(own):
        stored = load_file(folder / case / f"{rank:05d}.safetensors")
        assert stored[name].tolist() == ranks[rank]["running_mean"]
    assert own[0] not in ranks[1]["names"]


def test_what_is_not_known_to_be_a_replica_is_kept_per_rank(folder: Path) -> None:
    for rank, found in enumerate(seen(folder, "ddp")):
        assert f"__backstay__.rank.{rank}.own" in found["names"]


def test_all_ranks_carry_one_plan_and_an_evaluation_does_not_change_it(folder: Path) -> None:
    ranks = seen(folder, "fsdp")
    assert ranks[0]["plans"] == ranks[1]["plans"]
    assert len(set(ranks[0]["plans"])) == 1


def test_a_rank_that_changed_saves_all_it_holds_until_all_plan_anew(folder: Path) -> None:
    first, second = seen(folder, "one_rank_changes")
    assert second["plans"][1:3] == ["local", "local"]
    assert second["wanted"] == [0, 1, 1, 0, 0]
    assert first["plans"][0] == first["plans"][1] == first["plans"][2] == second["plans"][0]
    assert first["plans"][3:] == second["plans"][3:]
    assert "local" not in first["plans"]
    assert "__backstay__.rank.1.more" in second["names"]
    assert (first["loss"], second["loss"]) == (5.0, 5.0)


def test_a_rank_that_cannot_plan_skips_and_holds_up_nobody(folder: Path) -> None:
    first, second = seen(folder, "one_rank_cannot_plan")
    assert first["published"] == [True, True]
    assert second["published"] == [False, True]
    assert "bad" in second["why"]
    assert (first["plan"] == "local", second["plan"]) == (False, "local")


def test_a_rank_that_misses_a_replan_is_waited_for_no_longer_than_agreed(folder: Path) -> None:
    first, second = seen(folder, "one_rank_misses_the_plan")
    assert first["plans"][1:3] == ["local", "local"]
    assert "local" not in second["plans"]
    assert first["plans"][0] == second["plans"][0]
    assert first["plans"][3:] == second["plans"][3:]
    assert first["plans"][3] == first["plans"][4] != "local"
    assert first["wanted"] == [0] * 5, "not at once again after a plan that failed"
