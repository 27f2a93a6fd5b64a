"""Moving tensors into a slot: at once for the early set, in the copy thread for the late set.

On the CPU an early copy is done when `start` returns. On CUDA every copy runs on a side stream that
waits for the training stream; for early ones the training stream then waits in turn, never the
host. The caller keeps the sources until `finish` has returned, so no record_stream is needed.
Devices of other kinds are copied at once, blocking.

Called by capture. It must not know what the tensors are.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch

GROUP_BYTES = 64 << 20
GROUP_TENSORS = 512
AT_ONCE_THREADS = 2
"""That copy in host memory what training waits for: one core does not use up its bandwidth."""


@dataclass(frozen=True, eq=False)
class Copy:
    """One tensor on its way into a slot."""

    destination: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """All copies from one device, in groups for one call each. Made once, used at each save."""

    device: torch.device
    groups: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...]
    """(destinations, sources)."""


def batches(copies: Iterable[Copy]) -> tuple[Batch, ...]:
    """Sort copies by device."""
    found: dict[torch.device, list[Copy]] = {}
    for copy in copies:
        found.setdefault(copy.source.device, []).append(copy)
    return tuple(Batch(device, tuple(_groups(some))) for device, some in found.items())


class Streams:
    """One side stream for each CUDA device; made when first used."""

    def __init__(self) -> None:
        """No device touched yet."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class Transfer:
    """The copies of one save."""

    def __init__(self, streams: Streams, early: Sequence[Batch], late: Sequence[Batch]) -> None:
        """Nothing is copied before `start`."""
        self._streams = streams
        self._early, self._late = early, late
        self._done: list[tuple[torch.device, torch.cuda.Event]] = []
        self._launched = threading.Event()

    @torch.no_grad()
    def start(self) -> None:
        """In the training thread: copy the early set, mark the moment for the late one."""
        batches = (*self._early, *self._late)
        for device in {batch.device for batch in batches if batch.device.type == "cuda"}:
            side, training = self._streams.of(device), torch.cuda.current_stream(device)
            side.wait_event(training.record_event())
        for batch in self._early:
            if batch.device.type == "cpu":
                _copy_at_once(batch)
                continue
            self._copy(batch)
            if batch.device.type == "cuda":
                copied = self._streams.of(batch.device).record_event()
                torch.cuda.current_stream(batch.device).wait_event(copied)
                self._done.append((batch.device, copied))

    @torch.no_grad()
    def run_late(self, after_first_group: Callable[[], None]) -> None:
        """In the copy thread: copy the late set (CPU), or launch its copies (CUDA)."""
        try:
            for batch in self._late:
                self._copy(batch, after_first_group)
                if batch.device.type == "cuda":
                    self._done.append((batch.device, self._streams.of(batch.device).record_event()))
        finally:
            self._launched.set()

    def _copy(self, batch: Batch, after_first_group: Callable[[], None] | None = None) -> None:
        """The GIL is free during each call, and has a chance in between."""
        on_cuda = batch.device.type == "cuda"
        # a new thread is on device 0 until it enters a stream
        with torch.cuda.stream(self._streams.of(batch.device)) if on_cuda else nullcontext():
            for number, (destinations, sources) in enumerate(batch.groups):
                torch._foreach_copy_(destinations, sources, non_blocking=on_cuda)
                if number == 0 and after_first_group is not None:
                    after_first_group()

    def hold_back_training(self, timeout: float | None) -> bool:
        """In the training thread, before late tensors change. False: it took too long.

        The host waits until the copies are made (CPU) or launched (CUDA), the device for the rest.
        """
        if not self._launched.wait(timeout):
            return False
        for device, event in self._done:
            torch.cuda.current_stream(device).wait_event(event)
        return True

    def finish(self) -> None:
        """In the copy thread: return when every byte is in the slot."""
        for _, event in self._done:
            event.synchronize()


def _copy_at_once(batch: Batch) -> None:
    """In host memory, while training waits: its thread copies, and another one beside it."""
    left = deque(batch.groups)

    @torch.no_grad()
    def work() -> None:
        while True:
            try:
                destinations, sources = left.popleft()
            except IndexError:
                return
            torch._foreach_copy_(destinations, sources)

    if len(left) == 1 or _spare_threads() == 0:
        work()
        return
    with ThreadPoolExecutor(_spare_threads(), "backstay-copy-early") as helpers:
        others = [helpers.submit(work) for _ in range(_spare_threads())]
        work()
    for other in others:
        other.result()


def _spare_threads() -> int:
    """Beside the training thread; none where torch's own threads share each copy anyway."""
    if torch.get_num_threads() > 1:
        return 0
    return min(AT_ONCE_THREADS, len(os.sched_getaffinity(0))) - 1


def _groups(copies: list[Copy]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    destinations: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    size = 0
    for copy in copies:
        destinations.append(copy.destination)
        sources.append(copy.source)
        size += copy.source.nbytes
        if size >= GROUP_BYTES or len(sources) >= GROUP_TENSORS:
            yield destinations, sources
            destinations, sources, size = [], [], 0
    if sources:
        yield destinations, sources
