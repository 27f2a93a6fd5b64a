"""The thread that obeys when the main thread can't: leave on the leader's word or with the parent.

Started by the Checkpointer at restore(), stopped when it closes. Every 50 ms it looks at the
control block and at the parent. It never talks to the network, takes no lock and installs no signal
handler (a rank stuck in C++ would then hold up every restart).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Protocol

from backstay_protocol.control import Word
from backstay_protocol.names import EXIT_LEAVE, EXIT_ORPHAN

PERIOD_SECONDS = 0.05
_LOOKS_PER_SIGNAL_CHECK = 20


class Words(Protocol):
    """The control block, as far as this thread needs it."""

    def __getitem__(self, word: Word) -> int: ...

    def __setitem__(self, word: Word, value: int) -> None: ...


def must_leave(words: Words) -> bool:
    """The leader's word counts only for the attempt that this rank is in."""
    leave = words[Word.LEAVE_ATTEMPT]
    return leave != 0 and leave == words[Word.ATTEMPT]


class ControlThread:
    """One daemon thread; `os._exit` is its only act."""

    def __init__(
        self, words: Words, *, exit_with_parent: bool, warn: Callable[[str], None]
    ) -> None:
        """`exit_with_parent`: leave when the process that started this one is gone."""
        self._words = words
        self._parent = os.getppid() if exit_with_parent else 0
        self._warn = warn
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backstay-control", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the control block may be unmapped afterwards."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(PERIOD_SECONDS):
            self._look()
            if not self._warned and looks % _LOOKS_PER_SIGNAL_CHECK == 0:
                self._check_handler()
            looks += 1

    def _look(self) -> None:
        if must_leave(self._words):
            self._words[Word.LEAVE_SEEN] = self._words[Word.LEAVE_ATTEMPT]
            _leave(EXIT_LEAVE, "the leader told this rank to leave; the job restores")
        if self._parent and os.getppid() != self._parent:
            _leave(EXIT_ORPHAN, "the launcher of this rank is gone")

    def _check_handler(self) -> None:
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN, None):
            return
        self._warned = True
        self._warn(
            "the script has a SIGTERM handler. Python runs it only between two bytecodes of the "
            "main thread: a rank that hangs in a collective will not leave before it is killed, "
            "which slows down every restart. Backstay does not need it: drains save by themselves"
        )


def _leave(code: int, why: str) -> None:
    # No clean-up: the main thread may hang in a collective and would block it.
    # Nor may a full pipe behind stderr: less than PIPE_BUF never blocks on one that has room.
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"backstay: {why} (exit code {code})\n".encode())
    os._exit(code)
