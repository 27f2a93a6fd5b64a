"""What a sidecar says of the last checkpoint as it ends, and when one that is alone may end.

Used by main. The operator calls a job Succeeded by these words (docs/guarantees.md, 6): what is not
known is not said. Decides nothing else and moves nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from backstay_protocol.errors import BackstayError
from backstay_protocol.history import Lineage
from backstay_protocol.messages import JobView, LastWord, ProgressReply
from backstay_sidecar.replication.replicator import Here
from backstay_sidecar.restore import views


class Ending:
    """One per sidecar."""

    def __init__(
        self,
        *,
        alone: bool,
        job: Callable[[], Awaitable[JobView]],
        reply: Callable[[], ProgressReply | None],
        lineage: Callable[[], Lineage | None],
        here: Callable[[], Here],
    ) -> None:
        """`alone`: there is no trainer any more; `job` asks the leader; `reply`: its last word, if
        it counts now.
        """
        self._alone = alone
        self._job = job
        self._reply = reply
        self._lineage = lineage
        self._here = here
        self._all_is_out = False

    async def flushed(self) -> bool:
        """Whether every sidecar is heard and what is newest is durable, by the leader."""
        try:
            self._all_is_out = views.is_flushed(await self._job())
        except (BackstayError, OSError):
            return False
        return self._all_is_out

    def last_word(self) -> LastWord | None:
        """What is known of the last checkpoint. None: the leader's word is missing, or does not
        know yet what lies on other disks: no slot here has the last one where no trainer was.
        """
        reply, lineage, here = self._reply(), self._lineage(), self._here()
        if reply is None or lineage is None:
            return None
        own = {found.manifest.checkpoint for found in here.published}
        own.update(copy.checkpoint for copy in here.inventory.copies)
        word = views.last_word(reply, [c.step for c in own if lineage.contains(c)])
        if word is None or not self._alone or self._all_is_out:
            return word
        return word if word.durable_step < word.newest_step else None
