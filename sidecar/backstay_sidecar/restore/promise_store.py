"""attempt.json on the disk and in the memory volume: promise, record, and the mark "in line".

Used by the member only. The greater of the two files is the truth: a reboot wipes the memory
volume, a replaced disk knows nothing. With no disk, or a broken one, the memory volume serves
alone; that is reported, and such a sidecar is never *in line* (rule W10 of test_protocol_rules.py).
What may be promised and stored is decided by `backstay_protocol.promises`; here it is only kept.
"""

from __future__ import annotations

import os

from backstay_protocol.files import make_folder
from backstay_protocol.layout import DiskLayout, MemoryLayout
from backstay_protocol.promises import merge
from backstay_protocol.records import AttemptFile, AttemptState
from backstay_sidecar.restore.ports import Emit


class PromiseStore:
    """Both files of one pod. Methods block (fsync); the member calls them one at a time."""

    def __init__(self, memory: MemoryLayout, disk: DiskLayout | None, emit: Emit) -> None:
        """`disk` is None where the job has no local tier."""
        self._memory = AttemptFile(memory.attempt_file)
        self._disk = AttemptFile(disk.attempt_file) if disk else None
        self._emit = emit
        self._disk_trouble = "" if disk else "no local tier is configured"
        self._state = AttemptState()

    @property
    def state(self) -> AttemptState:
        """What is stored, as of the last `prepare` or `save`."""
        return self._state

    @property
    def disk_trouble(self) -> str:
        """Why the disk does not carry the record; empty: it does."""
        return self._disk_trouble

    @property
    def has_disk(self) -> bool:
        """Whether the disk carries what is stored."""
        return not self._disk_trouble

    def prepare(self) -> None:
        """Reserve and read both files and make them agree.

        Raises OSError if the memory volume can't hold its file; a sick disk is only reported.
        """
        self._memory.prepare()
        self._write(merge(self._prepare_disk(), self._memory.read()))

    def save(self, state: AttemptState) -> None:
        """Store durably in both. Raises OSError only if the memory volume failed."""
        self._write(state)

    def _prepare_disk(self) -> AttemptState | None:
        if self._disk is None:
            return None
        try:
            make_folder(os.path.dirname(self._disk.path))
            self._disk.prepare()
            return self._disk.read()
        except OSError as error:
            self._report(error)
            self._disk = None  # what it knows was never read: it must not be overwritten later
            return None

    def _write(self, state: AttemptState) -> None:
        self._write_disk(state)
        self._memory.write(state)
        self._state = state

    def _write_disk(self, state: AttemptState) -> None:
        if self._disk is None:
            return
        try:
            self._disk.write(state)
        except OSError as error:
            self._report(error)
            return
        if self._disk_trouble:
            self._disk_trouble = ""
            self._emit("promise_disk_back", path=self._disk.path)

    def _report(self, error: OSError) -> None:
        assert self._disk is not None
        if not self._disk_trouble:
            self._emit(
                "promise_disk_failed",
                path=self._disk.path,
                message=f"{self._disk.path} can't be used ({error}); promises and records are kept "
                "in the memory volume alone, and this pod can't start without the remote tier",
            )
        self._disk_trouble = str(error)
