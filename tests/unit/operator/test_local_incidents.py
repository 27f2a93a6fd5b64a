"""From a failure to the first step after it, as a local run tells it."""

from __future__ import annotations

from typing import Any

from backstay_cli.local.events import Recovered
from backstay_cli.local.incidents import Incidents
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import JobView, RankProgress, ReplicaView, RestoreView


def view(phase: str, attempt: int, step: int, **more: Any) -> JobView:
    times = more.pop("times", (0.0,))
    ranks = tuple(
        RankProgress(
            rank=rank, step=step, step_time=time, published_step=0, attempt=attempt, state=3
        )
        for rank, time in enumerate(times)
    )
    replica = ReplicaView(replica=0, generation=1, address="", seen_seconds_ago=0.0, ranks=ranks)
    return JobView(
        run="a/b",
        attempt=attempt,
        phase=phase,
        message="",
        step=step,
        replicas=(replica,),
        restores=(
            RestoreView(
                attempt=attempt,
                base=CheckpointId(10, attempt - 1),
                finished=104.0,
                seconds=2.0,
                bytes_by_tier={"local": 7},
                lost_steps=3,
            ),
        ),
        **more,
    )


def training() -> Incidents:
    incidents = Incidents()
    assert incidents.saw(view("Training", 1, 13), 99.0) is None
    return incidents


def test_a_failure_by_order_is_told_once_with_what_it_cost() -> None:
    incidents = training()
    incidents.failed("node", (2,), 100.0)
    incidents.noticed("pod", (2,), 101.5)
    assert incidents.is_open
    assert incidents.saw(view("Joining", 1, 13), 102.0) is None
    assert incidents.saw(view("Restoring", 2, 10), 103.0) is None
    assert incidents.saw(view("Training", 2, 10), 104.5) is None, "no step yet"
    told = incidents.saw(view("Training", 2, 11, times=(105.0, 105.25)), 105.4)
    assert told == Recovered(
        time=105.25,
        failures=("node",),
        replicas=(2,),
        failed_at=100.0,
        detect_seconds=1.5,
        resume_seconds=5.25,
        attempt=2,
        base_step=10,
        step=11,
        lost_steps=3,
        bytes_by_tier={"local": 7},
    )
    assert not incidents.is_open
    assert incidents.saw(view("Training", 2, 12), 106.0) is None


def test_failures_while_one_is_being_mended_belong_to_it() -> None:
    incidents = training()
    incidents.failed("trainer", (0,), 100.0)
    incidents.failed("memory", (1,), 101.0)
    incidents.failed("memory", (1,), 101.1)
    told = incidents.saw(view("Training", 2, 11), 110.0)
    assert told is not None
    assert told.failures == ("trainer", "memory")
    assert told.replicas == (0, 1)
    assert told.failed_at == 100.0


def test_what_breaks_without_an_order_counts_from_when_it_was_noticed() -> None:
    incidents = training()
    incidents.noticed("container", (1,), 100.0)
    told = incidents.saw(view("Training", 2, 11), 103.0)
    assert told is not None
    assert (told.failures, told.detect_seconds) == (("container",), 0.0)


def test_the_leader_that_gathers_anew_is_a_notice_too() -> None:
    incidents = training()
    incidents.failed("trainer", (0,), 100.0)
    incidents.saw(view("Joining", 1, 13), 100.7)
    told = incidents.saw(view("Training", 2, 11), 103.0)
    assert told is not None
    assert told.detect_seconds == 0.7


def test_a_first_start_is_no_incident() -> None:
    incidents = Incidents()
    for phase, attempt in (("Joining", 0), ("Restoring", 1), ("Training", 1)):
        assert incidents.saw(view(phase, attempt, 20), 1.0) is None
    assert not incidents.is_open


def test_a_leader_that_lost_its_memory_of_the_restore_is_waited_for() -> None:
    incidents = training()
    incidents.failed("node", (0,), 100.0)
    empty = view("Training", 2, 12)
    forgetful = JobView(
        run=empty.run, attempt=2, phase="Training", message="", step=12, replicas=empty.replicas
    )
    assert incidents.saw(forgetful, 104.0) is None
    assert incidents.is_open
