"""Boxes inside a tensor: which part of what was saved fills which part of what is live.

Pure geometry, used by load.py. A box is where it begins and how long it is in each dimension of the
global tensor; a 0-dimensional tensor has one box, ((), ()).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """Part of a global tensor."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """Where it ends in each dimension."""
        return tuple(map(operator.add, self.offsets, self.lengths))

    def within(self, outer: Box) -> tuple[int, ...]:
        """Where it begins, counted from the beginning of `outer`."""
        return tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """What both contain, or None."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(
        stop - start for start, stop in zip(offsets, map(min, a.stops, b.stops), strict=True)
    )
    return Box(offsets, lengths) if all(n > 0 for n in lengths) else None


def subtract(box: Box, cut: Box) -> list[Box]:
    """What is left of `box` without `cut`, as boxes that do not overlap."""
    common = intersect(box, cut)
    if common is None:
        return [box]
    left = []
    offsets, stops = list(box.offsets), list(box.stops)
    for dim, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
        if offsets[dim] < start:
            left.append(_span(offsets, [*stops[:dim], start, *stops[dim + 1 :]]))
        if stop < stops[dim]:
            left.append(_span([*offsets[:dim], stop, *offsets[dim + 1 :]], stops))
        offsets[dim], stops[dim] = start, stop
    return left


def is_run(lengths: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box of these lengths is one piece in the memory of a row-major `shape`."""
    inner = len(shape)
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    return all(n == 1 for n in lengths[: max(inner - 1, 0)])


def position(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Index of the element at `offsets` in the memory of a row-major `shape`."""
    index = 0
    for offset, length in zip(offsets, shape, strict=True):
        index = index * length + offset
    return index


def _span(offsets: list[int], stops: list[int]) -> Box:
    return Box(tuple(offsets), tuple(b - a for a, b in zip(offsets, stops, strict=True)))
