from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_protocol.choice import Base, Fresh, Refuse, RestoreView, choose, nearest
from backstay_protocol.ids import first_attempt_of
from backstay_protocol.messages import CopySource
from backstay_protocol.topology import ManualChoice
from support.protocol_values import copies, copy, point, record

ONE, TWO = point(1), point(2)


def view(**fields: Any) -> RestoreView:
    """A job of two ranks without a remote tier, about to begin attempt 9."""
    defaults: dict[str, Any] = {"attempt": 9, "world_size": 2}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return RestoreView(**(defaults | fields))


def with_remote(**fields: Any) -> RestoreView:
    return view(**({"remote_configured": True, "claimed": True, "listed": True} | fields))


def base_of(seen: RestoreView) -> Base:
    chosen = choose(seen)
    assert isinstance(chosen, Base), chosen
    return chosen


def refusal_of(seen: RestoreView) -> Refuse:
    chosen = choose(seen)
    assert isinstance(chosen, Refuse), chosen
    return chosen


# --- the newest on the lineage --------------------------------------------------------------------


def test_the_newest_whole_checkpoint_on_the_lineage_is_chosen() -> None:
    chosen = base_of(view(records=[record(1)], copies=[*copies(ONE), *copies(TWO)]))
    assert chosen.checkpoint == TWO
    assert chosen.chain == ((1, 2),)
    assert (chosen.plan, chosen.saved_world_size) == ("plan", 2)
    assert [shard.rank for shard in chosen.shards] == [0, 1]
    assert "step 2 of attempt 1 is the newest" in chosen.reason


def test_a_newer_one_that_lacks_a_shard_is_passed_over() -> None:
    chosen = base_of(view(records=[record(1)], copies=[*copies(ONE), copy(TWO, 0)]))
    assert chosen.checkpoint == ONE


def test_a_newer_step_of_an_attempt_that_was_left_is_not_history() -> None:
    left = point(7, 1)
    seen = view(records=[record(2, TWO)], copies=[*copies(TWO), *copies(left)])
    assert base_of(seen).checkpoint == TWO


def test_manifests_alone_tell_of_an_attempt_whose_records_are_lost() -> None:
    newer = point(3, 2)
    seen = view(
        records=[record(1)], copies=[*copies(point(9)), *copies(newer)], chains={2: ((1, 2),)}
    )
    chosen = base_of(seen)
    assert chosen.checkpoint == newer
    assert chosen.chain == ((2, 3), (1, 2))


def test_copies_without_any_record_or_chain_still_rule_by_their_attempt() -> None:
    assert base_of(view(copies=[*copies(ONE), *copies(point(1, 3))])).checkpoint == point(1, 3)


def test_another_world_size_is_named_and_not_refused() -> None:
    chosen = base_of(view(world_size=4, records=[record(1)], copies=copies(ONE)))
    assert chosen.saved_world_size == 2
    assert "saved by 2 ranks, read by 4" in chosen.reason


def test_copies_proven_bad_do_not_count() -> None:
    every = [*copies(ONE), *copies(TWO), copy(TWO, 0, "neighbor", 1)]
    bad = {(TWO, 0, "local", 0)}
    assert base_of(view(copies=every, struck=frozenset(bad))).checkpoint == TWO
    bad.add((TWO, 0, "neighbor", 1))
    assert base_of(view(copies=every, struck=frozenset(bad))).checkpoint == ONE


# --- the remote tier ------------------------------------------------------------------------------


@pytest.mark.parametrize(("claimed", "listed"), [(False, True), (True, False), (False, False)])
def test_without_claim_and_listing_the_remote_tier_is_no_source(
    claimed: bool, listed: bool
) -> None:
    seen = with_remote(
        records=[record(1)],
        copies=[*copies(ONE), *copies(TWO, "remote")],
        claimed=claimed,
        listed=listed,
    )
    assert base_of(seen).checkpoint == ONE


def test_with_claim_and_listing_it_is() -> None:
    seen = with_remote(records=[record(1)], copies=[*copies(ONE), *copies(TWO, "remote")])
    assert base_of(seen).checkpoint == TWO


def test_base_records_of_the_remote_tier_rule_like_stored_ones() -> None:
    left = point(9, 1)
    seen = with_remote(
        records=[record(1)], bases=[record(2, ONE)], copies=[*copies(left), *copies(ONE)]
    )
    assert base_of(seen).checkpoint == ONE


def test_remote_copies_under_an_intent_stand_back() -> None:
    every = [*copies(ONE), *copies(TWO, "remote")]
    seen = with_remote(records=[record(1)], copies=every, intents=frozenset({TWO}))
    assert base_of(seen).checkpoint == ONE


