"""A few threads that do one transfer together: the first failure, cancel or deadline ends all.

Used by the pull client and by the sidecar's uploads. It knows nothing of HTTP: what blocks in a
thread is registered and is interrupted when the crew stops, so nobody waits for a time-out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.errors import Cancelled, Unreachable

_TICK = 0.1  # how often a crew looks whether it was cancelled


class Interruptible(Protocol):
    """A connection that may block a thread."""

    def interrupt(self) -> None:
        """Make what blocks in another thread fail now."""
        ...


I = TypeVar("I", bound=Interruptible)  # noqa: E741


class Crew:
    """One transfer's threads. Use it once."""

    def __init__(self, name: str) -> None:
        """`name`: what is transferred, for errors."""
        self.stopped = threading.Event()
        """Set when the workers shall end."""
        self._name = name
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._blocking: list[Interruptible] = []
        self._running = 0

    def run(
        self,
        work: Callable[[], None],
        threads: int,
        *,
        cancel: threading.Event | None = None,
        deadline: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Run `work` in so many threads until all have returned.

        Raises what the first of them raised, Cancelled, or Unreachable after `deadline` seconds.
        """
        self._running = threads
        workers = [
            threading.Thread(target=self._work, args=(work,), name="backstay-crew", daemon=True)
            for _ in range(threads)
        ]
        begun = clock.monotonic()
        for worker in workers:
            worker.start()
        try:
            while not self._done.wait(_TICK):
                if self.stopped.is_set():  # one may have connected anew just before
                    self._interrupt()
                if cancel is not None and cancel.is_set():
                    self.fail(Cancelled(f"{self._name}: told to stop"))
                if deadline is not None and clock.monotonic() - begun > deadline:
                    self.fail(Unreachable(f"{self._name}: not finished in {deadline:g} s"))
        except BaseException as error:  # the caller's thread was interrupted: leave no thread
            self.fail(error)
            raise
        finally:
            for worker in workers:
                worker.join()
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Stop everybody; the first error is the one that `run` raises."""
        with self._lock:
            if self._error is None:
                self._error = error
            self.stopped.set()
        self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            for blocking in self._blocking:
                blocking.interrupt()

    @contextlib.contextmanager
    def interruptible(self, blocking: I) -> Iterator[I]:
        """While inside, `blocking` is interrupted when the crew stops."""
        with self._lock:
            self._blocking.append(blocking)
        try:
            yield blocking
        finally:
            with self._lock:
                self._blocking.remove(blocking)

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.fail(error)
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._done.set()
