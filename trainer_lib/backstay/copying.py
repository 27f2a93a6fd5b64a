"""Moving tensors into a slot: at once for the early set, in the copy thread for the late set.

On the CPU an early copy is done when `start` returns. On CUDA every copy runs on a side stream that
waits for the training stream; for early ones the training stream then waits in turn, never the
host. Sources stay referenced until `finish` has returned, so no record_stream is needed (CAPTURE.md
section 4). Devices of other kinds are copied at once, blocking.

Called by capture. It must not know what the tensors are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

GROUP_BYTES = 64 << 20
GROUP_TENSORS = 512


@dataclass(frozen=True, eq=False)
class Copy:
    """One tensor on its way into a slot."""

    destination: torch.Tensor
    source: torch.Tensor


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

    def __init__(self, streams: Streams, early: list[Copy], late: list[Copy]) -> None:
        """Nothing is copied before `start`."""
        self._streams = streams
        self._early = _by_device(early)
        self._late = _by_device(late)
        self._devices = tuple(d for d in {**self._early, **self._late} if d.type == "cuda")
        self._done: list[tuple[torch.device, torch.cuda.Event]] = []
        self._launched = threading.Event()

    @torch.no_grad()
    def start(self) -> None:
        """In the training thread: copy the early set, mark the moment for the late one."""
        for device in self._devices:
            side, training = self._streams.of(device), torch.cuda.current_stream(device)
            side.wait_event(training.record_event())
            early = self._early.get(device)
            if early:
                with torch.cuda.stream(side):
                    _copy(early, non_blocking=True)
                copied = side.record_event()
                training.wait_event(copied)
                self._done.append((device, copied))
        for device, copies in self._early.items():
            if device.type != "cuda":
                _copy(copies)

    @torch.no_grad()
    def run_late(self, after_first_group: Callable[[], None]) -> None:
        """In the copy thread: copy the late set (CPU), or launch its copies (CUDA)."""
        try:
            first = True
            for device, copies in self._late.items():
                for group in _groups(copies):
                    self._copy_late(device, group)
                    if first:
                        after_first_group()
                        first = False
                if device.type == "cuda":
                    self._done.append((device, self._streams.of(device).record_event()))
        finally:
            self._launched.set()

    def _copy_late(self, device: torch.device, group: list[Copy]) -> None:
        if device.type == "cuda":
            with torch.cuda.stream(self._streams.of(device)):  # a new thread is on device 0
                _copy(group, non_blocking=True)
        else:
            _copy(group)

    def hold_back_training(self, timeout: float) -> bool:
        """In the training thread, before late tensors change. False: it took too long.

        The host waits until the copies are made (CPU) or launched (CUDA), the device for the rest.
        """
        if not self._launched.wait(timeout):
            return False
        for device, event in self._done:
            torch.cuda.current_stream(device).wait_event(event)
        return True

    @property
    def launched(self) -> bool:
        """Whether the training thread has nothing to wait for."""
        return self._launched.is_set()

    def finish(self) -> None:
        """In the copy thread: return when every byte is in the slot. Lets go of the sources."""
        for _, event in self._done:
            event.synchronize()
        self._early, self._late = {}, {}


def _by_device(copies: Iterable[Copy]) -> dict[torch.device, list[Copy]]:
    found: dict[torch.device, list[Copy]] = {}
    for copy in copies:
        found.setdefault(copy.source.device, []).append(copy)
    return found


def _groups(copies: list[Copy]) -> Iterator[list[Copy]]:
    """One call for many tensors, but not for all: the GIL and a fault point come in between."""
    group: list[Copy] = []
    size = 0
    for copy in copies:
        group.append(copy)
        size += copy.source.nbytes
        if size >= GROUP_BYTES or len(group) >= GROUP_TENSORS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _copy(copies: list[Copy], *, non_blocking: bool = False) -> None:
    torch._foreach_copy_(
        [copy.destination for copy in copies],
        [copy.source for copy in copies],
        non_blocking=non_blocking,
    )
