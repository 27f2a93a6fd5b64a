"""Which tensors may be copied late: those that only a watched optimizer's step can change.

An optimizer is watched when its pre-hook was seen to fire since the last save. It does not fire for
classes that are not Optimizers, and not for steps replayed by a CUDA graph. Parameters of a module
in which nobody trains anything (an EMA copy, a teacher) are early: no hook tells when they change,
and many such updates go through `.data`, which no version counter notices.

Called by capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch
from torch.optim import Optimizer

from backstay.savejob import has_version
from backstay.structure import Kind, NamedTensor


class Trust:
    """What was seen of each optimizer, and which tensors have moved when they should not have."""

    def __init__(self) -> None:
        """Nobody is trusted before it was seen."""
        self._fires: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._fires_at_save: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._graphed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._moved: set[str] = set()

    def fired(self, optimizer: Optimizer, *, graphed: bool) -> int:
        """Its pre-hook ran; `graphed`: while a CUDA graph was recorded. Returns how often now."""
        fires = self._fires[optimizer] = self._fires.get(optimizer, 0) + 1
        if graphed:
            self._graphed.add(optimizer)
        return fires

    def watched(self) -> frozenset[int]:
        """At a save: ids of the optimizers whose steps this save may count on to be announced."""
        watched = {
            id(optimizer)
            for optimizer, fires in self._fires.items()
            if fires > self._fires_at_save.get(optimizer, 0) and optimizer not in self._graphed
        }
        for optimizer, fires in self._fires.items():
            self._fires_at_save[optimizer] = fires
        return frozenset(watched)

    def lose(self, names: Iterable[str]) -> None:
        """These tensors changed without an optimizer's step: early from now on."""
        self._moved.update(names)

    @property
    def num_lost(self) -> int:
        """Grows when the answer of `is_late` may have changed."""
        return len(self._moved)

    def is_late(
        self, tensor: NamedTensor, watched: Collection[int], *, parameters_on_cuda: bool
    ) -> bool:
        """Whether a tensor may be copied while the next forward and backward run."""
        if tensor.kind not in (Kind.PARAMETER, Kind.OPTIMIZER) or not tensor.optimizers:
            return False
        if not all(id(optimizer) in watched for optimizer in tensor.optimizers):
            return False
        if tensor.name in self._moved or not has_version(tensor):
            return False
        if parameters_on_cuda:  # host memory: few bytes, for which a device could not wait
            return tensor.local.device.type == "cuda"
        return tensor.local.device.type == "cpu"


def graph_is_recorded() -> bool:
    """Whether the current stream is being recorded into a CUDA graph."""
    return bool(
        torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and torch.cuda.is_current_stream_capturing()
    )
