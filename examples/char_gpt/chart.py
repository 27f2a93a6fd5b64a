"""Draws a plain line chart as SVG: scales, ticks, axes, lines, spans and numbered markers.

Pure; used by report.py. Colours are CSS classes, so that the page decides them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 46, 44


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers from `low` to `high`."""
    if high <= low or most < 1:
        return [low]
    raw = (high - low) / most
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(kw_only=True)
class Chart:
    """A drawing area with two linear scales. Later parts lie over earlier ones."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    label: str
    """What a screen reader says."""
    x_title: str
    y_title: str
    width: int = 960
    height: int = 360
    _parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        """Pixel of a value on the horizontal axis."""
        low, high = self.x_range
        return _LEFT + (value - low) / ((high - low) or 1) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixel of a value on the vertical axis."""
        low, high = self.y_range
        room = self.height - _TOP - _BOTTOM
        return self.height - _BOTTOM - (value - low) / ((high - low) or 1) * room

    def axes(self) -> None:
        """Grid lines, numbers and titles."""
        bottom, right = self.height - _BOTTOM, self.width - _RIGHT
        for value in ticks(*self.y_range, 5):
            y = self.y(value)
            self._parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            self._text(_LEFT - 9, y + 4, f"{value:g}", "tick end")
        for value in ticks(*self.x_range, 9):
            x = self.x(value)
            self._parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
            self._text(x, bottom + 20, f"{value:g}", "tick middle")
        self._parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
        self._text((_LEFT + right) / 2, self.height - 6, self.x_title, "title middle")
        self._text(8, 16, self.y_title, "title")

    def line(self, points: Sequence[Point], css: str) -> None:
        """A line through points, in the order given."""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        if path:
            self._parts.append(f'<path class="line {escape(css)}" d="M{path}"/>')

    def span(self, start: float, stop: float, css: str, hint: str) -> None:
        """A shaded stretch of the horizontal axis; `hint` shows under the pointer."""
        x, width = self.x(start), max(2.0, self.x(stop) - self.x(start))
        self._parts.append(
            f'<rect class="span {escape(css)}" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" '
            f'height="{self.height - _TOP - _BOTTOM}"><title>{escape(hint)}</title></rect>'
        )

    def marker(self, at: float, number: int, text: str, css: str, hint: str) -> None:
        """A numbered disc on a dashed line, with a short text beside it."""
        x = self.x(at)
        flip = x > self.width - 130
        self._parts.append(
            f'<g class="marker {escape(css)}"><title>{escape(hint)}</title>'
            f'<path d="M{x:.1f} {_TOP - 6}V{self.height - _BOTTOM}"/>'
            f'<circle cx="{x:.1f}" cy="{_TOP - 16}" r="10"/>'
            f'<text class="number" x="{x:.1f}" y="{_TOP - 12}">{number}</text></g>'
        )
        side = "mark end" if flip else "mark"
        self._text(x + (-15 if flip else 15), _TOP - 12, text, side)

    def note(
        self, x: float, y: float, text: str, css: str, *, dx: float = 0, dy: float = 0
    ) -> None:
        """A text at a point of the scales, moved by pixels."""
        self._text(self.x(x) + dx, self.y(y) + dy, text, css)

    def render(self) -> str:
        """The SVG element."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.label)}">{"".join(self._parts)}</svg>'
        )

    def _text(self, x: float, y: float, text: str, css: str) -> None:
        self._parts.append(
            f'<text class="{escape(css)}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
        )


def bounds(values: Iterable[float], margin: float = 0.05) -> tuple[float, float]:
    """Smallest and greatest, with some room around them."""
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    room = (high - low) * margin or 1.0
    return low - room, high + room
