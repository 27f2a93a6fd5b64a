"""The charts of a report as one PNG, for places that show no HTML. Used by demo.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from examples.char_gpt.incidents import last_losses
from examples.char_gpt.report import Story

matplotlib.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIER = {"memory": "#0b7a75", "local": "#a66300", "neighbor": "#7a3fc0", "remote": "#c0392b"}
_REFERENCE, _DISTURBED, _INK, _SOFT, _RULE = "#b9cdea", "#17458f", "#16191d", "#5a6472", "#dfe3e8"


def draw(story: Story, path: Path) -> None:
    """Write the PNG: loss over steps above, steps over time below."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(11, 8.6), height_ratios=(3, 2), layout="constrained"
    )
    _draw_losses(story, upper)
    _draw_time(story, lower)
    figure.suptitle(_title(story), x=0.012, ha="left", fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def _title(story: Story) -> str:
    verdict = "bit for bit equal to" if story.comparison.equal else "NOT equal to"
    return f"Broken {len(story.incidents)} times, ended {verdict} the undisturbed run"


def _draw_losses(story: Story, axes: Axes) -> None:
    reference, disturbed = last_losses(story.reference.losses), last_losses(story.disturbed.losses)
    axes.plot(
        *_columns(sorted(reference.items())), color=_REFERENCE, linewidth=6, label="undisturbed run"
    )
    axes.plot(
        *_columns(sorted(disturbed.items())), color=_DISTURBED, linewidth=1.3, label="disturbed run"
    )
    for number, incident in enumerate(story.incidents, 1):
        tier = incident.failure.tier
        axes.axvspan(incident.base_step, incident.step, color=_TIER[tier], alpha=0.16, linewidth=0)
        _mark(axes, incident.step, number, f"from {tier}", _TIER[tier])
    axes.set_xlim(0, story.num_steps or 1)
    axes.legend(loc="upper right", frameon=False, labelcolor=_INK)
    _finish(axes, "step", "training loss, mean of all ranks")


def _draw_time(story: Story, axes: Axes) -> None:
    for run, color, width in (
        (story.reference, _REFERENCE, 3.5),
        (story.disturbed, _DISTURBED, 1.3),
    ):
        axes.plot(*_columns(run.steps_over_time()), color=color, linewidth=width)
    for number, incident in enumerate(story.incidents, 1):
        color, start = _TIER[incident.failure.tier], incident.at - story.disturbed.start
        axes.axvspan(start, start + incident.resume_seconds, color=color, alpha=0.16, linewidth=0)
        _mark(axes, start, number, f"{incident.resume_seconds:.1f} s", color)
    axes.set_xlim(0, max(story.disturbed.seconds, story.reference.seconds, 1))
    axes.set_ylim(0, story.num_steps or 1)
    _finish(axes, "seconds since the run was started", "step")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _mark(axes: Axes, x: float, number: int, text: str, color: str) -> None:
    axes.axvline(x, color=color, linewidth=1.2, linestyle=(0, (4, 4)))
    place: dict[str, Any] = {
        "xy": (x, 1),
        "xycoords": axes.get_xaxis_transform(),
        "textcoords": "offset points",
    }
    disc = {"boxstyle": "circle,pad=0.25", "facecolor": color, "edgecolor": "none"}
    axes.annotate(
        str(number),
        **place,
        xytext=(0, 12),
        ha="center",
        va="center",
        color="white",
        fontsize=9,
        fontweight="bold",
        bbox=disc,
    )
    axes.annotate(text, **place, xytext=(12, 12), va="center", color=_INK, fontsize=9.5)


def _finish(axes: Axes, x_title: str, y_title: str) -> None:
    axes.set_xlabel(x_title, color=_SOFT)
    axes.set_ylabel(y_title, color=_SOFT)
    axes.grid(axis="y", color=_RULE)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
