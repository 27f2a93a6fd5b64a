"""The demo: trains the example, breaks it four times, and proves that nothing was lost.

Started by scripts/demo as `python -m examples.char_gpt.demo`. It runs the job of job.yaml with
`backstay local run`, breaks it with `backstay local fail`, runs the same job undisturbed, compares
the two last checkpoints bit for bit and leaves a report. Exit code 0: all as it should be; 1: not;
130: stopped by Ctrl-C. Whatever happens, nothing is left running.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from examples.char_gpt.account import Account
from examples.char_gpt.compare import Comparison, compare_folders
from examples.char_gpt.incidents import (
    FAILURES,
    Event,
    Failure,
    is_recovery,
    may_inject,
    read_incidents,
)
from examples.char_gpt.localrun import Backstay, DemoFailed
from examples.char_gpt.losses import LossReader
from examples.char_gpt.picture import draw
from examples.char_gpt.report import Run, Story, render

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = Path(__file__).with_name("job.yaml")
REFERENCE = "undisturbed"
MARK = "demo.txt"
MOST_DIFFERENCES_SHOWN = 20


@dataclass
class Director:
    """Says, event by event, when the next failure is due; one at a time, each after recovery."""

    left: list[Failure]
    last_base: int = 0
    under_way: Failure | None = None

    def due(self, event: Event) -> Failure | None:
        """The failure to inject after this event, if any."""
        if self.under_way is not None and is_recovery(self.under_way, event):
            self.under_way = None
            self.last_base = event["base_step"]
        if event["event"] != "progress" or self.under_way is not None or not self.left:
            return None
        if not may_inject(self.left[0], event, self.last_base):
            return None
        self.under_way = self.left.pop(0)
        return self.under_way


class Demo:
    """One demo in one folder."""

    def __init__(self, folder: Path, account: Account) -> None:
        self._folder = folder
        self._account = account
        self._backstay = Backstay(folder / "state")

    def run(self) -> Story:
        """Both runs and the comparison."""
        self._account.heading(f"1. The job, broken {len(FAILURES)} times")
        disturbed = self._run_job(MANIFEST, FAILURES)
        self._account.heading("2. The same job, undisturbed")
        reference = self._run_job(write_reference(self._folder), ())
        self._account.heading("3. Are they the same?")
        comparison = self._compare(_job_name(MANIFEST), f"{_job_name(MANIFEST)}-{REFERENCE}")
        return Story(
            disturbed=disturbed,
            reference=reference,
            comparison=comparison,
            machine=machine_facts(),
            made=f"{datetime.now().astimezone():%d %B %Y, %H:%M %Z}",
        )

    def _run_job(self, manifest: Path, failures: Sequence[Failure]) -> Run:
        name = _job_name(manifest)
        losses = LossReader(self._folder / f"{name}.losses.jsonl")
        director = Director(list(failures))
        events: list[Event] = []
        job = self._backstay.start(manifest, losses.path, self._folder / f"{name}.stderr")
        try:
            with (self._folder / f"{name}.events.jsonl").open("w", buffering=1) as record:
                for event in job.events():
                    record.write(json.dumps(event) + "\n")
                    events.append(event)
                    losses.read()
                    self._tell(event, events, losses, failures)
                    failure = director.due(event)
                    if failure is not None:
                        self._backstay.fail(name, failure)
        except KeyboardInterrupt:
            self._account.line("stopping: the job takes a last save and ends its processes")
            raise
        finally:
            job.stop()
        losses.read()
        if director.left or director.under_way:
            raise DemoFailed(
                f"the job ended before all failures were injected and recovered from; left: "
                f"{[f.kind for f in director.left]}; see {self._folder}/{name}.events.jsonl"
            )
        return Run(events=events, losses=losses.lines)

    def _tell(
        self,
        event: Event,
        events: Sequence[Event],
        losses: LossReader,
        failures: Sequence[Failure],
    ) -> None:
        self._account.tell(event, losses.loss, losses.num_steps)
        if event["event"] == "recovered":
            before = len(read_incidents(events[:-1], losses.lines, failures))
            for incident in read_incidents(events, losses.lines, failures)[before:]:
                self._account.recovered(incident)

    def _compare(self, one: str, other: str) -> Comparison:
        folders = []
        for name in (one, other):
            folders.append(self._folder / "checkpoints" / name)
            self._backstay.pull(name, folders[-1])
            self._account.line(f"pulled the last checkpoint of {name}")
        comparison = compare_folders(*folders)
        for part in comparison.parts:
            verdict = f"{part.num_different} DIFFER" if part.num_different else "all equal"
            self._account.line(f"  {part.title}: {part.num_values} compared, {verdict}")
        for difference in comparison.differences[:MOST_DIFFERENCES_SHOWN]:
            self._account.line(f"    {difference}", "red")
        return comparison


def write_reference(folder: Path) -> Path:
    """The same manifest under another name, so that it is a run of its own."""
    tree = yaml.safe_load(MANIFEST.read_text())
    tree["metadata"]["name"] += f"-{REFERENCE}"
    for container in tree["spec"]["podTemplate"]["spec"]["containers"]:
        container["workingDir"] = str(ROOT)
    path = folder / f"{tree['metadata']['name']}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def write_report(story: Story, folder: Path) -> tuple[Path, Path]:
    """Write the HTML file and the PNG. Returns where they are."""
    page, picture = folder / "report.html", folder / "report.png"
    page.write_text(render(story), encoding="utf-8")
    draw(story, picture)
    return page, picture


def machine_facts() -> dict[str, str]:
    """What the numbers were measured on."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    return {
        "Processor": f"{_proc_field('/proc/cpuinfo', 'model name') or platform.machine()}",
        "Cores": str(len(os.sched_getaffinity(0))),
        "Memory": f"{int(_proc_field('/proc/meminfo', 'MemTotal').split()[0]) / 1e6:.1f} GB",
        "System": f"{system}, Linux {platform.release()}",
        "Python": platform.python_version(),
        "PyTorch": importlib.metadata.version("torch"),
        "Backstay": importlib.metadata.version("backstay"),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Trains a small GPT and breaks it four times.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="folder for all")
    folder = parser.parse_args(arguments).out.resolve()
    if not _make_empty(folder):
        print(f"demo: {folder} holds other files; give another --out", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell had them ignored
        signal.signal(number, signal.default_int_handler)
    account = Account(sys.stdout, time.time())
    try:
        story = Demo(folder, account).run()
    except DemoFailed as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped; everything that it had started has ended", file=sys.stderr)
        return 130
    page, picture = write_report(story, folder)
    good = story.comparison.equal and not any(i.problem for i in story.incidents)
    account.heading(_verdict(story, good))
    account.line(
        f"the broken run took {story.disturbed.seconds:.0f} s, the undisturbed one "
        f"{story.reference.seconds:.0f} s"
    )
    account.line(f"report:  {page}")
    account.line(f"picture: {picture}")
    return 0 if good else 1


def _make_empty(folder: Path) -> bool:
    """Make the folder, or empty it of an earlier demo. False: it holds something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).write_text("made by scripts/demo, which empties this folder\n")
    return True


def _verdict(story: Story, good: bool) -> str:
    if good:
        return f"✓ Broken {len(story.incidents)} times, and bit for bit equal at the end."
    if not story.comparison.equal:
        return f"✗ {len(story.comparison.differences)} names differ; the report lists them."
    return "✗ Equal at the end, but a recovery came from another tier than expected."


def _job_name(manifest: Path) -> str:
    name: Any = yaml.safe_load(manifest.read_text())["metadata"]["name"]
    return str(name)


def _proc_field(path: str, name: str) -> str:
    """A field of a file in /proc; `0` when it is not there."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"


if __name__ == "__main__":
    sys.exit(main())
