"""The control block: one mapped 4 KiB page per rank; trainer and sidecar talk through it.

No locks: 512 aligned 64-bit words, each written by one side only and with one store: a reader
sees an old or a new value, never a mixture. The trainer's words are the lower half, the sidecar's
the upper.
Times are nanoseconds since the epoch. 0 means "nothing" for every word of the sidecar.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

from backstay_protocol.errors import CorruptData, VersionMismatch
from backstay_protocol.files import open_shared
from backstay_protocol.names import (
    CONTROL_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    works_with,
)

MAGIC = 0x5941545359414B42


class Word(IntEnum):
    """Index of each word. The comment says who writes it; the other side reads it."""

    MAGIC = 0  # trainer, once
    MAJOR = 1  # trainer, once
    MINOR = 2  # trainer, once
    RANK = 3  # trainer, once
    # --- written by the trainer ---
    PID = 8
    STATE = 9  # State
    ATTEMPT = 10  # attempt that the rank trains in
    STEP = 11  # last step reported by step()
    STEP_TIME = 12
    PUBLISHED_STEP = 13  # newest step published in a slot by this process
    PUBLISHED_TIME = 14
    REPLAN_WANTED = 15  # 1: the structure changed here, please announce a replan
    STALL_NS = 16  # time the loop was blocked by saves, total
    SAVES = 17  # saves that were published, total
    SKIPPED = 18  # saves that were skipped, total
    WORLD_SIZE = 19
    LEAVE_SEEN = 20  # attempt of the "leave" that is being obeyed
    # --- written by the sidecar ---
    SAVE_AT_STEP = 256  # save at this step
    REPLAN_AT_STEP = 257  # plan anew at this step
    LEAVE_ATTEMPT = 258  # end the process if it trains in this attempt
    COMPLETE_STEP = 259  # newest step that all ranks of the attempt have published
    SAFE_STEP = 260  # newest step complete in local or neighbor (else durable); for one slot
    EVERY_STEPS = 261  # save when step % EVERY_STEPS == 0 (and step >= EVERY_FROM); 0: never
    EVERY_FROM = 262
    DURABLE_STEP = 263
    SIDECAR_TIME = 264  # last time the sidecar wrote anything here
    PREVIOUS_EVERY_STEPS = 265  # in force below EVERY_FROM


class State(IntEnum):
    """What the rank is doing."""

    ATTACHED = 1
    RESTORING = 2
    TRAINING = 3
    FINISHING = 4  # final save taken, waiting for it to become durable
    FINISHED = 5


class ControlBlock:
    """A mapping of one rank's page. Create it in the trainer, open it in the sidecar."""

    def __init__(self, path: str, *, create: bool, rank: int = -1) -> None:
        """Map `path`. `create` makes the page if it is missing and stamps it for `rank`.

        Raises FileNotFoundError, CorruptData (not a control block) or VersionMismatch.
        """
        descriptor = open_shared(path, os.O_RDWR | (os.O_CREAT if create else 0))
        try:
            if create:
                os.posix_fallocate(descriptor, 0, CONTROL_BYTES)
            if os.fstat(descriptor).st_size < CONTROL_BYTES:
                raise CorruptData(f"{path}: shorter than {CONTROL_BYTES} bytes")
            self._map = mmap.mmap(descriptor, CONTROL_BYTES)
        finally:
            os.close(descriptor)
        self.path = path
        self._words = memoryview(self._map).cast("q")
        if create:
            self._stamp(rank)
        else:
            self._check()

    def _stamp(self, rank: int) -> None:
        self._words[Word.MAJOR] = PROTOCOL_MAJOR
        self._words[Word.MINOR] = PROTOCOL_MINOR
        self._words[Word.RANK] = rank
        self._words[Word.MAGIC] = MAGIC

    def _check(self) -> None:
        if self._words[Word.MAGIC] != MAGIC:
            raise CorruptData(f"{self.path}: not a control block")
        version = f"{self._words[Word.MAJOR]}.{self._words[Word.MINOR]}"
        if not works_with(version):
            raise VersionMismatch(f"{self.path}: protocol {version}, here {PROTOCOL_VERSION}")

    def __getitem__(self, word: Word) -> int:
        return self._words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._words.release()
        self._map.close()
