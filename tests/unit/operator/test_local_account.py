"""What a person reads of a local run, and the JSON that programs read."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from backstay_cli.local import events
from backstay_cli.local.account import Account, bytes_in_words, json_lines
from backstay_cli.local.events import Event, parse_line

T = 1_800_000_000.0
ALL: list[Event] = [
    events.JobStarted(
        time=T,
        job="gpt",
        namespace="team",
        run="team/gpt",
        uid="u",
        replicas=3,
        processes_per_replica=2,
        state_dir="/s",
        address="127.1.1.100:7070",
        resumed=True,
    ),
    events.StoreStarted(time=T, endpoint="http://127.1.1.99:1", bucket="b"),
    events.PodStarted(time=T, replica=1, pod="gpt-1-5", node="node-1", generation=5, address="a"),
    events.ContainerStarted(time=T, replica=1, pod="p", container="trainer", restarts=2),
    events.ContainerExited(
        time=T,
        replica=1,
        pod="p",
        container="trainer",
        exit_code=137,
        reason="Killed",
        next="waits",
    ),
    events.FailureInjected(time=T, failure="node", replicas=(1,), detail="node-1 [destroyed]"),
    events.PodLost(time=T, replica=1, pod="p", node="node-1", why="gone"),
    events.PodReplaced(
        time=T, replica=1, pod="gpt-1-6", replaces="gpt-1-5", node="node-3", generation=6, why="w"
    ),
    events.RestoreBegun(time=T, message="waiting for rank 3"),
    events.RestoreDone(
        time=T,
        attempt=6_000_001,
        attempt_name="2.1",
        base="000000000040-000000000005000001",
        base_step=40,
        bytes_by_tier={"memory": 3 << 20, "neighbor": 1 << 20, "remote": 0},
        lost_steps=4,
        seconds=1.25,
        bad=("rank 1 in local of replica 2",),
    ),
    events.Recovered(
        time=T,
        failures=("node",),
        replicas=(1,),
        failed_at=T - 9,
        detect_seconds=0.5,
        resume_seconds=9.0,
        attempt=6_000_001,
        base_step=40,
        step=41,
        lost_steps=4,
        bytes_by_tier={"memory": 1024},
    ),
    events.Progress(
        time=T,
        step=50,
        attempt=6_000_001,
        attempt_name="2.1",
        phase="Training",
        newest={"remote": 20, "memory": 45},
        durable_step=20,
    ),
    events.Notice(time=T, level="warning", text="disk full"),
    events.Log(time=T, replica=0, container="trainer", line="loss [0.1]"),
    events.JobSucceeded(time=T, step=100, durable_step=100, seconds=60.0, message="all done"),
    events.JobFailed(time=T, why="no checkpoint", logs=("/s/logs/a.log",)),
    events.JobStopped(time=T, why="stopped by SIGINT"),
]
WORDS = {
    "job_started": "team/gpt goes on: 3 replicas x 2 processes",
    "store_started": "http://127.1.1.99:1",
    "pod_started": "pod gpt-1-5 starts on node-1",
    "container_started": "trainer started again (2)",
    "container_exited": "Killed, code 137; waits",
    "failure_injected": "failure by order (node): node-1 [destroyed]",
    "pod_lost": "pod p is lost: gone",
    "pod_replaced": "gpt-1-6 on node-3 takes the place of gpt-1-5",
    "restore_begun": "waiting for rank 3",
    "restore_done": "attempt 2.1 begins from step 40: 3.0 MiB from memory, 1.0 MiB from neighbor, "
    "in 1.2 s; 4 steps lost",
    "recovered": "noticed after 0.5 s, training again after 9.0 s (step 41)",
    "progress": "training: step 50, attempt 2.1; newest complete: memory 45, remote 20; durable 20",
    "notice": "disk full",
    "log": "0 trainer| loss [0.1]",
    "job_succeeded": "succeeded at step 100 after 60 s: all done",
    "job_failed": "failed: no checkpoint",
    "job_stopped": "stopped by SIGINT",
}


@pytest.mark.parametrize("event", ALL, ids=lambda event: event.kind)
def test_every_event_is_a_line_for_people(event: Event) -> None:
    out = io.StringIO()
    Account(Console(file=out, width=300, highlight=False))(event)
    assert WORDS[event.kind] in out.getvalue()


@pytest.mark.parametrize("event", ALL, ids=lambda event: event.kind)
def test_every_event_is_one_line_of_json_with_its_kind_and_time(event: Event) -> None:
    out = io.StringIO()
    json_lines(out)(event)
    (line,) = out.getvalue().splitlines()
    read = parse_line(line)
    assert (read["event"], read["time"]) == (event.kind, T)


def test_each_kind_is_tested() -> None:
    assert {event.kind for event in ALL} == set(WORDS)
    assert len(ALL) == len(Event.__subclasses__())


def test_the_first_start_of_a_container_and_success_are_told_briefly() -> None:
    out = io.StringIO()
    account = Account(Console(file=out, width=200))
    account(events.ContainerStarted(time=T, replica=0, pod="p", container="trainer", restarts=0))
    assert out.getvalue() == ""
    account(
        events.ContainerExited(
            time=T, replica=0, pod="p", container="trainer", exit_code=0, reason="r", next=""
        )
    )
    assert "completed" in out.getvalue()


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    account = Account(Console(file=out, width=200))
    for second in range(12):
        account(
            events.Progress(
                time=T + second,
                step=second,
                attempt=0,
                attempt_name="-",
                phase="Training",
                newest={},
                durable_step=-1,
            )
        )
    assert len(out.getvalue().splitlines()) == 3


def test_on_a_terminal_progress_is_one_living_line() -> None:
    out = io.StringIO()
    account = Account(Console(file=out, width=200, force_terminal=True))
    account(ALL[11])
    account(ALL[14])
    account.close()
    assert "training: step 50" in out.getvalue()


def test_bytes_are_told_by_tier_from_near_to_far() -> None:
    told = bytes_in_words({"remote": 1 << 20, "memory": 512, "local": 0})
    assert told == "512 B from memory, 1.0 MiB from remote"
    assert bytes_in_words({}) == "nothing to read"


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="not an event"):
        parse_line(json.dumps({"time": 1}))
