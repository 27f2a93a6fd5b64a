"""What a sidecar says of the last checkpoint as it ends: never that all is safe unless it knows."""

from __future__ import annotations

from dataclasses import replace

from backstay_protocol.errors import Unreachable
from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    Inventory,
    JobView,
    LastWord,
    ProgressReply,
    ReplicaView,
    ShardCopy,
)
from backstay_sidecar.ending import Ending
from backstay_sidecar.replication.replicator import Here
from support.restore_fakes import copy

ATTEMPT = 7_000_002
OLDER = 7_000_001
DURABLE = CheckpointId(20, ATTEMPT)
WORD = ProgressReply(attempt=ATTEMPT, complete={"remote": (DURABLE,)}, durable=(DURABLE,))
VIEW = JobView(
    run="ns/run",
    attempt=ATTEMPT,
    phase="Training",
    message="",
    step=20,
    replicas=(ReplicaView(replica=0, generation=1, address="", seen_seconds_ago=0.1),),
    newest_durable=DURABLE,
    newest_copy=DURABLE,
)


class Sidecar:
    """One that ends. `view`: what the leader says; None: it does not answer."""

    def __init__(self, *copies: ShardCopy, alone: bool = False) -> None:
        self.view: JobView | None = VIEW
        self.word: ProgressReply | None = WORD
        self.ending = Ending(
            alone=alone,
            job=self.job,
            reply=lambda: self.word,
            lineage=lambda: Lineage(ATTEMPT, ((OLDER, 10),)),
            here=lambda: Here(inventory=Inventory(copies=copies)),
        )

    async def job(self) -> JobView:
        if self.view is None:
            raise Unreachable("the leader is away")
        return self.view


def test_what_only_the_own_disk_has_counts() -> None:
    """The other sidecars were not heard yet: it is complete nowhere, by the leader."""
    word = Sidecar(copy(30, ATTEMPT, 0, "local", 0)).ending.last_word()
    assert word == LastWord(newest_step=30, durable_step=20)


def test_what_is_no_longer_history_does_not_count() -> None:
    word = Sidecar(copy(30, OLDER, 0, "local", 0)).ending.last_word()
    assert word == LastWord(newest_step=20, durable_step=20)


def test_without_the_leaders_word_nothing_is_said() -> None:
    sidecar = Sidecar(copy(30, ATTEMPT, 0, "local", 0))
    sidecar.word = None
    assert sidecar.ending.last_word() is None


async def test_one_that_is_alone_says_that_all_is_safe_only_when_all_were_heard() -> None:
    """Ended too early, with an empty disk, it knows nothing of what lies on the others."""
    sidecar = Sidecar(alone=True)
    assert sidecar.ending.last_word() is None
    sidecar.view = replace(VIEW, newest_copy=CheckpointId(30, ATTEMPT))
    assert not await sidecar.ending.flushed()
    assert sidecar.ending.last_word() is None
    sidecar.view = VIEW
    assert await sidecar.ending.flushed()
    sidecar.view = None
    assert not await sidecar.ending.flushed()
    assert sidecar.ending.last_word() == LastWord(newest_step=20, durable_step=20)


def test_one_that_is_alone_says_at_once_what_is_not_safe() -> None:
    word = Sidecar(copy(30, ATTEMPT, 0, "local", 0), alone=True).ending.last_word()
    assert word == LastWord(newest_step=30, durable_step=20)
