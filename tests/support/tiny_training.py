"""One rank of a small training job, run as a process of its own by support.training_job.

Everything that is awkward to capture takes part: dropout (RNG), BatchNorm statistics, an embedding
that renormalises itself in forward, an EMA copy, a scheduler, a sampler with a position of its own.
The last state goes into one safetensors file per rank; what happened goes to a file of JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import backstay

WIDTH, TOKENS, BATCH = 32, 50, 8


class Net(nn.Module):
    """Small, with one of each kind of state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        # Renormalised rows depend on the rank's own tokens: under DDP the ranks would drift apart.
        self.embedding = nn.Embedding(TOKENS, WIDTH, max_norm=1.0 if kind == "plain" else None)
        self.inner = nn.Linear(WIDTH, WIDTH)
        batch_norm = kind != "fsdp"
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.outer = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.inner(self.embedding(tokens))))
        return self.outer(self.dropout(hidden))


class Sampler:
    """Draws from its own generator; remembers how often."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0

    def next(self) -> torch.Tensor:
        self.drawn += 1
        return torch.randint(0, TOKENS, (2, BATCH), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.generator.set_state(state["generator"])


def build(kind: str, rank: int) -> dict[str, Any]:
    """The objects of one rank, at step 0."""
    torch.manual_seed(1)
    net: nn.Module = Net(kind)
    entries: dict[str, Any] = {}
    if kind == "ddp":
        net = DistributedDataParallel(net)
        inner = net.module
    else:
        inner = net
    if kind == "fsdp":
        fully_shard(net)
    else:
        entries["ema"] = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    entries |= {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
        "data": Sampler(100 + rank),
        "counters": {"seen": 0},
    }
    return entries


def train_one_step(state: dict[str, Any]) -> None:
    """Forward, backward, update of everything."""
    inputs, targets = state["data"].next()
    loss = nn.functional.cross_entropy(state["model"](inputs), targets)
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad()
    if "ema" in state:
        model = state["model"]
        state["ema"].update_parameters(getattr(model, "module", model))
    state["counters"]["seen"] += BATCH


def final_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All that two runs must agree on, bit for bit."""
    model = state["model"]
    found = {f"model.{k}": v for k, v in getattr(model, "module", model).state_dict().items()}
    if "ema" in state:
        found |= {f"ema.{k}": v for k, v in state["ema"].state_dict().items()}
    for index, (_, values) in enumerate(sorted(state["optimizer"].state_dict()["state"].items())):
        found |= {f"optimizer.{index}.{k}": v for k, v in values.items()}
    found["rng"] = torch.get_rng_state()
    found["sampler"] = state["data"].generator.get_state()
    scheduler = state["scheduler"].state_dict()
    found["numbers"] = torch.tensor(
        [state["data"].drawn, state["counters"]["seen"], scheduler["last_epoch"]]
    )
    found["lr"] = torch.tensor(scheduler["_last_lr"], dtype=torch.float64)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    return {k: v.detach().clone().contiguous() for k, v in whole.items()}


class Log:
    """JSON lines of what this rank saw."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("plain", "ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--on-world-change", default="error")
    parser.add_argument("--final-timeout", type=float, default=60.0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    rank = int(os.environ["RANK"])
    log = Log(options.out / f"events-{rank}.jsonl")
    torch.set_num_threads(1)
    if options.kind != "plain":
        dist.init_process_group("gloo")
    state = build(options.kind, rank)
    if options.kind == "ddp":  # DDP lays its buckets out anew after the first backward
        state["model"](torch.zeros(BATCH, dtype=torch.int64)).sum().backward()
        state["optimizer"].zero_grad()
        state = build_again(state, rank)
    torch.manual_seed(50 + rank)
    log.write("started", pid=os.getpid())
    with backstay.Checkpointer(
        state, on_world_change=options.on_world_change, exit_timeout_seconds=options.final_timeout
    ) as checkpointer:
        start = checkpointer.restore()
        log.write(
            "restored", step=start.step, attempt=start.attempt, fresh=start.fresh,
            sources=start.sources,
        )  # fmt: skip
        for step in range(start.step, options.steps):
            train_one_step(state)
            checkpointer.step(step + 1)
            log.write("step", step=step + 1)
            time.sleep(options.step_seconds)
    save_file(final_tensors(state), options.out / f"final-{rank}.safetensors")
    log.write("finished")
    if dist.is_initialized():
        dist.destroy_process_group()


def build_again(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Undo what the settling pass changed (statistics, rows): keep only the buckets."""
    fresh = build("ddp", rank)
    state["model"].load_state_dict(fresh["model"].state_dict())
    state["ema"].load_state_dict(fresh["ema"].state_dict())
    return state


if __name__ == "__main__":
    sys.exit(main())
