"""The report is drawn from a recording: whole, without outside parts, true whatever happened."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.char_gpt.chart import ticks
from examples.char_gpt.compare import Comparison, Part
from examples.char_gpt.picture import draw
from examples.char_gpt.report import Run, Story, loss_chart, render, time_chart
from support.demo_recording import record

EQUAL = Comparison(
    parts=(
        Part(title="Parameters and buffers", num_values=76, num_bytes=10_806_528, num_different=0),
    ),
    differences=(),
)


@pytest.fixture
def story() -> Story:
    disturbed, reference = record(), record(())
    return Story(
        disturbed=Run(events=disturbed[0], losses=disturbed[1]),
        reference=Run(events=reference[0], losses=reference[1]),
        comparison=EQUAL,
        machine={"Processor": "A <fast> one"},
        made="30 November 2026, 19:30 UTC",
    )


def test_the_report_tells_verdict_incidents_and_machine(story: Story) -> None:
    page = render(story)
    assert "Broken 4 times, ended bit for bit equal" in page
    for title in ("One trainer process killed", "Every node destroyed"):
        assert title in page
    assert page.count('class="disc') == 4
    assert "A &lt;fast&gt; one" in page
    assert "The statement of a class" in page
    assert "2.7 million" in page


def test_the_report_needs_nothing_from_outside_and_has_no_hole(story: Story) -> None:
    page = render(story)
    assert not re.search(r'(src|href)="|url\(|@import|<script', page)
    assert "$" not in page


def test_both_colour_schemes_name_the_same_colours(story: Story) -> None:
    light, dark = render(story).split("prefers-color-scheme: dark")
    names = [set(re.findall(r"(--[a-z-]+): #", part)) for part in (light, dark)]
    assert names[0] == names[1]


@pytest.mark.parametrize("chart", [loss_chart, time_chart])
def test_charts_are_well_formed_and_mark_every_incident(chart: object, story: Story) -> None:
    assert callable(chart)
    tree = ElementTree.fromstring(chart(story))
    assert len(tree.findall(".//circle")) == 4
    assert len(tree.findall("rect")) == 4
    assert len([p for p in tree.findall("path") if "line" in p.get("class", "")]) == 2


def test_a_difference_turns_the_verdict_and_is_listed(story: Story) -> None:
    different = Comparison(parts=EQUAL.parts, differences=("model.x: 1 of 4 bytes differ",))
    page = render(dataclasses.replace(story, comparison=different))
    assert "Not as it should be" in page
    assert "model.x: 1 of 4 bytes differ" in page


def test_an_unexpected_tier_turns_the_verdict(story: Story) -> None:
    events = [dict(event) for event in story.disturbed.events]
    last = [event for event in events if event["event"] == "recovered"][-1]
    last["bytes_by_tier"] = {"memory": 5}
    disturbed = Run(events=events, losses=story.disturbed.losses)
    page = render(dataclasses.replace(story, disturbed=disturbed))
    assert "Every node destroyed: read from memory; remote should have served." in page


def test_a_loss_that_was_not_the_same_is_counted(story: Story) -> None:
    losses = [dict(line) for line in story.reference.losses]
    losses[-3]["loss"] += 1e-9
    reference = Run(events=story.reference.events, losses=losses)
    assert "1 differ" in render(dataclasses.replace(story, reference=reference))


def test_a_run_without_incidents_or_losses_still_makes_a_page(story: Story) -> None:
    empty = Run(events=[{"event": "job_started", "time": 1.0}], losses=[])
    page = render(dataclasses.replace(story, disturbed=empty, reference=empty))
    assert "Broken 0 times" in page


def test_the_picture_is_a_png_of_a_good_size(story: Story, tmp_path: Path) -> None:
    draw(story, tmp_path / "report.png")
    data = (tmp_path / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") > 1000


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 420, 9) == [0, 50, 100, 150, 200, 250, 300, 350, 400]
    assert ticks(1.9, 4.7, 5) == [2, 3, 4]
    assert ticks(3, 3, 5) == [3]
