"""Contents given by hand: another run's checkpoint, or none. choose, explain, rounds' needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.choice import Base, Fresh, Given, Refuse, RestoreView, choose
from backstay_protocol.explain import MOST_CANDIDATES, explain
from backstay_protocol.messages import ShardCopy
from backstay_protocol.origins import OtherRun, asks_by_hand, run_to_list
from backstay_protocol.records import AttemptRecord, Origin
from backstay_protocol.topology import ManualChoice
from support.protocol_values import copies, copy, point, record

A = "team/base"
ONE, TWO, THREE = point(1), point(2), point(3)
NEWEST = ManualChoice(token="t", run=A)
FRESH = ManualChoice(token="t", fresh=True)


def remote(*checkpoints: Any) -> tuple[ShardCopy, ...]:
    found = [c for checkpoint in checkpoints for c in copies(checkpoint)]
    return tuple(replace(c, tier="remote", holder=-1) for c in found)


def other(**fields: Any) -> OtherRun:
    """A run of attempt 1 with three checkpoints, the last one not committed."""
    defaults: dict[str, Any] = {
        "run": A,
        "bases": (record(1),),
        "copies": remote(ONE, TWO, THREE),
        "commits": frozenset((ONE, TWO)),
    }
    return OtherRun(**(defaults | fields))


def view(**fields: Any) -> RestoreView:
    """A job of two ranks with history of its own, under attempts greater than the other run's."""
    defaults: dict[str, Any] = {
        "attempt": 9,
        "world_size": 2,
        "records": (record(5, point(4, 4)),),
        "copies": tuple(copies(point(6, 5))),
        "remote_configured": True,
        "claimed": True,
        "listed": True,
        "others": {A: other()},
        "manual": NEWEST,
    }
    return RestoreView(**(defaults | fields))


def started(origin: Origin, **fields: Any) -> AttemptRecord:
    """The attempt that the choice was applied to."""
    return record(6, choice="t", origin=origin, **fields)


FROM_A = Origin(run=A, checkpoint=TWO)
BY_HAND = Origin()


# --- another run ----------------------------------------------------------------------------------


def test_another_run_gives_its_newest_durable_checkpoint_and_no_history() -> None:
    chosen = choose(view())
    assert isinstance(chosen, Given)
    assert (chosen.checkpoint, chosen.origin, chosen.choice) == (TWO, FROM_A, "t")
    assert [shard.rank for shard in chosen.shards] == [0, 1]
    assert all(s.tier == "remote" for shard in chosen.shards for s in shard.sources)
    assert "step 2 of attempt 1 of run team/base" in chosen.reason


def test_another_runs_newest_is_the_one_on_its_own_lineage() -> None:
    """Attempt 2 of that run left attempt 1 at step 1: step 2 of attempt 1 never happened there."""
    chosen = choose(view(others={A: other(bases=(record(1), record(2, ONE)))}))
    assert isinstance(chosen, Given)
    assert chosen.checkpoint == ONE


def test_what_that_run_is_about_to_delete_comes_last() -> None:
    chosen = choose(view(others={A: other(intents=frozenset((TWO,)))}))
    assert isinstance(chosen, Given)
    assert chosen.checkpoint == ONE
    last = choose(view(others={A: other(intents=frozenset((ONE, TWO)))}))
    assert isinstance(last, Given)
    assert last.checkpoint == TWO


@pytest.mark.parametrize(("step", "attempt"), [(3, 0), (3, 1), (1, 0)])
def test_a_step_of_another_run_may_be_named(step: int, attempt: int) -> None:
    manual = ManualChoice(token="t", run=A, run_step=step, run_attempt=attempt)
    chosen = choose(view(manual=manual))
    assert isinstance(chosen, Given)
    assert chosen.checkpoint == point(step)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "could not be listed"),
        ({A: OtherRun(run=A)}, "has nothing in this bucket and prefix"),
        ({A: other(commits=frozenset())}, "no durable checkpoint on its lineage; 3 others"),
    ],
    ids=["not listed", "nothing there", "nothing durable"],
)
def test_another_run_that_gives_nothing_is_an_error_and_never_the_own_history(
    found: dict[str, OtherRun], words: str
) -> None:
    refusal = choose(view(others=found))
    assert isinstance(refusal, Refuse)
    assert words in refusal.reason


def test_numbers_of_two_runs_are_never_compared() -> None:
    """The other run's attempts are greater, and a checkpoint of it has the very name of an own."""
    same = point(6, 5)
    foreign = other(bases=(record(5), record(70)), copies=remote(same), commits=frozenset((same,)))
    seen = view(others={A: foreign}, manual=None)
    chosen = choose(seen)
    assert isinstance(chosen, Base)
    assert {s.tier for shard in chosen.shards for s in shard.sources} == {"local"}
    struck = choose(replace(seen, manual=NEWEST, struck=frozenset(((same, 0, "remote", -1),))))
    assert isinstance(struck, Refuse)  # off that run's lineage: 70 came after 5
    on = replace(foreign, bases=(record(5),))
    assert isinstance(choose(replace(seen, manual=NEWEST, others={A: on})), Given)


