"""Which schedules and retention hold at which step of a running job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.messages import Policies, TierPolicy
from backstay_protocol.policies import (
    KEPT,
    NO_STEPS,
    at,
    begun,
    capture_steps,
    changed,
    newest,
    of_topology,
    problem,
)
from backstay_protocol.topology import LocalTier, MemoryTier, Retention, Schedule, Tiers

TIERS = Tiers(memory=MemoryTier(schedule=Schedule(every_steps=10)), local=LocalTier(root="/x"))
START = of_topology(TIERS)


def memory(every_steps: int) -> dict[str, TierPolicy]:
    return {"memory": TierPolicy(schedule=Schedule(every_steps=every_steps))}


def test_a_change_holds_from_its_step_on_and_the_old_one_below() -> None:
    policies = changed(START, memory(50), 100)
    assert capture_steps(at(policies.entries, 99)) == 10
    assert capture_steps(at(policies.entries, 100)) == 50
    assert at(policies.entries, 100)["local"] == at(policies.entries, 0)["local"]
    assert policies.number == START.number + 1


def test_a_change_before_another_one_takes_its_place() -> None:
    policies = changed(changed(START, memory(50), 100), memory(20), 60)
    assert [capture_steps(at(policies.entries, step)) for step in (59, 60, 500)] == [10, 20, 20]


def test_what_was_to_begin_later_begins_with_the_next_attempt() -> None:
    policies = changed(START, memory(50), 100)
    assert begun(policies, 100) == policies
    earlier = begun(policies, 41)
    assert capture_steps(at(earlier.entries, 41)) == 50
    assert earlier.number > policies.number


def test_memory_by_seconds_is_an_interval_that_never_comes() -> None:
    change = {"memory": TierPolicy(schedule=Schedule(every_seconds=30))}
    assert capture_steps(newest(changed(START, change, 5))) == NO_STEPS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remote": TierPolicy()}, "'remote' is not configured"),
        ({"local": TierPolicy()}, "'local' needs a retention"),
        ({"memory": TierPolicy(retention=Retention())}, "'memory' has no retention"),
        ({"memory": TierPolicy()}, "everySteps or everySeconds"),
    ],
    ids=["tier", "retention", "no-retention", "memory"],
)
def test_what_a_running_job_can_not_take_is_named(
    change: dict[str, TierPolicy], words: str
) -> None:
    assert words in problem(newest(START), change)


def test_another_schedule_and_another_retention_can_be_taken() -> None:
    local = TierPolicy(schedule=Schedule(every_seconds=5), retention=Retention(keep_last=9))
    assert problem(newest(START), {"local": local, **memory(3)}) == ""


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), max_size=12), st.integers(0, 60))
def test_a_few_are_kept_in_order_and_the_last_one_holds_from_its_step_on(
    changes: list[tuple[int, int]], step: int
) -> None:
    policies: Policies = START
    for every, start in changes:
        policies = changed(policies, memory(every), start)
    starts = [policy.effective_from for policy in policies.entries]
    assert starts == sorted(set(starts))
    assert 1 <= len(starts) <= KEPT
    if step >= starts[-1]:
        assert at(policies.entries, step) == newest(policies)
