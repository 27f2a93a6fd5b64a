from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from backstay.boxes import Box, intersect, is_run, position, subtract


def boxes(dims: int) -> st.SearchStrategy[Box]:
    return st.tuples(
        st.tuples(*[st.integers(0, 5)] * dims), st.tuples(*[st.integers(1, 5)] * dims)
    ).map(lambda pair: Box(*pair))


pairs = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims)))


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(a, b) for a, b in zip(box.offsets, box.stops, strict=True)]
    return set(itertools.product(*ranges))


@given(pairs)
def test_the_intersection_is_what_both_boxes_contain(pair: tuple[Box, Box]) -> None:
    common = intersect(*pair)

    assert (cells(common) if common else set()) == cells(pair[0]) & cells(pair[1])


@given(pairs)
def test_what_is_left_after_a_cut_is_the_rest_without_overlap(pair: tuple[Box, Box]) -> None:
    left = subtract(*pair)

    assert set().union(*map(cells, left)) == cells(pair[0]) - cells(pair[1])
    assert sum(box.volume for box in left) == len(cells(pair[0]) - cells(pair[1]))


@given(boxes(3))
def test_a_box_is_a_run_exactly_when_its_elements_follow_each_other(box: Box) -> None:
    shape = tuple(10 for _ in box.offsets)
    indices = torch.arange(1000).view(shape)
    for dim, (start, stop) in enumerate(zip(box.offsets, box.stops, strict=True)):
        indices = indices[(slice(None),) * dim + (slice(start, stop),)]
    flat = indices.reshape(-1)

    assert is_run(box.lengths, shape) == bool((flat.diff() == 1).all())
    assert position(box.offsets, shape) == flat[0]