def test_a_shard_of_another_run_that_is_proven_bad_ends_that_checkpoint_alone() -> None:
    bad = frozenset(((A, TWO, 1),))
    chosen = choose(view(struck_origins=bad))
    assert isinstance(chosen, Given)
    assert chosen.checkpoint == ONE


# --- again, until there is an own one -------------------------------------------------------------


def test_an_attempt_that_saved_nothing_is_followed_by_the_same_start() -> None:
    chosen = choose(view(records=(started(FROM_A, ran=True),), copies=()))
    assert isinstance(chosen, Given)
    assert (chosen.origin, chosen.choice, chosen.restarts) == (FROM_A, "t", 1)
    fresh = choose(view(records=(started(BY_HAND, ran=True),), copies=(), manual=FRESH))
    assert isinstance(fresh, Fresh)
    assert (fresh.origin, fresh.choice, fresh.restarts) == (BY_HAND, "t", 1)


@pytest.mark.parametrize("manual", [None, NEWEST], ids=["field removed", "field still there"])
def test_it_starts_from_the_very_checkpoint_and_not_from_a_newer_one(
    manual: ManualChoice | None,
) -> None:
    newer = other(commits=frozenset((ONE, TWO, THREE)))
    chosen = choose(view(records=(started(FROM_A),), others={A: newer}, manual=manual))
    assert isinstance(chosen, Given)
    assert chosen.checkpoint == TWO


def test_what_the_run_had_before_is_not_history_any_more() -> None:
    old = copies(point(6, 5))
    for origin, kind in ((FROM_A, Given), (BY_HAND, Fresh)):
        chosen = choose(view(records=(started(origin),), copies=tuple(old), manual=None))
        assert isinstance(chosen, kind)


def test_the_first_own_checkpoint_ends_it() -> None:
    own = point(4, 6)
    chosen = choose(view(records=(started(FROM_A),), copies=tuple(copies(own))))
    assert isinstance(chosen, Base)
    assert (chosen.checkpoint, chosen.chain, chosen.choice) == (own, ((6, 4),), "t")


def test_a_first_save_that_was_left_unfinished_does_not_take_the_start_away() -> None:
    chosen = choose(view(records=(started(FROM_A),), copies=(copy(point(4, 6), 0),)))
    assert isinstance(chosen, Given)
    assert "1 begun since then are not whole" in chosen.reason


def test_after_a_fresh_start_what_was_saved_is_never_silently_forgotten() -> None:
    seen = view(records=(started(BY_HAND),), copies=(copy(point(4, 6), 0),), manual=None)
    refusal = choose(seen)
    assert isinstance(refusal, Refuse)
    assert "since the fresh start" in refusal.reason


def test_a_later_attempt_with_a_base_never_falls_back_to_what_was_given() -> None:
    seen = view(records=(started(FROM_A), record(7, point(4, 6), choice="t")), copies=())
    refusal = choose(seen)
    assert isinstance(refusal, Refuse)
    assert "no shard of any checkpoint is in sight" in refusal.reason


def test_contents_that_are_gone_meanwhile_are_an_error_that_says_what_to_do() -> None:
    gone = other(copies=remote(ONE), commits=frozenset((ONE,)))
    refusal = choose(view(records=(started(FROM_A),), others={A: gone}))
    assert isinstance(refusal, Refuse)
    assert "started from step 2 of attempt 1 of run team/base" in refusal.reason
    assert "retention of that run" in refusal.reason
    assert "name another checkpoint in `restore`" in refusal.reason


def test_a_record_of_an_older_sidecar_lacks_the_origin_and_another_one_has_it() -> None:
    older = record(6, choice="t")
    chosen = choose(view(records=(older, started(FROM_A)), copies=()))
    assert isinstance(chosen, Given)


def test_changing_the_field_applies_again() -> None:
    again = replace(NEWEST, token="t2")
    for seen in (
        view(records=(started(FROM_A),), manual=again),
        view(records=(record(7, point(4, 6), choice="t"),), manual=again),
    ):
        chosen = choose(seen)
        assert isinstance(chosen, Given)
        assert (chosen.choice, chosen.restarts) == ("t2", 0)


@pytest.mark.parametrize(
    ("choice", "asks"), [("t", False), ("t@7", False), ("", True), ("s@7", True), ("tt", True)]
)
def test_a_job_that_is_applied_again_does_not_ask_for_what_its_run_began_from(
    choice: str, asks: bool
) -> None:
    begun = record(5, point(4, 4), choice=choice)
    assert asks_by_hand(NEWEST, (begun,)) is asks
    assert asks_by_hand(replace(NEWEST, token="t@9"), (begun,)), "a change of the field does"


def test_a_person_may_go_back_to_the_old_history_by_name() -> None:
    manual = ManualChoice(token="t2", step=6, attempt=5)
    chosen = choose(view(records=(started(FROM_A),), manual=manual))
    assert isinstance(chosen, Base)
    assert chosen.checkpoint == point(6, 5)


