from __future__ import annotations

import pytest
import torch

from backstay.capture import RNG_KEY
from backstay.errors import WorldSizeChanged
from backstay.saved_objects import find, keep_or_merge


class Mergeable:
    def merge_state_dicts(self, states):
        return {"seen": sum(state["seen"] for state in states)}


def test_what_all_saved_ranks_had_alike_fits_any_world() -> None:
    value = {"groups": [1, 2], "rate": torch.tensor([0.5]), "betas": (0.9, 0.99)}
    by_rank = {rank: {"optimizer": {**value, "rate": torch.tensor([0.5])}} for rank in range(3)}

    values, left = keep_or_merge(by_rank, {}, "error", "3 ranks to 1")

    assert values["optimizer"]["betas"] == (0.9, 0.99)
    assert left == []


@pytest.mark.parametrize(
    "other",
    [{"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([1, 2])}, {"x": [1.0, 2.0]}, {}],
    ids=["another-value", "another-dtype", "another-type", "missing"],
)
def test_any_difference_counts(other) -> None:
    by_rank = {0: {"a": {"x": torch.tensor([1.0, 2.0])}}, 1: {"a": other}}

    with pytest.raises(WorldSizeChanged, match="its own a"):
        keep_or_merge(by_rank, {}, "error", "2 ranks to 1")


def test_every_value_that_does_not_fit_is_named_at_once() -> None:
    by_rank = {0: {"data": 1, RNG_KEY: 5, "same": 1}, 1: {"data": 2, RNG_KEY: 6, "same": 1}}

    with pytest.raises(WorldSizeChanged, match="its own data, random number generators") as caught:
        keep_or_merge(by_rank, {}, "error", "2 ranks to 1")

    assert 'Checkpointer(on_world_change="reset")' in str(caught.value)


def test_reset_leaves_them_and_says_so() -> None:
    by_rank = {0: {"data": 1, "same": 1}, 1: {"data": 2, "same": 1}}

    values, left = keep_or_merge(by_rank, {}, "reset", "2 ranks to 1")

    assert values == {"same": 1}
    assert left == ["data: another one on each saved rank, left as the script made it"]


def test_a_stateful_that_can_merge_is_asked_with_the_states_in_order_of_ranks() -> None:
    by_rank = {rank: {"data.train": {"seen": 10**rank}} for rank in (1, 0, 2)}

    values, _ = keep_or_merge(by_rank, {"data": {"train": Mergeable()}}, "error", "3 ranks to 2")

    assert values == {"data.train": {"seen": 111}}


def test_things_are_found_by_their_path_in_nested_entries() -> None:
    entries = {"a": [{"b": 5}], "with.dot": 6}

    assert find(entries, "a.0.b") == 5
    assert find(entries, "with.dot") == 6
    assert find(entries, "a.7.b") is None
    assert find(entries, "nothing.here") is None
