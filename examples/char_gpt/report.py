"""The report of a demo: one HTML file that needs nothing else, made of what was recorded.

Pure: a function of a Story to text; demo.py writes it, picture.py draws the same as a PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from examples.char_gpt.chart import Chart, bounds
from examples.char_gpt.compare import Comparison
from examples.char_gpt.incidents import (
    TIERS,
    Event,
    Incident,
    Losses,
    human_bytes,
    human_sources,
    last_losses,
    read_incidents,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as it was recorded."""

    events: Sequence[Event]
    losses: Losses

    @property
    def start(self) -> float:
        """When it was started, seconds since the epoch."""
        return float(self.events[0]["time"])

    @property
    def seconds(self) -> float:
        """How long it took."""
        return float(self.events[-1]["time"]) - self.start

    def steps_over_time(self) -> list[tuple[float, float]]:
        """(seconds since the start, step) of every step, in the order in which they were done."""
        return [(line["time"] - self.start, line["step"]) for line in self.losses if "loss" in line]

    def fact(self, name: str) -> str:
        """A field that the trainer wrote once, such as its sample; empty if it never did."""
        return str(next((line[name] for line in reversed(self.losses) if name in line), ""))


@dataclass(frozen=True, kw_only=True)
class Story:
    """All that a report tells."""

    disturbed: Run
    reference: Run
    comparison: Comparison
    machine: Mapping[str, str]
    """Fact -> value, in the order to be shown."""
    made: str
    """Date and time, for people."""

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What was broken."""
        return read_incidents(self.disturbed.events, self.disturbed.losses)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return max(last_losses(self.reference.losses), default=0)


def render(story: Story) -> str:
    """The page."""
    return _PAGE.substitute(
        made=escape(story.made),
        style=_STYLE,
        verdict=_verdict(story),
        tiles=_tiles(story),
        loss_chart=loss_chart(story),
        time_chart=time_chart(story),
        incidents="".join(_incident_row(i, n) for n, i in enumerate(story.incidents, 1)),
        parts="".join(_part_row(p) for p in _all_parts(story)),
        differences=_differences(story.comparison),
        sample=escape(story.disturbed.fact("text")),
        num_steps=story.num_steps,
        parameters=_millions(story.disturbed.fact("parameters")),
        machine="".join(
            f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in story.machine.items()
        ),
    )


def loss_chart(story: Story) -> str:
    """Loss over steps: the undisturbed run as a wide band, the disturbed one as a line in it."""
    reference, disturbed = last_losses(story.reference.losses), last_losses(story.disturbed.losses)
    chart = Chart(
        x_range=(0, max(1, story.num_steps)),
        y_range=bounds([*reference.values(), *disturbed.values()]),
        label="Training loss over steps of the disturbed and the undisturbed run",
        x_title="step",
        y_title="training loss, mean of all ranks",
    )
    for incident in story.incidents:
        hint = f"{incident.lost_steps} steps trained again"
        chart.span(incident.base_step, incident.step, incident.failure.tier, hint)
    chart.axes()
    chart.line(sorted(reference.items()), "reference")
    chart.line(sorted(disturbed.items()), "disturbed")
    for number, incident in enumerate(story.incidents, 1):
        chart.marker(
            incident.step,
            number,
            f"from {incident.failure.tier}",
            incident.failure.tier,
            f"{incident.failure.title}: back at step {incident.base_step}",
        )
    return chart.render()


def time_chart(story: Story) -> str:
    """Step over time: where the disturbed run stood still, fell back and went on."""
    disturbed, reference = story.disturbed, story.reference
    chart = Chart(
        x_range=(0, max(disturbed.seconds, reference.seconds, 1)),
        y_range=(0, max(1, story.num_steps)),
        label="Steps done over time by the disturbed and the undisturbed run",
        x_title="seconds since the run was started",
        y_title="step",
        height=300,
    )
    for incident in story.incidents:
        start = incident.at - disturbed.start
        hint = f"{incident.resume_seconds:.1f} s from the failure to the next step"
        chart.span(start, start + incident.resume_seconds, incident.failure.tier, hint)
    chart.axes()
    chart.line(reference.steps_over_time(), "reference narrow")
    chart.line(disturbed.steps_over_time(), "disturbed")
    for number, incident in enumerate(story.incidents, 1):
        chart.marker(
            incident.at - disturbed.start,
            number,
            f"{incident.resume_seconds:.1f} s",
            incident.failure.tier,
            incident.failure.title,
        )
    return chart.render()


def _verdict(story: Story) -> str:
    problems = [i for i in story.incidents if i.problem]
    if story.comparison.equal and not problems:
        title = f"Broken {len(story.incidents)} times, ended bit for bit equal"
        text = (
            "All parameters, the optimizer state, the random number generators and the data "
            "position are those of the same job run undisturbed."
        )
        return f'<div class="verdict good"><strong>{title}</strong><p>{text}</p></div>'
    bad = len(story.comparison.differences)
    sentences = [f"{i.failure.title}: {i.problem}." for i in problems]
    if bad:
        sentences.append(f"{bad} names differ between the two runs; they are listed below.")
    elif not story.comparison.equal:
        sentences.append("There was nothing to compare.")
    return (
        '<div class="verdict bad"><strong>Not as it should be</strong>'
        f"<p>{escape(' '.join(sentences))}</p></div>"
    )


def _tiles(story: Story) -> str:
    incidents = story.incidents
    lost = sum(i.lost_steps for i in incidents)
    slowest = max((i.resume_seconds for i in incidents), default=0.0)
    noticed = max((i.detect_seconds for i in incidents), default=0.0)
    tiles = (
        (f"{len(incidents)}", "failures survived without a hand laid on"),
        (f"{lost}", f"of {story.num_steps} steps had to be trained again"),
        (f"{noticed:.1f} s", "at most until a failure was noticed"),
        (f"{slowest:.1f} s", "at most from a failure to the next step"),
    )
    return "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text in tiles
    )


def _incident_row(incident: Incident, number: int) -> str:
    failure = incident.failure
    where = "all replicas" if failure.replica is None else f"replica {failure.replica}"
    sources = "".join(
        f'<span class="chip {tier}">{tier} {human_bytes(incident.bytes_by_tier[tier])}</span>'
        for tier in TIERS
        if incident.bytes_by_tier.get(tier)
    )
    ranks = "".join(
        f'<small class="rank">rank {rank}: {escape(human_sources(read))}</small>'
        for rank, read in sorted(incident.bytes_by_rank.items())
    )
    problem = f'<p class="problem">{escape(incident.problem)}</p>' if incident.problem else ""
    return (
        f'<tr><td><span class="disc {failure.tier}">{number}</span></td>'
        f"<td><b>{escape(failure.title)}</b><small>{escape(where)}; {escape(failure.detail)}"
        f"</small></td><td>{sources}{ranks}{problem}</td>"
        f'<td class="n">{incident.step}</td><td class="n">{incident.base_step}</td>'
        f'<td class="n">{incident.lost_steps}</td>'
        f'<td class="n">{incident.detect_seconds:.1f} s</td>'
        f'<td class="n">{incident.resume_seconds:.1f} s</td></tr>'
    )


def _all_parts(story: Story) -> list[tuple[str, int, int, int]]:
    """(title, values, bytes, different) of all that was compared, the logged losses too."""
    one, other = last_losses(story.disturbed.losses), last_losses(story.reference.losses)
    different = sum(one.get(step) != other.get(step) for step in one.keys() | other.keys())
    rows = [(p.title, p.num_values, p.num_bytes, p.num_different) for p in story.comparison.parts]
    return [*rows, ("Loss of every step", len(other), 8 * len(other), different)]


def _part_row(part: tuple[str, int, int, int]) -> str:
    title, num_values, num_bytes, different = part
    state = f'<span class="no">{different} differ</span>' if different else "equal"
    mark = "" if different else '<span class="yes">✓</span> '
    return (
        f'<tr><td>{escape(title)}</td><td class="n">{num_values:,}</td>'
        f'<td class="n">{human_bytes(num_bytes)}</td><td class="n">{mark}{state}</td></tr>'
    )


def _differences(comparison: Comparison, most: int = 50) -> str:
    if not comparison.differences:
        return ""
    items = "".join(f"<li><code>{escape(d)}</code></li>" for d in comparison.differences[:most])
    more = len(comparison.differences) - most
    rest = f"<p>and {more} more.</p>" if more > 0 else ""
    return f"<h3>What differs</h3><ul>{items}</ul>{rest}"


def _millions(number: str) -> str:
    return f"{int(number) / 1e6:.1f} million" if number.isdigit() else "a few million"


_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16191d; --soft: #5a6472; --rule: #dfe3e8;
  --reference: #b9cdea; --disturbed: #17458f; --good: #0b7a4b; --good-back: #e5f5ec;
  --bad: #b3261e; --bad-back: #fdeceb;
  --memory: #0b7a75; --local: #a66300; --neighbor: #7a3fc0; --remote: #c0392b; --on: #ffffff; }
@media (prefers-color-scheme: dark) { :root {
  --page: #101317; --card: #181c22; --ink: #e8ebef; --soft: #9aa5b4; --rule: #2b323b;
  --reference: #3d5a85; --disturbed: #a9cbff; --good: #63d69c; --good-back: #12291e;
  --bad: #ff8a80; --bad-back: #331716;
  --memory: #4ccbc4; --local: #f0ae4a; --neighbor: #bd93f9; --remote: #ff8573; --on: #101317; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 36px 20px 60px; }
header p, .lead, figcaption, small, footer { color: var(--soft); }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0 0 4px; } h3 { font-size: 15px; margin: 18px 0 6px; }
header p { margin: 0 0 20px; max-width: 74ch; } .lead { margin: 0 0 14px; max-width: 78ch; }
section, .tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
section { padding: 22px 24px; margin-top: 18px; }
.verdict { border-radius: 10px; padding: 16px 20px; border-left: 6px solid; }
.verdict strong { font-size: 19px; } .verdict p { margin: 2px 0 0; }
.verdict.good { background: var(--good-back); border-color: var(--good); }
.verdict.bad { background: var(--bad-back); border-color: var(--bad); }
.good strong, .yes { color: var(--good); } .bad strong, .no, .problem { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  margin-top: 14px; }
.tile { padding: 14px 18px; } .tile b { display: block; font-size: 27px; line-height: 1.2; }
.tile span { color: var(--soft); font-size: 13.5px; }
figure { margin: 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 620px; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; color: var(--soft); font-size: 13.5px;
  margin-bottom: 6px; }
.legend i { display: inline-block; width: 26px; margin-right: 8px; vertical-align: middle; }
.legend .r { height: 8px; background: var(--reference); border-radius: 4px; }
.legend .d { height: 2px; background: var(--disturbed); }
.legend .s { height: 12px; width: 16px; background: var(--soft); opacity: .25; }
svg text { font: 12.5px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .mark { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.line.reference { stroke: var(--reference); stroke-width: 7; }
.line.narrow { stroke-width: 4; } .line.disturbed { stroke: var(--disturbed); stroke-width: 1.6; }
.span { fill: var(--tier); opacity: .16; }
.marker path { stroke: var(--tier); stroke-width: 1.4; stroke-dasharray: 4 4; }
.marker circle { fill: var(--tier); }
svg .number { fill: var(--on); text-anchor: middle; font-weight: 700; font-size: 12px; }
.memory { --tier: var(--memory); } .local { --tier: var(--local); }
.neighbor { --tier: var(--neighbor); } .remote { --tier: var(--remote); }
.scroll { overflow-x: auto; } .wide { min-width: 860px; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 9px 12px 9px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; } td.n:last-child, th.n:last-child { padding-right: 0; }
td small { display: block; font-size: 13px; } .rank { white-space: nowrap; }
th { vertical-align: bottom; } th.n { white-space: normal; }
.disc { display: inline-grid; place-items: center; width: 22px; height: 22px; border-radius: 50%;
  background: var(--tier); color: var(--on); font-weight: 700; font-size: 12.5px; }
.chip { display: inline-block; border: 1px solid var(--tier); color: var(--tier);
  margin: 0 6px 4px 0; border-radius: 20px; padding: 0 9px; font-size: 13px; white-space: nowrap; }
.problem { margin: 2px 0 0; font-size: 13px; }
.two { display: grid; grid-template-columns: 1fr; gap: 0 18px; }
@media (min-width: 820px) { .two { grid-template-columns: 1fr 1fr; } }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13.5px; }
code { font-size: 13px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 8px 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 22px; font-size: 13.5px; }
@media print { body { background: none; } section, .tile { break-inside: avoid; } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Backstay: a training run that was broken and came back</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>A training run that was broken and came back</h1>
<p>A GPT of $parameters parameters, trained for $num_steps steps on three nodes with DDP, while
its processes, memory, disks and nodes were taken away. Backstay brought it back each time from the
nearest storage tier that had the state. Then the same job was run undisturbed, to compare.</p>
</header>
$verdict
<div class="tiles">$tiles</div>

<section>
<h2>Loss</h2>
<p class="lead">One line inside the other: whatever was broken, each step was trained as if nothing
had happened. Shaded steps were trained twice.</p>
<div class="legend"><span><i class="r"></i>undisturbed run</span><span><i class="d"></i>disturbed
run</span><span><i class="s"></i>lost and trained again</span></div>
<figure>$loss_chart</figure>
</section>

<section>
<h2>Progress over time</h2>
<p class="lead">Shaded: from the failure until the first step after it was done. The number beside
each mark says how long that took.</p>
<figure>$time_chart</figure>
</section>

<section>
<h2>Incidents</h2>
<div class="scroll"><table class="wide">
<thead><tr><th></th><th>What was broken</th><th>Where the state came from</th><th
class="n">At<br>step</th><th class="n">Back<br>at</th><th class="n">Steps<br>lost</th><th
class="n">Noticed<br>after</th><th class="n">Resumed<br>after</th></tr></thead>
<tbody>$incidents</tbody>
</table></div>
</section>

<section>
<h2>Comparison with the undisturbed run</h2>
<p class="lead">The last checkpoints of both runs, pulled as plain safetensors files and compared
byte by byte.</p>
<div class="scroll"><table>
<thead><tr><th>State</th><th class="n">Values</th><th class="n">Size</th><th
class="n">Verdict</th></tr></thead>
<tbody>$parts</tbody>
</table></div>
$differences
</section>

<div class="two">
<section>
<h2>What it writes after $num_steps steps</h2>
<p class="lead">The model goes on from “The ”. It has learned letters, not sense: that takes many
more steps.</p>
<pre>$sample</pre>
</section>
<section>
<h2>Where this was run</h2>
<dl>$machine</dl>
</section>
</div>
<footer>Made by <code>scripts/demo</code> on $made. Bytes are what all ranks read together; every
chunk of them was verified against its digest.</footer>
</main>
</body>
</html>
""")
