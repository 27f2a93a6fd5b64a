"""One save on its way: what the caller gets, what the copy thread has to do, and that thread.

Called by capture. The thread outlives every trouble of a save. Another one tells the sidecar, which
may hang: no save waits for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from backstay.copying import Copy, Transfer
from backstay.shardfile import Frame
from backstay.slotmap import Mapping
from backstay.structure import NamedTensor
from backstay_protocol.manifest import Manifest


class Skip(Exception):
    """A save is given up; the text says why, in a sentence."""


@dataclass(eq=False)
class SaveResult:
    """One save. `done` is set when it was published or given up."""

    step: int
    attempt: int
    done: threading.Event = field(default_factory=threading.Event)
    published: bool = False
    why: str = ""
    """If it was not published: a sentence."""
    slot: int = -1
    stall_seconds: float = 0.0
    """For how long training was held up, so far."""
    settle: Callable[[float | None], object] | None = None
    """Brings the save to its end; called in the training thread, for which it may be waiting."""

    def result(self, timeout: float | None = None) -> bool:
        """Wait, and say whether it was published. To be called in the training thread.

        `timeout`: in seconds; None: no bound. The save goes on where that is too short.
        """
        if self.settle is None:
            self.done.wait(timeout)
        elif not self.done.is_set():
            self.settle(timeout)
        return self.published


class Watched:
    """Late tensors and their version counters, which move with every in-place change.

    A DTensor's own counter moves when operations go through it, its local tensor's when they
    don't.
    """

    def __init__(self, tensors: Iterable[NamedTensor]) -> None:
        """Only tensors that have a counter (see `has_version`)."""
        self._counted: list[torch.Tensor] = []
        self._names: list[str] = []
        for tensor in tensors:
            for counted in (tensor.source, tensor.local) if tensor.is_dtensor else (tensor.source,):
                self._counted.append(counted)
                self._names.append(tensor.name)

    def versions(self) -> list[int]:
        """About 1 ms for 10,000."""
        return [tensor._version for tensor in self._counted]

    def moved_since(self, versions: list[int]) -> list[str]:
        """Names of the tensors that were changed."""
        now = self.versions()
        if now == versions:
            return []
        pairs = zip(self._names, now, versions, strict=True)
        return list(dict.fromkeys(name for name, new, old in pairs if new != old))


def has_version(tensor: NamedTensor) -> bool:
    """An inference tensor has none."""
    return not (tensor.source.is_inference() or tensor.local.is_inference())


@dataclass(eq=False)
class Job:
    """What the copy thread does for one save."""

    result: SaveResult
    transfer: Transfer
    mapping: Mapping
    frame: Frame
    blob: bytes
    manifest: Callable[[], Manifest]
    watched: Watched
    versions: list[int]
    """Of the late tensors, at the save."""
    training_judges: bool
    """Only the training thread may compare the versions: it is in no kernel then, whose effect on
    a counter would still be to come."""
    sources: list[Copy]
    """Kept until all is copied: tensors that nothing else may hold by then."""
    moved: list[str] = field(default_factory=list)
    abandoned: bool = False
    judged: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self) -> None:
        """Compare the versions, once: when all is copied, before an optimizer moves them."""
        with self._lock:
            if not self.judged.is_set():
                self.moved = self.watched.moved_since(self.versions)
                self.judged.set()

    def write_around(self) -> None:
        """Header, objects and fillers: everything that is not a tensor."""
        self.mapping.write(0, self.frame.header)
        self.mapping.write(self.frame.blob_start, self.blob)
        for start, length in self.frame.fillers:
            self.mapping.write(start, bytes(length))


class CopyThread:
    """One daemon thread, started with the first task."""

    def __init__(self) -> None:
        """No thread yet."""
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> None:
        """Do it after the tasks before it. A task must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="backstay-copy", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def stop(self, timeout: float) -> None:
        """Finish what is queued, bounded."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class NewestThread:
    """One daemon thread for tasks of which only the newest matters, started with the first."""

    def __init__(self, name: str) -> None:
        """No thread yet."""
        self._name = name
        self._pending: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> None:
        """Do it in place of one that waits still; never blocks. A task must not raise."""
        with self._changed:
            if self._stopping:
                return
            self._pending = task
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def stop(self, timeout: float) -> None:
        """Finish what is pending, bounded; beyond the bound the thread ends with its task."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(timeout)
        with self._changed:
            self._pending = None

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # what it holds may go while this waits

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._pending is None and not self._stopping:
                self._changed.wait()
            task, self._pending = self._pending, None
            return task
