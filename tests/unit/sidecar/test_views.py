"""What people are warned of in GET /v1/job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    JobView,
    LastWord,
    ProgressReply,
    ProgressRequest,
    RankProgress,
    ReplicaView,
    TierState,
)
from backstay_protocol.records import AttemptRecord
from backstay_sidecar.restore.duties import Duties
from backstay_sidecar.restore.views import _warnings, is_flushed, last_word
from support.restore_fakes import topology

ATTEMPT = 7_000_001


def warnings_when(**rank: Any) -> tuple[str, ...]:
    job = topology(1)
    duties = Duties(job, 1)
    duties.begin(AttemptRecord(attempt=ATTEMPT, base=None, world_size=1, replicas=1), 0.0)
    progress = RankProgress(
        rank=0, step=50, step_time=0.0, attempt=ATTEMPT, state=State.TRAINING, **rank
    )
    request = ProgressRequest(replica=0, generation=7, attempt=ATTEMPT, ranks=(progress,))
    assert duties.take(request, 1.0)
    return _warnings(duties, job)


def test_a_rank_that_skips_its_saves_is_named_with_the_step_that_it_still_has() -> None:
    found = warnings_when(published_step=4, saves=2, skipped=20)
    assert any("rank 0 skipped 20 of 22 saves" in w and "step 4" in w for w in found), found


def test_a_few_skipped_saves_worry_nobody() -> None:
    assert not any("skipped" in w for w in warnings_when(published_step=48, saves=20, skipped=2))


def seen(*ages: float, durable: int = 20, newest: int = 20, attempt: int = ATTEMPT) -> JobView:
    """A job whose sidecars were heard so many seconds ago."""
    return JobView(
        run="ns/run",
        attempt=attempt,
        phase="Training",
        message="",
        step=newest,
        replicas=tuple(
            ReplicaView(replica=i, generation=1, address="", seen_seconds_ago=age)
            for i, age in enumerate(ages)
        ),
        tiers=(TierState(tier="local", ok=True, newest=CheckpointId(newest, ATTEMPT)),),
        newest_durable=CheckpointId(durable, ATTEMPT) if durable else None,
    )


def with_disk(ok: bool) -> JobView:
    """One whose second sidecar has its disk before it, or not yet."""
    view = seen(0.1, 3.0)
    second = replace(view.replicas[1], tiers=(TierState(tier="local", ok=ok),))
    return replace(view, replicas=(view.replicas[0], second))


@pytest.mark.parametrize(
    ("view", "flushed"),
    [
        pytest.param(seen(0.1, 3.0), True, id="all-heard-and-durable"),
        pytest.param(seen(0.1, 11.0), False, id="one-not-heard"),
        pytest.param(seen(0.1, durable=10), False, id="the-newest-is-not-durable"),
        pytest.param(seen(0.1, durable=0), False, id="nothing-durable"),
        pytest.param(seen(0.1, attempt=0), False, id="no-attempt"),
        pytest.param(
            replace(seen(0.1, 3.0), newest_copy=CheckpointId(30, ATTEMPT)),
            False,
            id="a-newer-one-lies-in-pieces-in-several-tiers",
        ),
        pytest.param(with_disk(False), False, id="a-disk-was-not-looked-at"),
        pytest.param(with_disk(True), True, id="each-disk-was-looked-at"),
    ],
)
def test_nothing_is_left_to_bring_out_only_when_all_say_so(view: JobView, flushed: bool) -> None:
    assert is_flushed(view) is flushed


def test_the_last_word_counts_what_only_the_own_slots_have() -> None:
    word = ProgressReply(
        attempt=ATTEMPT,
        complete={"memory": (CheckpointId(20, ATTEMPT),), "remote": (CheckpointId(10, ATTEMPT),)},
        durable=(CheckpointId(10, ATTEMPT),),
    )
    assert last_word(word, []) == LastWord(newest_step=20, durable_step=10)
    assert last_word(word, [30, 5]) == LastWord(newest_step=30, durable_step=10)
    assert last_word(ProgressReply(attempt=ATTEMPT), []) is None
    assert last_word(ProgressReply(attempt=ATTEMPT), [5]) == LastWord(
        newest_step=5, durable_step=-1
    )