def test_other_copies_of_what_is_under_an_intent_do_not() -> None:
    seen = with_remote(records=[record(1)], copies=copies(TWO), intents=frozenset({TWO}))
    assert base_of(seen).checkpoint == TWO


def test_what_is_under_an_intent_is_taken_when_nothing_else_is_left() -> None:
    seen = with_remote(records=[record(1)], copies=copies(TWO, "remote"), intents=frozenset({TWO}))
    chosen = base_of(seen)
    assert chosen.checkpoint == TWO
    assert "about to be deleted" in chosen.reason


# --- from nothing ---------------------------------------------------------------------------------


def test_with_nothing_anywhere_it_starts_from_nothing() -> None:
    chosen = choose(view())
    assert isinstance(chosen, Fresh)
    assert "no remote tier" in chosen.reason


def test_with_a_remote_tier_it_starts_from_nothing_only_after_an_empty_listing() -> None:
    chosen = choose(with_remote())
    assert isinstance(chosen, Fresh)
    assert "was listed and is empty" in chosen.reason
    assert "could not be listed" in refusal_of(with_remote(claimed=False, listed=False)).reason
    assert "could not be listed" in refusal_of(with_remote(listed=False)).reason


def test_attempts_that_saved_nothing_do_not_stand_in_the_way() -> None:
    chosen = choose(view(records=[record(1, restarts=2)]))
    assert isinstance(chosen, Fresh)
    assert chosen.restarts == 3


def test_an_attempt_that_ended_with_its_pod_is_not_charged() -> None:
    """Evictions, lost nodes and drains raise the generation; a crash in place does not."""
    of = {g: first_attempt_of(g) for g in (7, 8)}
    crashed = choose(view(attempt=of[7] + 5, records=[record(of[7] + 4, restarts=2)]))
    replaced = choose(view(attempt=of[8], records=[record(of[7] + 4, restarts=2)]))
    assert isinstance(crashed, Fresh)
    assert isinstance(replaced, Fresh)
    assert (crashed.restarts, replaced.restarts) == (3, 2)


def test_a_history_whose_shards_are_all_lost_is_an_error() -> None:
    reason = refusal_of(view(records=[record(2, ONE)])).reason
    assert "attempt 2 started from" in reason
    assert "another runName" in reason


def test_checkpoints_that_can_not_be_restored_are_each_explained() -> None:
    left, broken, struck = point(9, 1), point(4, 2), point(3, 2)
    seen = view(
        records=[record(2, TWO, chain=((1, 2),))],
        copies=[*copies(left), copy(broken, 0), *copies(struck)],
        struck=frozenset({(struck, 0, "local", 0), (struck, 1, "local", 1)}),
    )
    refusal = refusal_of(seen)
    assert refusal.reason == "no checkpoint in sight can be restored"
    assert refusal.findings == (
        "step 9 of attempt 1: whole, but off the lineage; "
        "choose it by hand with `restore: {step: 9, attempt: 1}`",
        "step 4 of attempt 2: no copy of rank 1 (of 2) is in sight",
        "step 3 of attempt 2: no copy that counts is left (2 bad copies were struck out)",
    )


# --- deaths ---------------------------------------------------------------------------------------


def dead(deaths: int, *, ran: bool = True, **fields: Any) -> RestoreView:
    """Attempt 2 started from step 2; `deaths` attempts had died from it before."""
    return view(
        records=[record(2, TWO, ran=ran, deaths=deaths)],
        copies=[*copies(ONE), *copies(TWO)],
        **fields,
    )


def test_an_attempt_that_ran_and_died_is_counted_in_the_next_record() -> None:
    chosen = base_of(dead(0))
    assert (chosen.checkpoint, chosen.deaths, chosen.restarts) == (TWO, 1, 1)


def test_an_attempt_that_never_ran_is_not() -> None:
    assert base_of(dead(1, ran=False)).deaths == 1


def test_after_three_deaths_the_base_is_quarantined() -> None:
    chosen = base_of(dead(2))
    assert (chosen.checkpoint, chosen.deaths) == (ONE, 0)
    assert f"{TWO} is quarantined" in chosen.reason


def test_the_limit_is_a_setting_and_zero_switches_it_off() -> None:
    assert base_of(dead(2, quarantine_after=4)).checkpoint == TWO
    assert base_of(dead(9, quarantine_after=0)).checkpoint == TWO


def test_a_newer_complete_checkpoint_ends_the_count() -> None:
    newer = point(3, 2)
    seen = dead(2)
    chosen = base_of(replace(seen, copies=(*seen.copies, *copies(newer))))
    assert (chosen.checkpoint, chosen.deaths, chosen.restarts) == (newer, 0, 0)


