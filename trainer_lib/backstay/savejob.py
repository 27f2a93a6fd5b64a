"""One save on its way: what the caller gets, what the copy thread has to do, and that thread.

Called by capture. The thread outlives every trouble of a save.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from backstay.copying import Transfer
from backstay.shardfile import Frame
from backstay.slotmap import Mapping
from backstay.structure import NamedTensor
from backstay_protocol.manifest import Manifest

Versions = tuple[int, ...]


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

    def result(self, timeout: float | None = None) -> bool:
        """Wait, bounded, and say whether it was published."""
        self.done.wait(timeout)
        return self.published


@dataclass(eq=False)
class Job:
    """What the copy thread does for one save."""

    result: SaveResult
    transfer: Transfer
    mapping: Mapping
    frame: Frame
    blob: bytes
    manifest: Callable[[], Manifest]
    watched: list[tuple[NamedTensor, Versions]]
    """Late tensors and the versions that they had at the save."""
    training_judges: bool
    """Only the training thread may compare the versions: it is in no kernel then, whose effect on
    a counter would still be to come."""
    moved: list[str] = field(default_factory=list)
    abandoned: bool = False
    judged: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self) -> None:
        """Compare the versions, once: when all is copied, before an optimizer moves them."""
        with self._lock:
            if not self.judged.is_set():
                self.moved = [t.name for t, seen in self.watched if versions_of(t) != seen]
                self.judged.set()

    def write_around(self) -> None:
        """Header, objects and fillers: everything that is not a tensor."""
        self.mapping.write(0, self.frame.header)
        self.mapping.write(self.frame.blob_start, self.blob)
        for start, length in self.frame.fillers:
            self.mapping.write(start, bytes(length))


def versions_of(tensor: NamedTensor) -> Versions | None:
    """Counters that move with every in-place change; None where there are none.

    A DTensor's own counter moves when operations go through it, its local tensor's when they
    don't.
    """
    try:
        if tensor.is_dtensor:
            return tensor.source._version, tensor.local._version
        return (tensor.source._version,)
    except RuntimeError:  # an inference tensor
        return None


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
