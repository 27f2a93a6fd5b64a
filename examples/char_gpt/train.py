"""Trains the small GPT with DDP and keeps it alive with Backstay. Started by torchrun on each node.

    torchrun --nproc-per-node 2 --standalone -m examples.char_gpt.train

Everything Backstay needs is the `with` block in `main`; the rest is an ordinary training script.
Outside a Backstay environment it trains as well and saves nothing. All that happens depends on the
options alone, so a run that was torn down and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import argparse
import math
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import backstay
from examples.char_gpt.data import ResumableSampler, Text
from examples.char_gpt.losses import ENV_LOSSES, LossLog
from examples.char_gpt.model import GPT, GPTConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run depends on."""

    num_steps: int
    batch_size: int
    """Windows per rank and step."""
    context_length: int
    num_layers: int
    num_heads: int
    width: int
    dropout: float
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    seed: int
    num_threads: int
    """Threads per process inside an operation; one keeps sums in one order."""
    losses: str
    """File to which rank 0 appends JSON lines; empty: standard output only."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that takes part in a step."""

    options: Options
    text: Text
    sampler: ResumableSampler
    gpt: GPT
    model: DistributedDataParallel
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.LambdaLR


def seed_everything(seed: int) -> None:
    """Start every generator that Backstay keeps, so that two runs have the same ones throughout."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def build(options: Options, rank: int, world_size: int) -> Training:
    """Model, optimizer, schedule and data of one rank, as they are at step 0."""
    seed_everything(options.seed)
    text = Text.python_manual(options.context_length)
    gpt = GPT(
        GPTConfig(
            vocabulary_size=len(text.alphabet),
            context_length=options.context_length,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            width=options.width,
            dropout=options.dropout,
        )
    )
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(parameter_groups(gpt, options), lr=options.learning_rate)
    return Training(
        options=options,
        text=text,
        sampler=ResumableSampler(
            len(text), options.batch_size, rank=rank, world_size=world_size, seed=options.seed
        ),
        gpt=gpt,
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, options)
        ),
    )


def parameter_groups(gpt: GPT, options: Options) -> list[dict[str, Any]]:
    """Matrices decay towards zero; biases and norms do not."""
    parameters = list(gpt.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def learning_rate_factor(step: int, options: Options) -> float:
    """Rises linearly over the warm-up, then falls along a cosine to a tenth."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.num_steps - options.warmup_steps)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))


def settle_gradient_buckets(training: Training) -> None:
    """Let DDP choose its final gradient buckets before the first real step.

    DDP lays its buckets out anew after its first backward pass, and with three ranks or more the
    layout decides in which order the gradients of an element are added up. Without this pass the
    first step after a restart would be rounded unlike the same step of a run that went through.
    """
    inputs = torch.zeros(1, training.options.context_length, dtype=torch.int64)
    training.model(inputs).sum().backward()
    training.optimizer.zero_grad()


def train_one_step(training: Training) -> float:
    """One optimizer step. Returns the mean loss of all ranks."""
    inputs, targets = training.text.batch(training.sampler.next())
    logits = training.model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.options.clip_norm)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def write_sample(training: Training, losses: LossLog) -> None:
    """What the trained model writes when it is given the beginning of a sentence."""
    start = "The "
    generator = torch.Generator().manual_seed(training.options.seed)
    numbers = training.gpt.continue_text(training.text.encode(start), 240, generator)
    losses.write(event="sample", text=training.text.decode(numbers))


def main(arguments: list[str] | None = None) -> None:
    """Train to the last step, from wherever the run stands."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.num_threads)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = LossLog(options.losses, rank)
    losses.write(event="started", num_steps=options.num_steps, world_size=world_size)

    training = build(options, rank, world_size)
    settle_gradient_buckets(training)
    seed_everything(options.seed + 1 + rank)  # each rank drops other activations
    state = {
        "model": training.model,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "data": training.sampler,
    }
    with backstay.Checkpointer(state) as checkpointer:
        start = checkpointer.restore()
        losses.write(
            every_rank=True, event="restored", rank=rank, step=start.step, sources=start.sources
        )
        for step in range(start.step, options.num_steps):
            loss = train_one_step(training)
            losses.write(step=step + 1, loss=loss, lr=training.scheduler.get_last_lr()[0])
            checkpointer.step(step + 1)

    if rank == 0:
        write_sample(training, losses)
    losses.write(event="finished", step=options.num_steps, parameters=training.gpt.num_parameters())
    losses.close()
    dist.destroy_process_group()


def parse_arguments(arguments: list[str] | None) -> Options:
    """The command line. The defaults are those of the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    add = parser.add_argument
    add("--num-steps", type=int, default=360, help="optimizer steps in all")
    add("--batch-size", type=int, default=4, help="windows of text per rank and step")
    add("--context-length", type=int, default=64, help="characters that the model sees at once")
    add("--num-layers", type=int, default=6, help="transformer layers")
    add("--num-heads", type=int, default=6, help="attention heads per layer")
    add("--width", type=int, default=192, help="size of the residual stream")
    add("--dropout", type=float, default=0.1, help="share of activations dropped in training")
    add("--learning-rate", type=float, default=1e-3, help="highest learning rate")
    add("--warmup-steps", type=int, default=40, help="steps until the highest learning rate")
    add("--weight-decay", type=float, default=0.1, help="AdamW's decay of matrices")
    add("--clip-norm", type=float, default=1.0, help="longest gradient")
    add("--seed", type=int, default=1337, help="of weights, dropout and data order")
    add("--num-threads", type=int, default=1, help="threads per process inside an operation")
    add("--losses", default=os.environ.get(ENV_LOSSES, ""), help="file for JSON lines of losses")
    return Options(**vars(parser.parse_args(arguments)))


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, the docstring left as it is."""


if __name__ == "__main__":
    main()