def test_a_quarantined_base_is_taken_when_nothing_else_is_left() -> None:
    seen = replace(dead(5), copies=tuple(copies(TWO)))
    chosen = base_of(seen)
    assert (chosen.checkpoint, chosen.deaths) == (TWO, 6)
    assert "6 attempts died from it" in chosen.reason


def test_quarantine_and_intent_together_still_do_not_forbid() -> None:
    chosen = base_of(
        with_remote(
            records=[record(2, TWO, deaths=5)],
            copies=copies(TWO, "remote"),
            intents=frozenset({TWO}),
        )
    )
    assert chosen.checkpoint == TWO


def test_an_attempt_counts_as_run_when_all_members_that_can_be_read_say_so() -> None:
    seen = dead(0)
    half = replace(seen, records=(record(2, TWO), record(2, TWO, ran=False)))
    assert base_of(half).deaths == 0


def test_a_base_record_of_the_remote_tier_never_says_that_it_ran() -> None:
    seen = with_remote(bases=[record(2, TWO, deaths=1)], copies=copies(TWO))
    assert base_of(seen).deaths == 1


def test_falling_back_does_not_end_the_count_of_restarts() -> None:
    seen = view(records=[record(2, TWO, deaths=2, restarts=4)], copies=[*copies(ONE), *copies(TWO)])
    assert base_of(seen).restarts == 5


def test_a_head_known_by_manifests_alone_has_no_count() -> None:
    seen = view(records=[record(1)], copies=copies(TWO), chains={3: ((1, 2),)})
    assert (base_of(seen).deaths, base_of(seen).restarts) == (0, 0)


# --- by hand --------------------------------------------------------------------------------------


def by_hand(step: int, attempt: int = 0, token: str = "t", **fields: Any) -> RestoreView:
    defaults: dict[str, Any] = {
        "records": [record(2, ONE, restarts=3)],
        "copies": [*copies(ONE), *copies(TWO), *copies(point(2, 2))],
        "manual": ManualChoice(token=token, step=step, attempt=attempt),
    }
    return view(**(defaults | fields))


def test_a_person_may_choose_an_older_checkpoint_on_the_lineage() -> None:
    chosen = base_of(by_hand(1))
    assert (chosen.checkpoint, chosen.choice, chosen.restarts) == (ONE, "t", 0)
    assert "chosen by hand" in chosen.reason


def test_a_bare_step_means_the_one_on_the_lineage() -> None:
    assert base_of(by_hand(2)).checkpoint == point(2, 2)


def test_a_person_may_choose_what_lies_off_the_lineage() -> None:
    chosen = base_of(by_hand(2, 1, chains={1: ((0, 0),)}))
    assert (chosen.checkpoint, chosen.chain) == (TWO, ((1, 2), (0, 0)))


def test_a_choice_by_hand_applies_once() -> None:
    seen = by_hand(1, records=[record(2, ONE, choice="t")])
    chosen = base_of(seen)
    assert (chosen.checkpoint, chosen.choice) == (point(2, 2), "t")


def test_a_choice_that_can_not_be_restored_is_an_error_and_never_another_checkpoint() -> None:
    refusal = refusal_of(by_hand(5))
    assert "asks to restore step 5 on the lineage" in refusal.reason
    assert len(refusal.findings) == 3
    assert "whole; choose it by hand" in refusal.findings[0]
    assert "of attempt 7" in refusal_of(by_hand(1, 7)).reason


def test_a_bare_step_where_nothing_is_known_is_an_error() -> None:
    assert isinstance(choose(by_hand(1, records=[], copies=[])), Refuse)


# --- nearest first --------------------------------------------------------------------------------


def source(tier: str, holder: int) -> CopySource:
    return CopySource(tier=tier, holder=holder)


def test_a_reader_tries_its_own_pod_first_and_the_remote_tier_last() -> None:
    every = [
        source("remote", -1),
        source("neighbor", 2),
        source("local", 0),
        source("memory", 2),
        source("neighbor", 1),
        source("local", 1),
        source("memory", 1),
    ]
    assert nearest(every, 1) == (
        source("memory", 1),
        source("local", 1),
        source("neighbor", 1),
        source("memory", 2),
        source("local", 0),
        source("neighbor", 2),
        source("remote", -1),
    )


def test_what_a_reader_could_not_reach_comes_last() -> None:
    every = [source("memory", 0), source("local", 1), source("remote", -1)]
    assert nearest(every, 0, {source("memory", 0)}) == (
        source("local", 1),
        source("remote", -1),
        source("memory", 0),
    )


def test_readers_start_at_different_holders() -> None:
    every = [source("memory", 0), source("memory", 2), source("memory", 4)]
    firsts = [nearest(every, reader)[0].holder for reader in (1, 3, 5)]
    assert firsts == [2, 4, 0]
