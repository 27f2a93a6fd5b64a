"""What other ways to save cost the training loop, beside the same limit, in this process.

They write to tmpfs, without fsync: the blocking part of a save, and nothing else.
"""

from __future__ import annotations

import random
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks import limits
from benchmarks.figures import Sample, sample
from benchmarks.state import State


def measure(mib: int, num_tensors: int, rounds: int, folder: Path) -> list[Sample]:
    """Each candidate once a round, in another order each time, with real steps in between."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    state = State(mib, num_tensors)
    state.step()
    copy = limits.Copy(list(state.tensors().values()), folder)
    candidates: dict[str, Callable[[State, Path], Callable[[], object]]] = {
        "torch.save": _torch_save,
        "safetensors": _safetensors,
        "dcp": _dcp_async,
    }
    samples = []
    before = copy()
    for _ in range(rounds):
        for key in random.sample(list(candidates), len(candidates)):
            begun = time.perf_counter()
            finish = candidates[key](state, folder)
            call = time.perf_counter() - begun
            finish()
            state.step()
            after = copy()
            samples.append(sample(key, call, (before + after) / 2))
            before = after
    return samples


def _torch_save(state: State, folder: Path) -> Callable[[], object]:
    path = folder / "torch"
    torch.save(state.tensors(), path)
    return path.unlink


def _safetensors(state: State, folder: Path) -> Callable[[], object]:
    path = folder / "safetensors"
    save_file(state.tensors(), path)
    return path.unlink


def _dcp_async(state: State, folder: Path) -> Callable[[], object]:
    path = folder / "dcp"
    future = async_save(state.tensors(), checkpoint_id=path, no_dist=True)

    def finish() -> None:
        assert isinstance(future, Future)
        future.result()
        shutil.rmtree(path)

    return finish
