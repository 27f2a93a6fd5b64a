"""Which slot may be overwritten: a step that all ranks have must stay in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.slotchoice import Choice, SlotContent, Word, choose_slot
from backstay_protocol.ids import CheckpointId

ATTEMPT, OLDER = 7, 3
CHAIN = ((OLDER, 50),)


def choose(*steps: int | None, complete: int = 0, safe: int = 0, num_slots: int = 2) -> Choice:
    """Slots that hold these steps; negative ones are of the attempt before."""
    contents = [
        SlotContent(
            index,
            None if step is None else CheckpointId(abs(step), ATTEMPT if step > 0 else OLDER),
        )
        for index, step in enumerate(steps)
    ]
    return choose_slot(
        contents, attempt=ATTEMPT, chain=CHAIN, word=Word(complete, safe), num_slots=num_slots
    )


def test_an_empty_slot_comes_first() -> None:
    assert choose(60, None).now == (1,)


def test_what_is_off_the_lineage_may_go_at_once() -> None:
    assert choose(60, -51).now == (1,)


def test_the_older_slot_goes_while_all_ranks_have_the_newer() -> None:
    assert choose(70, 60, complete=70).now == (1,)


def test_without_the_word_nothing_goes_at_once_and_the_unconfirmed_at_last() -> None:
    choice = choose(60, 70, complete=60)
    assert choice.now == ()
    assert choice.at_last == (1,)
    assert "step 70" in choice.why


def test_the_base_counts_as_confirmed() -> None:
    assert choose(-50, 60).at_last == (1,)
    assert choose(-50, 60, complete=60).now == (0,)


def test_when_nothing_is_confirmed_the_older_goes_at_last() -> None:
    assert choose(70, 60).at_last == (1,)


def test_the_only_full_slot_is_kept_while_the_second_is_being_made() -> None:
    assert choose_slot(
        [SlotContent(0, CheckpointId(60, ATTEMPT)), SlotContent(1, None, usable=False)],
        attempt=ATTEMPT,
        chain=CHAIN,
        word=Word(60),
        num_slots=2,
    ) == Choice((), (), "the slots are not ready yet")


@pytest.mark.parametrize(("safe", "now"), [(0, ()), (59, ()), (60, (0,)), (61, (0,))])
def test_a_single_slot_goes_when_its_step_is_safe_elsewhere(safe: int, now: object) -> None:
    choice = choose(60, safe=safe, num_slots=1)
    assert choice.now == now
    assert choice.at_last == ()


@given(
    steps=st.lists(st.one_of(st.none(), st.integers(-60, 90)), min_size=2, max_size=4),
    complete=st.integers(0, 90),
)
def test_no_choice_gives_up_the_newest_confirmed_step(
    steps: list[int | None], complete: int
) -> None:
    steps = [step or None for step in steps]
    choice = choose(*steps, complete=complete, num_slots=len(steps))
    confirmed = [i for i, step in enumerate(steps) if step == complete and complete]
    confirmed = confirmed or [i for i, step in enumerate(steps) if step == -50]
    for index in (*choice.now, *choice.at_last):
        if steps[index] is not None and confirmed:
            assert [index] != confirmed