def test_a_fresh_start_by_hand_passes_over_everything() -> None:
    chosen = choose(view(manual=FRESH))
    assert isinstance(chosen, Fresh)
    assert (chosen.origin, chosen.choice) == (BY_HAND, "t")


# --- which run has to be listed -------------------------------------------------------------------


def test_the_run_to_list_is_that_of_the_open_choice_or_of_the_newest_attempt() -> None:
    assert run_to_list(NEWEST, ()) == A
    assert run_to_list(None, (started(FROM_A),)) == A
    assert run_to_list(NEWEST, (started(Origin(run="x/y", checkpoint=ONE)),)) == "x/y"
    assert run_to_list(None, (started(FROM_A), record(7, point(4, 6), choice="t"))) == ""
    assert run_to_list(FRESH, (record(5),)) == ""


# --- the explanation ------------------------------------------------------------------------------


def test_every_checkpoint_in_sight_is_told_of() -> None:
    off, torn = point(3, 3), point(7, 5)
    seen = view(
        manual=None,
        copies=(*copies(point(6, 5)), *copies(off), *copies(point(5, 5)), copy(torn, 0)),
        others={},
    )
    told = explain(seen, choose(seen))
    assert (told.outcome, told.checkpoint) == ("base", point(6, 5))
    why = {c.checkpoint: (c.taken, c.why) for c in told.candidates}
    assert why[point(6, 5)][0]
    assert not any(why[c][0] for c in (off, torn, point(5, 5)))
    assert "off the lineage of attempt 5" in why[off][1]
    assert "Not whole" in why[torn][1]
    assert "older than step 6" in why[point(5, 5)][1]


def test_the_other_runs_checkpoints_are_told_of_apart() -> None:
    seen = view()
    told = explain(seen, choose(seen))
    assert (told.outcome, told.origin_run) == ("origin", A)
    taken = [c for c in told.candidates if c.taken]
    assert [(c.run, c.checkpoint) for c in taken] == [(A, TWO)]
    why = {(c.run, c.checkpoint): c.why for c in told.candidates}
    assert "not durable" in why[A, THREE]
    assert "asks for something else" in why["", point(6, 5)]


def test_a_long_list_is_counted() -> None:
    many = tuple(c for step in range(60) for c in copies(point(step, 5)))
    seen = view(copies=many, manual=None)
    told = explain(seen, choose(seen))
    assert len(told.candidates) == MOST_CANDIDATES
    assert told.candidates[0].taken
    assert told.more == 60 + 3 - MOST_CANDIDATES


def test_a_refusal_and_a_fresh_start_are_explained_too() -> None:
    refused = view(others={A: OtherRun(run=A)})
    assert explain(refused, choose(refused)).outcome == "refuse"
    fresh = view(manual=FRESH)
    told = explain(fresh, choose(fresh))
    assert (told.outcome, told.origin) == ("fresh", "nothing (a fresh start, chosen by hand)")
    assert not any(c.taken for c in told.candidates)


POINTS = st.builds(point, st.integers(1, 4), st.integers(1, 4))
RECORDS = st.builds(
    record,
    st.integers(1, 6),
    st.one_of(st.none(), POINTS),
    choice=st.sampled_from(("", "t")),
    ran=st.booleans(),
)
GIVEN = st.builds(
    lambda attempt, origin: record(attempt, choice="t", origin=origin),
    st.integers(1, 6),
    st.sampled_from((FROM_A, BY_HAND)),
)


@given(
    records=st.lists(st.one_of(RECORDS, GIVEN), max_size=3),
    own=st.sets(POINTS, max_size=4),
    torn=st.sets(POINTS, max_size=2),
    manual=st.sampled_from((None, NEWEST, FRESH, ManualChoice(token="t", step=2))),
    claimed=st.booleans(),
)
def test_whatever_is_in_sight_the_choice_and_its_account_agree(
    records: list[AttemptRecord], own: set[Any], torn: set[Any], manual: Any, claimed: bool
) -> None:
    seen = view(
        records=tuple(records),
        copies=tuple(c for p in own for c in copies(p)) + tuple(copy(p, 0) for p in torn),
        manual=manual,
        claimed=claimed,
        listed=claimed,
        others={A: other()} if claimed else {},
    )
    chosen = choose(seen)
    told = explain(seen, chosen)
    open_choice = manual is not None and all(r.choice != "t" for r in records)
    taken = [c for c in told.candidates if c.taken]
    if isinstance(chosen, Base):
        assert [(c.run, c.checkpoint) for c in taken] == [("", chosen.checkpoint)]
    elif isinstance(chosen, Given):
        assert [(c.run, c.checkpoint) for c in taken] == [(A, chosen.checkpoint)]
    else:
        assert taken == []
    if open_choice and not isinstance(chosen, Refuse):
        assert chosen.choice == "t"
        assert isinstance(chosen, Fresh) == manual.fresh
        assert isinstance(chosen, Given) == bool(manual.run)
    if isinstance(chosen, Given) and not open_choice:
        newest = max(r.attempt for r in records)
        assert any(r.attempt == newest and r.origin == chosen.origin for r in records)
    if own and isinstance(chosen, Fresh):
        assert chosen.origin is not None  # never a silent fresh start
