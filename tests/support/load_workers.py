"""What ranks do in tests of loading by several processes; started by torch.multiprocessing.spawn.

Each case builds a state, trains 3 steps, saves shards, trains 3 more and keeps the result; or loads
the shards in another world, trains 3 more, and says how it differs. All ranks see the same batch,
so that worlds of different size can be compared bit for bit.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from backstay import structure
from backstay.capture import ABSENT_GRADIENTS_KEY
from backstay.gathering import StoreGathers
from backstay.load import Loader, LoadSettings
from backstay.plan import local_plan, make_plan
from backstay.shard_reader import Reach
from backstay_protocol.layout import MemoryLayout
from support import shards


class Position:
    """Data position of one rank, that can be merged."""

    def __init__(self, rank: int) -> None:
        self.seen = 10 * rank

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Mergeable(Position):
    def merge_state_dicts(self, states: list[dict[str, int]]) -> dict[str, int]:
        return {"seen": sum(state["seen"] for state in states)}


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 50), nn.GELU(), nn.Dropout(0.1), nn.Linear(50, 8), nn.LayerNorm(8)
    )


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def fsdp(rank: int, by_columns: bool = False) -> dict[str, Any]:
    """Uneven shards (50 and 8 rows), one LayerNorm whose second half may be another rank's."""
    model = _net()
    placement = (lambda p: Shard(1) if p.ndim > 1 else Shard(0)) if by_columns else None
    fully_shard(model[0], shard_placement_fn=placement)
    fully_shard(model, shard_placement_fn=placement)
    return {"model": model, "optimizer": torch.optim.AdamW(_groups(model), lr=1e-2), "epoch": 0}


def fsdp_columns(rank: int) -> dict[str, Any]:
    """The same, cut along the other dimension."""
    return fsdp(rank, by_columns=True)


def scalars(rank: int) -> dict[str, Any]:
    """A parameter smaller than the world: one rank's piece is empty."""
    model = nn.Linear(4, 1)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def gradients(rank: int) -> dict[str, Any]:
    """The same, saved between two backward passes; nobody needs the bias's gradient."""
    return scalars(rank)


def ddp(rank: int) -> dict[str, Any]:
    """Replicated parameters; each rank's BatchNorm sees other data."""
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 8))
    wrapped = DistributedDataParallel(model)
    return {"model": wrapped, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


def positions(rank: int) -> dict[str, Any]:
    """Values that each rank has for itself."""
    return {"data": Position(rank), "same": [1, 2, 3]}


def mergeable(rank: int) -> dict[str, Any]:
    """The same with a way out."""
    return {"data": Mergeable(rank), "same": [1, 2, 3]}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "fsdp": fsdp,
    "fsdp_columns": fsdp_columns,
    "fsdp_local": fsdp,
    "scalars": scalars,
    "gradients": gradients,
    "ddp": ddp,
    "positions": positions,
    "mergeable": mergeable,
}


