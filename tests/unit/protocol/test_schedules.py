from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.schedules import (
    MAX_WIDENING,
    Interval,
    announce,
    chosen_by_time,
    due,
    widen,
)
from backstay_protocol.topology import Schedule
from support.protocol_values import point

EVERY_TEN = Schedule(every_steps=10)
EVERY_MINUTE = Schedule(every_seconds=60)


@pytest.mark.parametrize(
    ("schedule", "step", "reason", "expected"),
    [
        pytest.param(Schedule(), 7, "schedule", True, id="no schedule takes everything"),
        pytest.param(EVERY_TEN, 20, "schedule", True, id="a multiple"),
        pytest.param(EVERY_TEN, 25, "schedule", False, id="not a multiple"),
        pytest.param(EVERY_TEN, 25, "forced", True, id="forced goes everywhere"),
        pytest.param(EVERY_MINUTE, 25, "schedule", False, id="by seconds only what was chosen"),
    ],
)
def test_a_tier_takes_what_its_schedule_names(
    schedule: Schedule, step: int, reason: str, expected: bool
) -> None:
    assert due(schedule, point(step), reason) is expected


@pytest.mark.parametrize("schedule", [EVERY_TEN, EVERY_MINUTE])
def test_what_the_leader_chose_is_taken(schedule: Schedule) -> None:
    assert due(schedule, point(25), "schedule", {point(25)})
    assert not due(schedule, point(25), "schedule", {point(26)})


def choose(now: float, last: int | None = None, schedule: Schedule = EVERY_MINUTE) -> object:
    last_chosen = None if last is None else point(last)
    return chosen_by_time(
        schedule, [point(1), point(2)], last_chosen=last_chosen, last_time=0.0, now=now
    )


def test_by_seconds_the_newest_complete_one_is_chosen_when_the_interval_is_over() -> None:
    assert choose(59.9) is None
    assert choose(60.0) == point(2)
    assert choose(60.0, last=1) == point(2)
    assert choose(60.0, last=2) is None
    assert choose(60.0, schedule=EVERY_TEN) is None
    assert chosen_by_time(EVERY_MINUTE, [], last_chosen=None, last_time=0.0, now=99.0) is None


def test_a_step_is_announced_beyond_what_any_rank_can_reach_meanwhile() -> None:
    assert announce([10, 12], step_seconds=0.5, notice_seconds=4.0) == 22
    assert announce([10], step_seconds=0.0, notice_seconds=4.0) == 12
    assert announce([], step_seconds=0.5, notice_seconds=0.0) == 2


@given(st.lists(st.integers(0, 10**6), min_size=1), st.floats(0.001, 1e3), st.floats(0, 1e3))
def test_an_announced_step_always_lies_ahead(
    steps: list[int], step_seconds: float, notice_seconds: float
) -> None:
    ahead = announce(steps, step_seconds, notice_seconds) - max(steps)
    assert ahead * step_seconds > notice_seconds


def test_a_backlog_that_fills_the_slots_widens_the_interval_for_all() -> None:
    wider = widen(Interval(every_steps=5), 5, backlog=2, slots=2, from_step=100)
    assert wider == Interval(every_steps=10, from_step=100, previous=5)


def test_no_backlog_narrows_it_again_but_not_below_what_was_configured() -> None:
    wide = Interval(every_steps=10, from_step=50, previous=5)
    assert widen(wide, 5, backlog=0, slots=2, from_step=100).every_steps == 5
    narrow = Interval(every_steps=5, from_step=50, previous=10)
    assert widen(narrow, 5, backlog=0, slots=2, from_step=100) == narrow


@pytest.mark.parametrize(
    ("configured", "backlog", "from_step"),
    [
        pytest.param(5, 1, 100, id="a small backlog"),
        pytest.param(5, 2, 50, id="before the last change is in force"),
        pytest.param(0, 9, 100, id="not by steps"),
    ],
)
def test_else_the_interval_stays(configured: int, backlog: int, from_step: int) -> None:
    now = Interval(every_steps=5, from_step=50)
    assert widen(now, configured, backlog, 2, from_step) == now


def test_the_interval_does_not_grow_without_bound() -> None:
    widest = Interval(every_steps=5 * MAX_WIDENING)
    assert widen(widest, 5, backlog=99, slots=2, from_step=100) == widest
