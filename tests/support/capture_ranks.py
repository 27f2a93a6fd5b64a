"""What two ranks do in the tests of capture; started by torch.multiprocessing.spawn over gloo.

Each case trains, saves, and changes everything right after; rank 0 keeps the whole state as it was
at the save (`<case>/expected.safetensors`), each rank its shard (`<case>/<rank>.safetensors`) and
what it saw (`<case>/<rank>.json`). The tests compare.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from backstay.gathering import StoreGathers, World, process_group_world
from backstay_protocol.control import Word
from support.capturing import ATTEMPT, Rank, shard_bytes

WORLD_SIZE = 2


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    for case in (ddp, fsdp, one_rank_changes, one_rank_cannot_plan, one_rank_misses_the_plan):
        at = f"{folder}/{case.__name__}"
        os.makedirs(at, exist_ok=True)
        case(rank, at)
        dist.barrier()
    dist.destroy_process_group()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4), nn.LayerNorm(4))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _attach(at: str, rank: int, entries: dict[str, Any], patience_seconds: float = 60.0) -> Rank:
    """Each case by a name of its own in the store: all save under one attempt."""

    def world() -> World:
        whole = process_group_world()
        assert whole is not None
        return replace(whole, store=PrefixStore(at, whole.store))

    return Rank(
        f"{at}/memory-{rank}",
        entries,
        rank=rank,
        world_size=WORLD_SIZE,
        gather=StoreGathers(world, patience_seconds),
    )


def _keep(at: str, rank: Rank, step: int, **seen: Any) -> None:
    manifest, data = shard_bytes(rank.memory, rank.rank, step)
    with open(f"{at}/{rank.rank:05d}.safetensors", "wb") as file:
        file.write(data)
    with open(f"{at}/{rank.rank}.json", "w") as file:
        json.dump({"plan": manifest.plan, "names": list(rank.tensors(step)), **seen}, file)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {
        f"model.{n.removeprefix('module.')}": t for n, t in model.state_dict().items()
    }
    names = {p: n.removeprefix("module.") for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.state.{names[parameter]}.{key}"] = value
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for n, t in found.items()
    }


def ddp(rank: int, at: str) -> None:
    model = DistributedDataParallel(_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    attached = _attach(
        at, rank, {"model": model, "optimizer": optimizer, "own": torch.tensor(rank)}
    )
    attached.engine.check()
    for seed in range(3):
        _step(model, optimizer, 10 * seed + rank)
    whole = _whole(model, optimizer)
    mean = model.module[1].running_mean.tolist()
    result = attached.engine.save(3, ATTEMPT)
    _step(model, optimizer, 99)
    attached.engine.wait()
    assert result.published, result.why
    _keep(at, attached, 3, running_mean=mean)
    if rank == 0:
        save_file(whole, f"{at}/expected.safetensors")
    attached.close()


def fsdp(rank: int, at: str) -> None:
    model = _net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    attached = _attach(at, rank, {"model": model, "optimizer": optimizer})
    attached.engine.check()
    plans = []
    for step in range(1, 5):
        _step(model, optimizer, 10 * step + rank)
        with torch.no_grad():
            model(torch.randn(5, 6))  # an evaluation: the root stays unsharded after it
        whole = _whole(model, optimizer) if step == 4 else {}
        with torch.no_grad():
            model(torch.randn(5, 6))
        mean = model[1].running_mean.tolist()
        whole.update(
            {n: t.clone() for n, t in model.named_buffers(prefix="model")} if whole else {}
        )
        result = attached.engine.save(step, ATTEMPT)
        _step(model, optimizer, 99)
        attached.engine.wait()
        assert result.published, result.why
        attached.confirm(step)
        plans.append(shard_bytes(attached.memory, rank, step)[0].plan)
    _keep(at, attached, 4, running_mean=mean, plans=plans)
    if rank == 0:
        save_file({n: t.contiguous() for n, t in whole.items()}, f"{at}/expected.safetensors")
    attached.close()


def one_rank_changes(rank: int, at: str) -> None:
    """Rank 1 gets another tensor: nobody may wait for anybody until all plan anew at step 4.

    One that is only another object at each save is no change.
    """
    entries: dict[str, Any] = {"model": DistributedDataParallel(_net()), "loss": torch.zeros(1)}
    attached = _attach(at, rank, entries)
    plans, wanted = [], []
    for step in range(1, 6):
        entries["loss"] = torch.full((1,), float(step))
        if step == 2 and rank == 1:
            entries["more"] = torch.ones(3)
        result = attached.engine.save(step, ATTEMPT, replan=step == 4, overlap=False)
        assert result.published, result.why
        plans.append(shard_bytes(attached.memory, rank, step)[0].plan)
        wanted.append(attached.control[Word.REPLAN_WANTED])
        attached.confirm(step)
    loss = float(attached.tensors(5)[f"__backstay__.rank.{rank}.loss"])
    _keep(at, attached, 5, plans=plans, wanted=wanted, loss=loss)
    attached.close()


def one_rank_cannot_plan(rank: int, at: str) -> None:
    """Rank 1's state can't be taken apart at the first save: the other one does not hang."""
    entries: dict[str, Any] = {"model": _net()}
    attached = _attach(at, rank, entries)
    if rank == 1:
        entries["bad"] = iter([1])
    first = attached.engine.save(1, ATTEMPT, overlap=False)
    entries.pop("bad", None)
    second = attached.engine.save(2, ATTEMPT, overlap=False)
    _keep(at, attached, 2, published=[first.published, second.published], why=first.why)
    attached.close()


def one_rank_misses_the_plan(rank: int, at: str) -> None:
    """Rank 1 does not see the order to plan anew at step 2, as when its sidecar has just died: rank
    0 waits no longer than its patience, both save on, and all plan together at step 4.
    """
    entries: dict[str, Any] = {"model": DistributedDataParallel(_net())}
    attached = _attach(at, rank, entries, patience_seconds=1.0)
    plans, wanted = [], []
    for step in range(1, 6):
        replan = step == 4 or (step == 2 and rank == 0)
        dist.barrier()  # as training has it
        result = attached.engine.save(step, ATTEMPT, replan=replan, overlap=False)
        assert result.published, result.why
        plans.append(shard_bytes(attached.memory, rank, step)[0].plan)
        wanted.append(attached.control[Word.REPLAN_WANTED])
        attached.confirm(step)
    _keep(at, attached, 5, plans=plans, wanted=wanted)
    attached.close()
