"""Removes one checkpoint from the remote tier, by the steps of `backstay_protocol.commit.Deletion`.

Used by the leader's remote duties. Blocks; a step that fails raises and leaves everything where it
is: the intent stays, and the next pass, or a later leader, goes on from the first step.
"""

from __future__ import annotations

from collections.abc import Callable

from backstay_protocol.commit import Deleting, Deletion
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.records import Intent
from backstay_sidecar.restore.remote_book import RemoteBook


def delete(
    book: RemoteBook,
    checkpoint: CheckpointId,
    attempt: int,
    now: float,
    intended: Callable[[CheckpointId], None],
) -> Deletion:
    """Walk the whole way; how it ended (`why` says what stopped it).

    `intended` is told before the intent is written: the checkpoint counts no more from then on.
    """
    deletion = Deletion(checkpoint, attempt)
    while deletion.todo is not Deleting.NOTHING:
        match deletion.todo:
            case Deleting.LIST_CLAIMS | Deleting.LIST_CLAIMS_AGAIN:
                deletion = deletion.listed(book.claims())
                continue
            case Deleting.WRITE_INTENT:
                intended(checkpoint)
                book.intend(Intent(checkpoint=checkpoint, by_attempt=attempt, created=now))
                fault("delete.after_intent")
            case Deleting.REMOVE_COMMIT:
                book.remove_commit(checkpoint)
                fault("delete.after_commit")
            case Deleting.REMOVE_SHARDS:
                book.remove_shards(checkpoint)
        deletion = deletion.done()
    return deletion
