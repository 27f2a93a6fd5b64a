from __future__ import annotations

from collections import defaultdict

import pytest

from backstay.schedule import Due, due
from backstay_protocol.control import Word
from backstay_protocol.manifest import FORCED, SCHEDULE


def words(**given: int) -> dict[Word, int]:
    found = defaultdict(int)
    found.update({Word[name]: value for name, value in given.items()})
    return found


SCHEDULED, ORDERED = Due(SCHEDULE), Due(FORCED)


@pytest.mark.parametrize(
    ("given", "before", "step", "expected"),
    [
        ({}, 9, 10, None),
        ({"EVERY_STEPS": 5}, 9, 10, SCHEDULED),
        ({"EVERY_STEPS": 5}, 10, 11, None),
        ({"EVERY_STEPS": 5, "EVERY_FROM": 20, "PREVIOUS_EVERY_STEPS": 2}, 11, 12, SCHEDULED),
        ({"EVERY_STEPS": 5, "EVERY_FROM": 20, "PREVIOUS_EVERY_STEPS": 2}, 14, 15, None),
        ({"EVERY_STEPS": 5, "EVERY_FROM": 20, "PREVIOUS_EVERY_STEPS": 2}, 19, 20, SCHEDULED),
        ({"EVERY_STEPS": 5, "EVERY_FROM": 20}, 9, 10, None),
        ({"SAVE_AT_STEP": 12}, 11, 12, SCHEDULED),
        ({"SAVE_AT_STEP": -12}, 11, 12, ORDERED),
        ({"SAVE_AT_STEP": -12}, 12, 13, None),
        ({"SAVE_AT_STEP": -12}, 8, 16, ORDERED),
        ({"SAVE_AT_STEP": -10, "EVERY_STEPS": 5}, 9, 10, ORDERED),
        ({"REPLAN_AT_STEP": 10}, 9, 10, Due(SCHEDULE, replan=True)),
        ({"REPLAN_AT_STEP": 10, "SAVE_AT_STEP": -10}, 9, 10, Due(FORCED, replan=True)),
        ({"REPLAN_AT_STEP": 10}, 10, 11, None),
    ],
    ids=[
        "nothing-asked",
        "a-multiple",
        "not-a-multiple",
        "the-old-interval-below-the-change",
        "the-new-interval-not-yet",
        "the-new-interval-from-the-change-on",
        "never-below-the-change",
        "an-order-by-time",
        "an-order-of-people",
        "an-order-that-is-over",
        "an-order-between-two-reports",
        "an-order-outweighs-the-schedule",
        "a-replan-makes-a-save",
        "a-replan-in-an-ordered-save",
        "a-replan-that-is-over",
    ],
)
def test_a_step_is_due_as_the_control_block_says(given, before, step, expected) -> None:
    assert due(words(**given), before, step) == expected
