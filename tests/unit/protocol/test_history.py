from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.history import (
    Lineage,
    chain_after,
    lineage_of,
    newest_lineage,
    newest_record,
)
from support.protocol_values import point, record

THIRD = Lineage(3, ((2, 8), (1, 5)))


@pytest.mark.parametrize(
    ("step", "attempt", "expected"),
    [
        pytest.param(100, 3, True, id="its own checkpoints"),
        pytest.param(8, 2, True, id="the base"),
        pytest.param(7, 2, True, id="before the base in its attempt"),
        pytest.param(9, 2, False, id="beyond where the chain leaves"),
        pytest.param(5, 1, True, id="two attempts back"),
        pytest.param(6, 1, False, id="beyond, two attempts back"),
        pytest.param(1, 4, False, id="a newer attempt"),
        pytest.param(1, 0, False, id="an unknown attempt"),
    ],
)
def test_a_checkpoint_is_history_up_to_where_the_chain_leaves_its_attempt(
    step: int, attempt: int, expected: bool
) -> None:
    assert THIRD.contains(point(step, attempt)) is expected


def test_an_attempt_extends_the_lineage_of_the_one_it_starts_from() -> None:
    assert THIRD.extend(4, point(10, 3)) == Lineage(4, ((3, 10), (2, 8), (1, 5)))


def test_going_back_to_an_older_attempt_forgets_what_came_between() -> None:
    assert THIRD.extend(4, point(4, 1)) == Lineage(4, ((1, 4),))
    assert THIRD.extend(4, point(6, 2)) == Lineage(4, ((2, 6), (1, 5)))


def test_a_start_from_nothing_has_no_history() -> None:
    assert THIRD.extend(4, None) == Lineage(4)
    assert Lineage(4).base is None


def test_the_base_is_the_nearest_link() -> None:
    assert THIRD.base == point(8, 2)


def test_a_base_off_the_lineage_is_refused() -> None:
    with pytest.raises(ValueError, match="not on the lineage of attempt 3"):
        THIRD.extend(4, point(9, 2))


def test_a_record_stands_for_its_lineage() -> None:
    assert lineage_of(record(3, point(8, 2), chain=THIRD.chain)) == THIRD


def test_the_newest_record_is_that_of_the_greatest_attempt() -> None:
    assert newest_record([]) is None
    assert newest_record([record(1), record(3), record(2)]) == record(3)


def test_of_equal_records_the_one_that_ran_is_told() -> None:
    newest = newest_record([record(1, ran=False), record(1, ran=True)])
    assert newest is not None
    assert newest.ran


def test_the_chain_of_a_base_on_the_lineage_comes_from_the_head() -> None:
    assert chain_after(THIRD, point(8, 2), {}) == ((2, 8), (1, 5))
    assert chain_after(record(3, point(8, 2), chain=THIRD.chain), point(9, 3), {}) == (
        (3, 9),
        (2, 8),
        (1, 5),
    )


def test_a_base_off_the_lineage_brings_the_chain_of_its_manifests() -> None:
    assert chain_after(THIRD, point(20, 2), {2: ((1, 5),)}) == ((2, 20), (1, 5))
    assert chain_after(None, point(20, 2), {2: ((1, 5),)}) == ((2, 20), (1, 5))


def test_history_that_nothing_tells_is_forgotten_rather_than_guessed() -> None:
    assert chain_after(THIRD, point(20, 2), {}) == ((2, 20),)
    assert chain_after(THIRD, None, {}) == ()


def test_records_and_manifests_tell_alike_of_the_newest_attempt() -> None:
    assert newest_lineage([], {}) is None
    assert newest_lineage([record(1)], {}) == Lineage(1)
    assert newest_lineage([record(1)], {3: THIRD.chain}) == THIRD
    assert newest_lineage([record(4, point(1, 3))], {3: THIRD.chain}) == Lineage(4, ((3, 1),))
    assert newest_lineage([record(3, point(8, 2), chain=THIRD.chain)], {3: ()}) == THIRD


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8))
def test_every_chain_that_grows_step_by_step_contains_all_its_bases(
    choices: list[tuple[int, int]],
) -> None:
    """Each attempt starts from any checkpoint on the lineage; the lineage then holds it."""
    lineage = Lineage(1)
    for number, (step, back) in enumerate(choices, start=2):
        links = ((lineage.attempt, 10**6), *lineage.chain)
        attempt, cut = links[min(back, len(links) - 1)]
        base = point(min(step, cut), attempt)
        lineage = lineage.extend(number, base)
        assert lineage.contains(base)
        assert lineage.base == base
        assert not lineage.contains(point(base.step + 1, base.attempt))
        assert [a for a, _ in lineage.chain] == sorted((a for a, _ in lineage.chain), reverse=True)