def train(state: dict[str, Any], first: int, steps: int, own_data: bool) -> None:
    if "model" not in state:
        return
    width = next(m for m in state["model"].modules() if isinstance(m, nn.Linear)).in_features
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step + 100 * dist.get_rank() * own_data)
        batch = torch.randn(6, width, generator=generator)
        state["optimizer"].zero_grad()
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()
        state["epoch"] = step


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name, DTensors gathered."""
    walked = structure.walk(state, rank=dist.get_rank(), world_size=dist.get_world_size())
    names = sorted(t.name for t in walked.tensors if not t.is_dtensor)
    found = {t.name: t.local.clone() for t in walked.tensors if t.name in names}
    found.update(_gathered(state))
    return found


def _gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    if "model" in state:
        named = dict(state["model"].named_parameters())
        for name, parameter in named.items():
            values = {"": parameter, **state["optimizer"].state.get(parameter, {})}
            for key, value in values.items():
                if isinstance(value, DTensor):
                    found[f"{name}.{key}"] = value.detach().full_tensor().clone()
    return found


def _gradients_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.full_tensor().tolist()
        for name, parameter in state["model"].named_parameters()
    }


def _begin(rank: int, world_size: int, folder: str, what: str) -> None:
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    store = dist.FileStore(f"{folder}/store-{what}-{world_size}", world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)


def save(rank: int, world_size: int, folder: str) -> None:
    """Every case: 3 steps, shards, 3 steps, expectation."""
    _begin(rank, world_size, folder, "save")
    for name, make in CASES.items():
        torch.manual_seed(0)
        state = make(rank)
        train(state, 0, 3, own_data=name == "ddp")
        absent = _leave_gradients(state, rank) if name == "gradients" else None
        walked = structure.walk(
            state, rank=rank, world_size=world_size, gradients=absent is not None
        )
        plan = make_plan(walked, rank, world_size, StoreGathers()(name))
        if name == "fsdp_local":
            plan = local_plan(walked, rank, world_size)
        file = shards.shard_bytes(walked, plan, rank, absent)
        manifest = shards.sealed(file, rank, world_size, plan.id)
        shards.write_shard(f"{folder}/{name}", file, manifest)
        if absent is not None:
            found = _gradients_of(state)  # collective
            with open(f"{folder}/{name}/gradients-{rank}.json", "w") as out:
                json.dump(found, out)
        train(state, 3, 3, own_data=name == "ddp")
        tensors = whole(state)
        if tensors:
            safetensors.torch.save_file(tensors, f"{folder}/{name}/expected-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def _leave_gradients(state: dict[str, Any], rank: int) -> dict[str, list[str]]:
    """What capture writes beside them: the names of those that are None here."""
    state["optimizer"].zero_grad()
    state["model"](torch.ones(1, 4)).square().mean().backward()
    state["model"].bias.grad = None
    walked = structure.walk(state, gradients=True, rank=rank)
    return {ABSENT_GRADIENTS_KEY: [n for n, p in walked.gradients.items() if p.grad is None]}


def load(rank: int, world_size: int, folder: str, cases: dict[str, tuple[str, str]]) -> None:
    """`cases`: name -> (saved case, on_world_change). Writes result-<world>-<rank>.json."""
    _begin(rank, world_size, folder, "load")
    results = {}
    for name, (saved, on_world_change) in cases.items():
        torch.manual_seed(77)
        state = CASES[name](rank)
        results[f"{name} from {saved}, {on_world_change}"] = _load_one(
            state,
            rank,
            world_size,
            f"{folder}/{saved}",
            on_world_change,
            own_data=name == "ddp",
            gradients=name == "gradients",
        )
    with open(f"{folder}/result-{world_size}-{rank}.json", "w") as out:
        json.dump(results, out)
    dist.barrier()
    dist.destroy_process_group()


def _load_one(
    state: dict[str, Any],
    rank: int,
    world_size: int,
    folder: str,
    on_world_change: Any,
    own_data: bool,
    gradients: bool,
) -> dict[str, Any]:
    manifests = shards.read_manifests(folder)
    sources = {m.rank: [shards.by_file(folder, m)] for m in manifests}
    settings = LoadSettings(
        rank=rank,
        world_size=world_size,
        reach=Reach(memory=MemoryLayout(folder)),
        on_world_change=on_world_change,
    )
    loader = Loader(
        lambda: structure.walk(state, rank=rank, world_size=world_size, gradients=gradients),
        settings,
    )
    loaded = loader(shards.decide(manifests, sources))
    errors: list[str] = [""] * world_size
    dist.all_gather_object(errors, str(loaded.error or loaded.bad or ""))
    if any(errors):
        return {"error": errors[rank], "errors": errors}
    loaded_gradients = _gradients_of(state) if gradients else {}
    train(state, 3, 3, own_data)
    expected_file = f"{folder}/expected-{rank}.safetensors"
    expected = safetensors.torch.load_file(expected_file) if os.path.exists(expected_file) else {}
    got = whole(state)
    return {
        "names": sorted(got),
        "expected_names": sorted(expected),
        "wrong": [n for n in expected if n in got and not torch.equal(got[n], expected[n])],
        "notes": loader.notes,
        "gradients": loaded_gradients,
        "values": {k: v.state_dict() for k, v in state.items() if isinstance(v, Position)},
    }
