"""The demo's smaller parts: when it strikes, what it tells, which folder it may empty."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from examples.char_gpt import demo
from examples.char_gpt.account import Account
from examples.char_gpt.demo import Director
from examples.char_gpt.incidents import FAILURES, read_incidents
from examples.char_gpt.losses import LossLog, LossReader
from support.demo_recording import START, progress, record


def recovery(kind: str, base_step: int) -> dict[str, Any]:
    return {"event": "recovered", "failures": [kind], "base_step": base_step}


def injected_at(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """(kind, step) of the failures that a director orders."""
    director, found = Director(list(FAILURES)), []
    for event in events:
        failure = director.due(event)
        if failure:
            found.append((failure.kind, event["step"]))
            director.due(recovery(failure.kind, event["step"] - 1))
    return found


def test_the_director_breaks_the_run_once_with_each_failure_in_order() -> None:
    events = [progress(step, 1, START + step) for step in range(1, 421)]
    found = injected_at(events)
    assert [kind for kind, _ in found] == [f.kind for f in FAILURES]
    assert all(step >= f.after_step for (_, step), f in zip(found, FAILURES, strict=True))


def test_the_director_waits_for_the_recovery_before_the_next_failure() -> None:
    director = Director(list(FAILURES))
    assert director.due(progress(66, 1, 0.0)) is FAILURES[0]
    assert director.due(progress(300, 1, 0.0)) is None
    director.due(recovery("container", 60))  # another one's
    assert director.due(progress(300, 1, 0.0)) is None
    director.due(recovery("trainer", 65))
    assert director.due(progress(300, 1, 0.0)) is FAILURES[1]


def test_the_account_tells_failures_sources_and_recovery() -> None:
    events, losses = record()
    out = io.StringIO()
    account = Account(out, START)
    for number, event in enumerate(events, 1):
        account.tell(event, 2.5, 420)
        if event["event"] == "recovered":
            account.recovered(read_incidents(events[:number], losses)[-1])
    told = out.getvalue()
    assert "✗ 1. One trainer process killed (replica 1)" in told
    assert "all ranks hold step 65 again, read from memory 97.3 MB" in told
    assert "rank 0 read memory 32.4 MB" in told
    assert "going on from step 280" in told
    assert "loss 2.500" in told
    assert "\x1b" not in told


def test_losses_written_by_several_processes_are_read_as_they_come(tmp_path: Path) -> None:
    reader = LossReader(tmp_path / "losses")
    reader.read()
    assert reader.loss is None
    first, second = LossLog(str(reader.path), 0), LossLog(str(reader.path), 1)
    first.write(event="started", num_steps=7)
    first.write(step=1, loss=3.5)
    second.write(step=1, loss=9.9)
    for rank, log in enumerate((first, second)):
        log.write(every_rank=True, event="restored", rank=rank, sources={"memory": rank})
        log.close()
    with reader.path.open("a") as file:
        file.write('{"step": 2, "lo')  # a line that is being written
    reader.read()
    assert (reader.loss, reader.num_steps) == (3.5, 7)
    restored = [line for line in reader.lines if line.get("event") == "restored"]
    assert [line["rank"] for line in restored] == [0, 1]
    with reader.path.open("a") as file:
        file.write('ss": 3.25}\n')
    reader.read()
    assert reader.loss == 3.25


def test_a_folder_with_other_files_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert not demo._make_empty(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    assert demo._make_empty(tmp_path / "new")
    (tmp_path / "new" / "old-report.html").touch()
    assert demo._make_empty(tmp_path / "new")
    assert [p.name for p in (tmp_path / "new").iterdir()] == [demo.MARK]


def test_machine_facts_are_known_here() -> None:
    facts = demo.machine_facts()
    assert int(facts["Cores"]) >= 1
    json.dumps(facts)
