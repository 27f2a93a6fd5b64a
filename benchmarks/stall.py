"""What a save costs the training loop, against the memcpy limit and against peers, in one run.

    .venv/bin/python benchmarks/stall.py [--mib 512] [--rounds 7]

One process, one state (fp32 parameters and AdamW's moments). In each round every candidate saves
once, in another order each time, with real steps in between; each row is the median of the round's
ratio to the copy limit of that round (libc's memcpy of the same bytes into a populated tmpfs file,
one thread). Absolute times are noise on a shared machine; ratios within a round are not.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from backstay.capture import CaptureEngine
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.layout import MemoryLayout

warnings.filterwarnings("ignore")
ATTEMPT = 1_000_001
TENSORS = 120


class Work:
    """A state of a given size and a step that changes all of it."""

    def __init__(self, mib: int) -> None:
        count = (mib << 20) // 3 // 4 // TENSORS
        self.model = nn.Module()
        for index in range(TENSORS):
            self.model.register_parameter(f"p{index}", nn.Parameter(torch.randn(count)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.product = torch.randn(384, 384)
        for _ in range(3):
            self.step()

    def compute(self) -> None:
        """Forward and backward, as far as memory is concerned: work that changes no state."""
        for _ in range(60):
            self.product = (self.product @ self.product).clamp_(-1, 1)

    def step(self) -> None:
        self.compute()
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for index, state in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{index}.{k}": v for k, v in state.items()}
        return found


class CopyLimit:
    """libc's memcpy of all tensors into pages that are there already."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.parts = [t for t in work.tensors().values() if t.nbytes]
        size = sum(t.nbytes for t in self.parts)
        with (folder / "limit").open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.map = mmap.mmap(file.fileno(), size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self()

    def __call__(self) -> float:
        begun, at = time.perf_counter(), self.address
        for tensor in self.parts:
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return time.perf_counter() - begun


class Backstay:
    """The capture engine; the sidecar's part of the hand-over is played here."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.work, self.at = work, 0
        memory = MemoryLayout(str(folder))
        os.makedirs(memory.rank_folder(0))
        self.control = ControlBlock(memory.control(0), create=True, rank=0)
        self.control[Word.SIDECAR_TIME] = 1
        entries = {"model": work.model, "optimizer": work.optimizer}
        self.engine = CaptureEngine(entries, memory=memory, run="bench/stall", control=self.control)
        self.engine.check()
        work.step()

    def save(self, overlap: bool) -> tuple[float, float]:
        """(seconds in the call, seconds that the optimizer then had to wait)."""
        self.at += 1
        before = self.control[Word.STALL_NS]
        begun = time.perf_counter()
        result = self.engine.save(self.at, ATTEMPT, overlap=overlap)
        call = time.perf_counter() - begun
        if overlap:
            self.work.compute()
        self.work.step()
        self.engine.wait()
        assert result.published, result.why
        self.control[Word.COMPLETE_STEP] = self.at
        return call, max(0.0, (self.control[Word.STALL_NS] - before) / 1e9 - call)


def measure(work: Work, folder: Path, rounds: int) -> None:
    limit, engine = CopyLimit(work, folder), Backstay(work, folder)
    ratios: dict[str, list[float]] = {}

    def note(name: str, seconds: float, unit: float) -> None:
        ratios.setdefault(name, []).append(seconds / unit)

    def timed(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    def backstay_overlapped(unit: float) -> None:
        call, waited = engine.save(overlap=True)
        note("backstay overlapped: in save()", call, unit)
        note("backstay overlapped: in save() and in the optimizer's hook", call + waited, unit)

    def backstay_at_once(unit: float) -> None:
        note("backstay, overlap=False: in save()", engine.save(overlap=False)[0], unit)

    def torch_save(unit: float) -> None:
        note("torch.save to tmpfs", timed(lambda: torch.save(work.tensors(), folder / "t")), unit)
        work.step()

    def safetensors_save(unit: float) -> None:
        seconds = timed(lambda: save_file(work.tensors(), folder / "s"))
        note("safetensors save_file to tmpfs", seconds, unit)
        work.step()

    def dcp_async(unit: float) -> None:
        path = folder / "dcp"
        begun = time.perf_counter()
        future = dcp.async_save(work.tensors(), checkpoint_id=path, no_dist=True)
        note("dcp.async_save (thread): in the call", time.perf_counter() - begun, unit)
        future.result()
        shutil.rmtree(path)
        work.step()

    candidates = [backstay_overlapped, backstay_at_once, torch_save, safetensors_save, dcp_async]
    cold = limit()
    note("backstay, first save of the process: in save()", engine.save(overlap=False)[0], cold)
    for _ in range(2):
        engine.save(overlap=True)
    for _ in range(rounds):
        unit = min(limit(), limit())
        for candidate in random.sample(candidates, len(candidates)):
            candidate(unit)
    print(f"copy limit of the last round: {unit * 1e3:.0f} ms; ratios to it, median of rounds")
    for name, values in sorted(ratios.items()):
        spread = f"{min(values):.2f}-{max(values):.2f}"
        print(f"  {name:60s} {statistics.median(values):6.2f}   ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="backstay-bench-", dir="/dev/shm"))
    try:
        measure(Work(options.mib), folder, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
