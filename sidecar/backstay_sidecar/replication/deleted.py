"""What people deleted, as this sidecar heard it: it outlives the leader, who asks for it again.

Used by the agent. A list of names in a small file, on the disk where there is one; the leader's
word adds to it, and what people pin or persist again leaves it. It decides nothing: only the
leader's word deletes.
"""

from __future__ import annotations

import json
import os
import threading

from backstay_protocol.files import make_folder, read_small, write_atomically
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ProgressReply

REMEMBERED = 256
"""Oldest wishes are forgotten beyond that."""


class Deleted:
    """One per sidecar. `recall` and `save` block; the rest is for the event loop."""

    def __init__(self, path: str) -> None:
        """Reads nothing yet."""
        self._path = path
        self._writing = threading.Lock()
        self.checkpoints: tuple[CheckpointId, ...] = ()
        """Oldest wish first."""

    def recall(self) -> tuple[CheckpointId, ...]:
        """What an earlier process wrote down. Raises OSError; nonsense is nothing."""
        try:
            names = json.loads(read_small(self._path))
            return tuple(CheckpointId.parse(name) for name in names)
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return ()

    def add(self, checkpoints: tuple[CheckpointId, ...]) -> bool:
        """Remember these, too; whether any was new."""
        known = dict.fromkeys((*self.checkpoints, *checkpoints))
        return self._become(tuple(known))

    def heed(self, word: ProgressReply) -> bool:
        """Follow a word of the leader that counts; whether anything changed."""
        wanted = set(word.pinned).union(*word.persist.values())
        known = dict.fromkeys((*self.checkpoints, *word.unwanted))
        return self._become(tuple(c for c in known if c not in wanted))

    def save(self) -> None:
        """Write it down. Raises OSError."""
        with self._writing:
            make_folder(os.path.dirname(self._path))
            names = [str(checkpoint) for checkpoint in self.checkpoints]
            write_atomically(self._path, json.dumps(names).encode())

    def _become(self, checkpoints: tuple[CheckpointId, ...]) -> bool:
        before, self.checkpoints = self.checkpoints, checkpoints[-REMEMBERED:]
        return self.checkpoints != before
