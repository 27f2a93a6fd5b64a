"""A choice by hand applies once per change of the field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay_operator.api import TrainingJob
from backstay_operator.decide import JobRecord, chosen, note_choice
from backstay_operator.manifests import Addresses, Wiring, build_topology
from backstay_protocol.topology import ManualChoice, RestoreOptions

RECORD = JobRecord(first_generation=100, generation=100)
ONE = ManualChoice(token="1200-0", step=1200)
OTHER = ManualChoice(token="900-0", step=900)


@pytest.fixture
def wiring() -> Wiring:
    addresses = Addresses.in_cluster("gpt", 3, "uid")
    return Wiring(uid="uid", addresses=addresses, first_generation=100)


def token(record: JobRecord, choice: ManualChoice) -> str:
    found = chosen(RestoreOptions(choice=choice), record).choice
    assert found is not None
    assert (found.step, found.attempt) == (choice.step, choice.attempt)
    return found.token


def test_the_same_spec_seen_again_is_the_same_choice() -> None:
    record = note_choice(RECORD, ONE, 500.0)
    assert note_choice(record, ONE, 900.0) == record


def test_a_field_that_was_away_is_another_choice_when_it_comes_back() -> None:
    first = note_choice(RECORD, ONE, 500.0)
    away = note_choice(first, None, 500.5)
    again = note_choice(away, ONE, 500.7)
    assert token(again, ONE) != token(first, ONE)


def test_a_choice_that_was_changed_and_changed_back_is_another_one_each_time() -> None:
    tokens, record = [], RECORD
    for choice in (ONE, OTHER, ONE):
        record = note_choice(record, choice, 500.0)
        tokens.append(token(record, choice))
    assert len(set(tokens)) == 3


def test_a_clock_that_went_back_gives_no_number_twice() -> None:
    first = note_choice(RECORD, ONE, 500.0)
    again = note_choice(note_choice(first, None, 10.0), ONE, 10.0)
    assert again.choice_number > first.choice_number


def test_a_job_that_is_applied_again_does_not_choose_anew_what_its_run_began_from() -> None:
    made = note_choice(RECORD, ONE, 500.0, first=True)
    changed = note_choice(note_choice(made, OTHER, 600.0), ONE, 700.0)
    again = note_choice(RECORD, ONE, 900.0, first=True)
    restore = chosen(RestoreOptions(choice=ONE), again).choice
    assert restore is not None
    assert restore.applied_by(token(made, ONE))
    assert restore.applied_by(token(changed, ONE))
    assert not restore.applied_by(token(note_choice(made, OTHER, 600.0), OTHER))


def test_what_a_job_was_made_with_is_another_choice_when_it_was_away() -> None:
    made = note_choice(RECORD, ONE, 500.0, first=True)
    again = note_choice(note_choice(made, None, 600.0), ONE, 700.0)
    restore = chosen(RestoreOptions(choice=ONE), again).choice
    assert restore is not None
    assert not restore.applied_by(token(made, ONE))


def test_without_a_choice_nothing_is_chosen() -> None:
    assert note_choice(RECORD, None, 500.0) == RECORD
    assert chosen(RestoreOptions(), RECORD) == RestoreOptions()


def test_the_topology_carries_the_token_of_the_change(job: TrainingJob, wiring: Wiring) -> None:
    restore = replace(job.spec.restore, choice=ONE)
    picked = replace(job, spec=replace(job.spec, restore=restore))
    record = note_choice(RECORD, ONE, 500.0)
    built = build_topology(picked, replace(wiring, restore=chosen(restore, record)))
    assert built.restore.choice is not None
    assert built.restore.choice.token == token(record, ONE)
