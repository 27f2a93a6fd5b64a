"""What is measured, against which limit, and how it is told: ratios, verdicts, table and JSON.

A sample is one subject's figure and its limit's, taken one right after the other. A row is the
median of the samples' ratios: a busy machine shifts both, so it moves a ratio far less.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass

MET, MISSED, TOLD = "met", "MISSED", ""


@dataclass(frozen=True)
class Figure:
    """One row of the table, without its samples."""

    key: str
    what: str
    limit: str
    """What it is compared with."""
    unit: str = "s"
    target: float | None = None
    """Of the ratio; None: told only."""
    higher_is_better: bool = False


FIGURES = (
    Figure("sync", "synchronous save: the call", "memcpy, one thread", target=1.0),
    Figure("call", "overlapped save: step() with a save due", "2 ms", "ms", 1.0),
    Figure("hook", "overlapped save: the optimizer's wait for it", "1 ms (none)", "ms", 1.0),
    Figure("first", "first save of a process: the call", "its later saves (median)", target=1.0),
    Figure("durable", "save() to durable on disk, training", "O_DIRECT + fsync", target=2.0),
    Figure("memory", "restore from memory, verified", "read(2), one thread", target=1.0),
    Figure("local", "restore from a cached file, verified", "read(2), one thread", target=1.0),
    Figure("peer", "pull from a peer's memory, verified", "one TCP stream", "GB/s", 1.3, True),
    Figure("neighbor", "pull of a neighbour's copy, verified", "one TCP stream", "GB/s", 1.3, True),
    Figure("extra", "extra memory: RSS of both + two slots", "the state", "GB", 2.1),
    Figure("sidecar", "  of it: the sidecar's RSS", "the state", "GB"),
    Figure("slow", "training steps while a save becomes durable", "steps without one"),
    Figure("fresh", "restore from memory, optimizer state to be made", "read(2), one thread"),
    Figure("round", "the whole restore() around such a load", "read(2), one thread"),
    Figure("keep", "save() to the copy on a neighbour's disk", "O_DIRECT + fsync"),
    Figure("torch.save", "torch.save to tmpfs", "memcpy, one thread"),
    Figure("safetensors", "safetensors save_file to tmpfs", "memcpy, one thread"),
    Figure("dcp", "dcp.async_save (thread): the call", "memcpy, one thread"),
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One subject and its limit, in the figure's unit."""

    key: str
    value: float
    limit: float
    load: float
    """One-minute load average at that moment; the benchmark's own part is about 1."""

    @property
    def ratio(self) -> float:
        return self.value / self.limit


def sample(key: str, value: float, limit: float) -> Sample:
    """A sample taken now."""
    return Sample(key, value, limit, os.getloadavg()[0])


@dataclass(frozen=True)
class Row:
    """One figure as measured: medians over its samples."""

    key: str
    what: str
    unit: str
    value: float
    limit: float
    compared_with: str
    ratio: float
    lowest: float
    highest: float
    num_samples: int
    target: float | None
    higher_is_better: bool
    load: float
    verdict: str


def rows(samples: list[Sample]) -> list[Row]:
    """Every figure that has samples, in the order of FIGURES."""
    return [
        _row(figure, found)
        for figure in FIGURES
        if (found := [s for s in samples if s.key == figure.key])
    ]


def _row(figure: Figure, samples: list[Sample]) -> Row:
    ratio = statistics.median(s.ratio for s in samples)
    return Row(
        key=figure.key,
        what=figure.what,
        unit=figure.unit,
        value=statistics.median(s.value for s in samples),
        limit=statistics.median(s.limit for s in samples),
        compared_with=figure.limit,
        ratio=ratio,
        lowest=min(s.ratio for s in samples),
        highest=max(s.ratio for s in samples),
        num_samples=len(samples),
        target=figure.target,
        higher_is_better=figure.higher_is_better,
        load=statistics.fmean(s.load for s in samples),
        verdict=_verdict(figure, ratio),
    )


def _verdict(figure: Figure, ratio: float) -> str:
    if figure.target is None:
        return TOLD
    reached = ratio >= figure.target if figure.higher_is_better else ratio <= figure.target
    return MET if reached else MISSED


def table(found: list[Row]) -> str:
    """For people; it is a Markdown table too."""
    head = ("what", "value", "limit", "compared with", "ratio", "range", "n", "target", "", "load")
    lines = [head, *(_cells(row) for row in found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    sign = ">=" if row.higher_is_better else "<="
    return (
        row.what,
        f"{row.value:.3g} {row.unit}",
        f"{row.limit:.3g} {row.unit}",
        row.compared_with,
        f"{row.ratio:.2f}",
        f"{row.lowest:.2f}-{row.highest:.2f}",
        str(row.num_samples),
        "" if row.target is None else f"{sign} {row.target:.2g}",
        row.verdict,
        f"{row.load:.1f}",
    )


def as_json(found: list[Row], about: dict[str, object]) -> str:
    """For programs."""
    return json.dumps({**about, "figures": [asdict(row) for row in found]}, indent=2)
