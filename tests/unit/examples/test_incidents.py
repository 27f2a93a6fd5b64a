"""When the demo may break a run, which tier has to help, and what is read from the events."""

from __future__ import annotations

import pytest

from examples.char_gpt.incidents import (
    FAILURES,
    TIERS,
    Failure,
    human_bytes,
    human_sources,
    judge,
    last_losses,
    may_inject,
    read_incidents,
)
from support.demo_recording import bytes_for, loss_at, progress, record

TRAINER, MEMORY, NODE, ALL = FAILURES


def test_each_failure_of_the_demo_needs_the_next_farther_tier() -> None:
    assert tuple(failure.tier for failure in FAILURES) == TIERS


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.kind)
def test_the_expected_tier_serving_is_no_problem(failure: Failure) -> None:
    assert judge(failure, bytes_for(failure)) == ""


@pytest.mark.parametrize(
    ("failure", "used", "problem"),
    [
        (TRAINER, {"local": 5}, "read from local; memory should have served"),
        (TRAINER, {"memory": 5, "remote": 1}, "remote was not needed while memory had the step"),
        (MEMORY, {"memory": 5}, "read from memory; local should have served"),
        (NODE, {"memory": 5, "local": 5}, "neighbor should have served"),
        (NODE, {"neighbor": 5, "remote": 5}, "remote was not needed while neighbor had the step"),
        (ALL, {"memory": 5, "remote": 5}, "with all nodes gone only remote can have served"),
        (ALL, {}, "read from nothing; remote should have served"),
        (TRAINER, {"memory": 0, "remote": 5}, "read from remote; memory should have served"),
    ],
)
def test_another_tier_than_the_expected_one_is_said(
    failure: Failure, used: dict[str, int], problem: str
) -> None:
    assert problem in judge(failure, used)


@pytest.mark.parametrize(
    ("failure", "step", "last_base", "may"),
    [
        (TRAINER, 59, 0, False),  # too early
        (TRAINER, 60, 0, False),  # step 60 is in every farther tier too
        (TRAINER, 66, 0, True),  # memory alone has step 65
        (MEMORY, 131, 65, True),
        (NODE, 201, 200, False),  # neighbor has nothing newer than what the run began from
        (NODE, 221, 200, True),
        (ALL, 285, 240, True),
        (ALL, 285, 280, False),
    ],
)
def test_a_failure_waits_for_its_tier_to_hold_a_new_step(
    failure: Failure, step: int, last_base: int, may: bool
) -> None:
    assert may_inject(failure, progress(step, 1, 0.0), last_base) is may


def test_nothing_is_broken_while_a_restore_is_under_way() -> None:
    restoring = progress(66, 1, 0.0) | {"phase": "Restoring"}
    assert not may_inject(TRAINER, restoring, 0)


def test_incidents_are_read_in_order_with_what_they_cost() -> None:
    events, losses = record()
    incidents = read_incidents(events, losses)
    assert [i.failure for i in incidents] == list(FAILURES)
    assert [i.step - i.base_step for i in incidents] == [i.lost_steps for i in incidents]
    assert all(i.base_step % 5 == 0 and not i.problem for i in incidents)
    assert [i.attempt for i in incidents] == ["1.2", "1.3", "1.4", "1.5"]


def test_a_failure_without_a_recovery_is_no_incident_yet() -> None:
    events, losses = record()
    first = next(i for i, e in enumerate(events) if e["event"] == "recovered")
    assert read_incidents(events[:first], losses) == ()


def test_a_recovery_that_nobody_ordered_is_no_incident() -> None:
    events, losses = record()
    alone = [e for e in events if e["event"] != "failure_injected"]
    assert read_incidents(alone, losses) == ()


def test_a_step_trained_twice_counts_by_its_last_loss() -> None:
    lines = [{"step": 1, "loss": 3.0}, {"event": "restored", "step": 0}, {"step": 1, "loss": 2.0}]
    assert last_losses(lines) == {1: 2.0}
    assert last_losses(record()[1]) == {step: loss_at(step) for step in range(1, 421)}


def test_bytes_and_sources_are_written_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 32_419_584, 5e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "32.4 MB",
        "5.0 GB",
    ]
    assert human_sources({"local": 2000, "memory": 1000}) == "memory 1.0 kB, local 2.0 kB"
