"""Deletes what the leader says may go: local and held shards, and slots that people gave up.

The agent hands it each word of the leader that counts. What may go is decided by the leader; here
a delete only waits its turn, and stops when the word no longer counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ShardCopy
from backstay_sidecar.tiers.base import Tier


class Thinning:
    """One per sidecar; one pass at a time."""

    def __init__(
        self,
        memory: Tier,
        disks: Iterable[Tier],
        attempt: Callable[[], int],
        failed: Callable[[OSError], None],
        done: Callable[[], None],
    ) -> None:
        """`attempt`: the one promised here; `done` is called from a thread after each pass."""
        self._memory = memory
        self._disks = tuple(disks)
        self._attempt = attempt
        self._failed = failed
        self._done = done
        self._deleting = threading.Lock()
        self.under_way = False
        """Set by who starts a pass, in the event loop; cleared at the pass's end."""

    def wait_for_delete(self) -> None:
        """Return when no single delete is under way. Blocks."""
        with self._deleting:
            pass

    def run(
        self, attempt: int, near: Collection[CheckpointId], strike: Collection[CheckpointId]
    ) -> None:
        """Delete shards on disks (`near`) and empty slots (`strike`), each only while the word of
        `attempt` still counts. Blocks.
        """
        try:
            for store in (self._memory, *self._disks):
                gone = strike if store is self._memory else near
                for copy in list(store.inventory()):
                    if copy.checkpoint in gone and not self._delete(store, copy, attempt):
                        return
        except OSError as error:
            self._failed(error)
        finally:
            self.under_way = False
            self._done()

    def _delete(self, store: Tier, copy: ShardCopy, attempt: int) -> bool:
        with self._deleting:
            if self._attempt() != attempt:
                return False
            store.delete(copy.checkpoint, copy.rank)
            return True
