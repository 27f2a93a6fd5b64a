from __future__ import annotations

from dataclasses import replace

import pytest

from backstay_protocol.commit import (
    INTENT_SECONDS,
    Deleting,
    Deletion,
    Standing,
    commit_record,
    may_claim_late,
    may_commit,
    may_upload,
    spent_intents,
)
from backstay_protocol.completeness import complete
from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.records import CommitShard, Intent
from support.protocol_values import copies, point

LINEAGE = Lineage(3, ((2, 8),))
GOOD = Standing(lineage=LINEAGE, claims=frozenset({1, 2, 3}), base_recorded=True)
STEP, BASE = point(10, 3), point(8, 2)


def test_an_attempt_that_began_without_a_claim_takes_it_late() -> None:
    assert may_claim_late(replace(GOOD, claims=frozenset({2}))).allowed


def test_never_beside_a_greater_claim_and_never_twice() -> None:
    assert "attempt 4 is newer" in may_claim_late(replace(GOOD, claims=frozenset({4}))).why
    assert "claimed already" in may_claim_late(GOOD).why


@pytest.mark.parametrize(
    ("standing", "checkpoint", "why"),
    [
        pytest.param(replace(GOOD, claims=frozenset({2})), STEP, "no claim", id="no claim"),
        pytest.param(replace(GOOD, base_recorded=False), STEP, "no claim and base", id="no base"),
        pytest.param(
            replace(GOOD, intents=frozenset({STEP})), STEP, "about to be deleted", id="intent"
        ),
        pytest.param(GOOD, point(9, 2), "not on the lineage", id="off the lineage"),
    ],
)
def test_what_may_not_be_uploaded_may_not_be_committed_either(
    standing: Standing, checkpoint: CheckpointId, why: str
) -> None:
    assert why in may_upload(checkpoint, standing).why
    answer = may_commit(checkpoint, {checkpoint}, standing)
    assert not answer.allowed
    assert why in answer.why


@pytest.mark.parametrize("checkpoint", [STEP, BASE], ids=["its own", "an adopted one"])
def test_a_complete_checkpoint_on_the_lineage_is_committed(checkpoint: CheckpointId) -> None:
    assert may_upload(checkpoint, GOOD).allowed
    assert may_commit(checkpoint, {checkpoint}, GOOD).allowed


def test_only_what_is_complete_and_not_durable_yet() -> None:
    assert "not complete" in may_commit(STEP, set(), GOOD).why
    assert (
        "durable already" in may_commit(STEP, {STEP}, replace(GOOD, commits=frozenset({STEP}))).why
    )


def test_beside_a_newer_claim_nothing_is_committed() -> None:
    answer = may_commit(STEP, {STEP}, replace(GOOD, claims=frozenset({3, 4})))
    assert answer == (False, "attempt 4 is newer than 3")


def test_a_commit_record_names_all_shards() -> None:
    whole = complete(copies(STEP, "remote"))[STEP]
    record = commit_record(whole, LINEAGE.chain, 12.5)
    assert (record.checkpoint, record.world_size, record.plan) == (STEP, 2, "plan")
    assert (record.chunk_size, record.chain, record.created) == (8, ((2, 8),), 12.5)
    assert record.shards == (
        CommitShard(rank=0, size=8, fingerprint="f10.0"),
        CommitShard(rank=1, size=8, fingerprint="f10.1"),
    )


# --- deletion -------------------------------------------------------------------------------------


def test_a_deletion_looks_writes_its_intent_looks_again_and_only_then_removes() -> None:
    deletion, seen = Deletion(STEP, 3), []
    while deletion.todo is not Deleting.NOTHING:
        seen.append(deletion.todo)
        looking = deletion.todo in (Deleting.LIST_CLAIMS, Deleting.LIST_CLAIMS_AGAIN)
        deletion = deletion.listed({1, 2, 3}) if looking else deletion.done()
    assert [todo.value for todo in seen] == [
        "list claims",
        "write the intent",
        "list claims again",
        "remove the commit record",
        "remove the shards",
    ]
    assert not deletion.stopped


@pytest.mark.parametrize("todo", [Deleting.LIST_CLAIMS, Deleting.LIST_CLAIMS_AGAIN])
def test_a_newer_claim_stops_it(todo: Deleting) -> None:
    stopped = Deletion(STEP, 3, todo).listed({3, 4})
    assert (stopped.todo, stopped.stopped) == (Deleting.NOTHING, True)
    assert "is left alone: attempt 4 is newer than 3" in stopped.why


def test_an_attempt_without_a_claim_deletes_nothing() -> None:
    assert "attempt 3 has no claim" in Deletion(STEP, 3).listed({2}).why


def test_a_step_out_of_order_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Deletion(STEP, 3).done()
    with pytest.raises(AssertionError):
        Deletion(STEP, 3, Deleting.REMOVE_SHARDS).listed({3})


def test_intents_stay_a_day_and_until_nothing_is_left() -> None:
    intents = [Intent(checkpoint=point(i), by_attempt=3, created=0.0) for i in (1, 2)]
    late = Intent(checkpoint=point(3), by_attempt=3, created=10.0)
    left = {point(2): 5}
    assert spent_intents([*intents, late], left, INTENT_SECONDS) == (point(1),)
    assert spent_intents([*intents, late], {}, INTENT_SECONDS - 1) == ()
