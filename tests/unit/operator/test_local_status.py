"""What the local runner persists of a job before it starts anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backstay_cli.local.runner import LocalRunner, RunOptions
from backstay_cli.local.state import StateFolder
from backstay_operator.api import TrainingJob
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.topology import ManualChoice


@pytest.fixture
def small(job: TrainingJob) -> TrainingJob:
    memory = replace(job.spec.checkpoint.memory, size_limit_bytes=1 << 20)
    checkpoint = replace(job.spec.checkpoint, memory=memory)
    return replace(job, spec=replace(job.spec, checkpoint=checkpoint))


def choosing(job: TrainingJob, step: int | None) -> TrainingJob:
    choice = ManualChoice(token=f"{step}-0", step=step) if step is not None else None
    restore = replace(job.spec.restore, choice=choice)
    return replace(job, spec=replace(job.spec, restore=restore))


def test_each_change_of_a_choice_by_hand_is_counted_over_runs(
    small: TrainingJob, tmp_path: Path
) -> None:
    state = StateFolder(tmp_path)
    numbers = []
    for step in (1200, 1200, None, 1200):
        runner = LocalRunner(
            choosing(small, step),
            tmp_path / "job.yaml",
            state,
            RunOptions(),
            lambda _: None,
            SYSTEM_CLOCK,
        )
        state.write(runner._status)
        if step is not None:
            numbers.append(runner._status.record.choice_number)
    first, same, again = numbers
    assert same == first
    assert again > first
