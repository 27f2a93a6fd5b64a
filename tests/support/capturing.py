"""One rank's capture engine on a folder, and what stock safetensors reads from its slots."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load

from backstay.capture import Bounds, CaptureEngine
from backstay.shardfile import ShardIndex, read_header
from backstay_protocol import slots
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import CaptureNotice

ATTEMPT = 1_000_001
QUICK = Bounds(word_seconds=0.05, slot_seconds=0.1, reserve_seconds=30.0)
PATIENCE_SECONDS = 30.0


class Rank:
    """An engine with its control block. Plays the sidecar's part by `confirm`."""

    def __init__(
        self,
        folder: str,
        entries: Mapping[str, Any],
        *,
        rank: int = 0,
        bounds: Bounds = QUICK,
        **options: Any,
    ) -> None:
        self.memory = MemoryLayout(folder)
        self.rank = rank
        os.makedirs(self.memory.rank_folder(rank), exist_ok=True)
        self.control = ControlBlock(self.memory.control(rank), create=True, rank=rank)
        self.notices: list[CaptureNotice] = []
        self.engine = CaptureEngine(
            entries,
            memory=self.memory,
            run="team/run",
            rank=rank,
            control=self.control,
            notify=self.notices.append,
            bounds=bounds,
            **options,
        )

    def confirm(self, step: int) -> None:
        """The sidecar's word that all ranks have published this step."""
        self.control[Word.SIDECAR_TIME] = 1
        self.control[Word.COMPLETE_STEP] = step

    def close(self) -> None:
        self.engine.close()
        self.control.close()

    def steps(self) -> list[int]:
        """Published in the slots."""
        found = (slots.peek(self.memory, self.rank, i) for _, i in slots.list_slots(self.memory))
        return sorted(manifest.step for manifest in found if manifest)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """A published shard, read by stock safetensors."""
        return load(shard_bytes(self.memory, self.rank, step)[1])


@contextmanager
def attached(folder: Any, entries: Mapping[str, Any], **options: Any) -> Iterator[Rank]:
    """A rank that is let go of at the end."""
    rank = Rank(str(folder), entries, **options)
    try:
        yield rank
    finally:
        rank.close()


def shard_bytes(memory: MemoryLayout, rank: int, step: int) -> tuple[Manifest, bytes]:
    """Manifest and file of a step, by the sidecar's protocol."""
    for owner, slot in slots.list_slots(memory):
        if owner != rank:
            continue
        with (
            slots.reading(memory, rank, slot) as manifest,
            open(memory.slot(rank, slot), "rb") as f,
        ):
            if manifest is not None and manifest.step == step:
                return manifest, f.read(manifest.size)
    raise AssertionError(f"step {step} of rank {rank} is in no slot")


def index_of(data: bytes) -> ShardIndex:
    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = data[offset : offset + len(buffer)]

    return read_header(read, len(data))


class FillOptimizer(torch.optim.Optimizer):
    """Every value that it trains tells the step: parameters `step`, moments `-step`."""

    def __init__(self, parameters: Any, step: int = 0) -> None:
        super().__init__(parameters, {})
        self.at = step
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = torch.zeros_like(parameter)
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.at)
                self.state[parameter]["moment"].fill_(-self.at)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.at += 1
        self._fill()


def wrong_values(tensors: Mapping[str, torch.Tensor], step: int) -> list[str]:
    """Tensors of a FillOptimizer's state that do not tell this step throughout."""
    wrong = []
    for name, tensor in tensors.items():
        if name.startswith("__backstay__") or name.startswith("rng"):
            continue
        expected = -step if name.endswith("moment") else step
        if not bool((tensor == expected).all()):
            wrong.append(name)
    return wrong
