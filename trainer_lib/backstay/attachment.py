"""One rank's hold on the memory volume: control block, control thread, client of the sidecar.

Made by the Checkpointer at restore(), closed by it. It reads what an earlier process of the rank
left in the control block before it takes the trainer's words for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from backstay.client import SidecarClient
from backstay.control_thread import ControlThread
from backstay.errors import MisuseError
from backstay.settings import Settings
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.control import ControlBlock, State, Word
from backstay_protocol.files import make_folder
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.names import ENV_VOLUME

_TRAINERS_WORDS = range(Word.PID, Word.SAVE_AT_STEP)


class Attachment:
    """Use from one thread; the control thread only reads words."""

    def __init__(self, settings: Settings, warn: Callable[[str], None]) -> None:
        """Attach. Raises MisuseError if there is no usable volume."""
        self.memory = MemoryLayout(settings.volume)
        self.client = SidecarClient(self.memory.socket)
        try:
            if not os.path.isdir(settings.volume):
                raise FileNotFoundError("there is no such folder")
            make_folder(self.memory.rank_folder(settings.rank))
            path = self.memory.control(settings.rank)
            self.words = ControlBlock(path, create=True, rank=settings.rank)
        except OSError as error:
            raise MisuseError(
                f"{ENV_VOLUME} is {settings.volume!r}, but it can't be used: {error}. Expected the "
                "memory volume that this pod shares with its sidecar, mounted and writable"
            ) from error
        self.last_attempt = self.words[Word.ATTEMPT]
        self.last_step = self.words[Word.STEP] if self.last_attempt else -1
        for word in _TRAINERS_WORDS:
            self.words[word] = 0  # type: ignore[index]
        self.words[Word.PID] = os.getpid()
        self.words[Word.WORLD_SIZE] = settings.world_size
        self.words[Word.STATE] = State.RESTORING
        self._thread = ControlThread(
            self.words, exit_with_parent=settings.exit_with_parent, warn=warn
        )
        self._thread.start()

    def begin(self, attempt: int, step: int) -> None:
        """The rank trains from here on: orders for this attempt count."""
        self.report(step)
        self.words[Word.ATTEMPT] = attempt
        self.words[Word.STATE] = State.TRAINING

    def report(self, step: int) -> None:
        """A step is done."""
        self.words[Word.STEP_TIME] = int(SYSTEM_CLOCK.time() * 1e9)
        self.words[Word.STEP] = step

    def close(self) -> None:
        """Stop the thread and unmap the page; what it says stays for the sidecar."""
        self._thread.stop()
        self.words.close()
