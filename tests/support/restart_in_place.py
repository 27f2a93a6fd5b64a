"""Started by torchrun: the example trained straight on, and again from tensors of the middle.

The second half runs with objects made anew, as after a restart. Each rank prints how many tensors
differ at the end. First argument: whether the example settles DDP's gradient buckets first.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.char_gpt import train

NUM_STEPS = 8
SMALL = ("--num-layers", "3", "--num-heads", "2", "--width", "64", "--batch-size", "2")


def make(settle: bool) -> train.Training:
    options = train.parse_arguments([*SMALL, "--num-steps", str(NUM_STEPS), "--warmup-steps", "2"])
    training = train.build(options, dist.get_rank(), dist.get_world_size())
    if settle:
        train.settle_gradient_buckets(training)
    return training


def state_of(training: train.Training) -> dict[str, Any]:
    parts = ("gpt", "optimizer", "scheduler", "sampler")
    state = {part: getattr(training, part).state_dict() for part in parts}
    return copy.deepcopy(state | {"rng": torch.get_rng_state()})


def load(training: train.Training, state: dict[str, Any]) -> None:
    for part in ("gpt", "optimizer", "scheduler", "sampler"):
        getattr(training, part).load_state_dict(copy.deepcopy(state[part]))
    torch.set_rng_state(state["rng"])


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for item in inner for tensor in tensors(item)]


def main() -> None:
    settle = sys.argv[1] == "settled"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    straight = make(settle)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            middle = state_of(straight)
        train.train_one_step(straight)
    end = tensors(state_of(straight))
    resumed = make(settle)
    load(resumed, middle)
    for _ in range(NUM_STEPS // 2, NUM_STEPS):
        train.train_one_step(resumed)
    again = tensors(state_of(resumed))
    different = sum(not torch.equal(a, b) for a, b in zip(end, again, strict=True))
    os.write(1, f"rank {dist.get_rank()}: {different} of {len(end)} differ\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
