"""The Checkpointer with a real sidecar: what it saves it gets back, from memory and from disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import backstay
from backstay import structure
from backstay_protocol.topology import LocalTier, MemoryTier, Schedule, Tiers
from support.sidecar import SidecarJob

pytestmark = pytest.mark.timeout(180)


class Crash(Exception):
    """Leaves the block as a failing script does."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarJob]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BACKSTAY"):
        monkeypatch.delenv(name, raising=False)
    tiers = Tiers(
        memory=MemoryTier(schedule=Schedule(every_steps=2)),
        local=LocalTier(root=str(tmp_path / "disk")),
    )
    with SidecarJob(tmp_path, tiers=tiers) as running:
        monkeypatch.setenv("BACKSTAY_VOLUME", running.memory(0).root)
        running.start(0)
        yield running


def make_state(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


def train(checkpointer: backstay.Checkpointer, first: int, last: int, crash: bool) -> None:
    state = checkpointer.state
    for step in range(first, last):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(4, 8)).square().sum().backward()
        state["optimizer"].step()
        state["epoch"] = step
        checkpointer.step(step + 1, metadata={"at": step + 1})
    if crash:
        checkpointer.wait()
        raise Crash


def run(state, last: int, crash: bool = False) -> backstay.RestorePoint:
    checkpointer = backstay.Checkpointer(state, exit_timeout_seconds=60)
    with suppress(Crash), checkpointer:
        train(checkpointer, checkpointer.restore().step, last, crash)
    assert checkpointer.point is not None
    return checkpointer.point


def tensors(state) -> dict[str, torch.Tensor]:
    return {t.name: t.local.clone() for t in structure.walk(state).tensors}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setenv("BACKSTAY", "off")
        state = make_state()
        run(state, 9)
    return tensors(state)


def test_a_run_with_two_crashes_ends_as_one_without(job: SidecarJob, undisturbed) -> None:
    first = run(make_state(), 5, crash=True)
    assert (first.step, first.fresh) == (0, True)

    second_state = make_state(1)
    second = run(second_state, 7, crash=True)
    assert (second.step, second.fresh, list(second.sources)) == (4, False, ["memory"])
    assert second.metadata == {"at": 4}
    assert (second.lost_steps, second.attempt > first.attempt) == (1, True)

    job.wait_for(lambda: len(job.on_disk(0)) > 0 and job.on_disk(0)[-1][0].step == 6, "step 6")
    job.kill(0)
    shutil.rmtree(job.memory(0).root)
    job.start(0)
    state = make_state(2)
    third = run(state, 9)
    assert (third.step, list(third.sources)) == (6, ["local"])
    assert_equal(tensors(state), undisturbed)

    last = job.on_disk(0)[-1][0]
    assert (last.step, last.attempt) == (9, third.attempt)


def test_a_job_that_had_finished_is_finished_at_once(job: SidecarJob) -> None:
    run(make_state(), 3)

    again = run(make_state(1), 3)

    assert (again.step, again.fresh) == (3, False)


def test_a_damaged_slot_is_struck_out_and_the_disk_serves(job: SidecarJob, undisturbed) -> None:
    run(make_state(), 5, crash=True)
    job.wait_for(lambda: len(job.on_disk(0)) > 0 and job.on_disk(0)[-1][0].step == 4, "step 4")
    for slot in (0, 1):
        path = Path(job.memory(0).slot(0, slot))
        with path.open("r+b") as file:
            file.seek(4096 + 100)
            byte = file.read(1)
            file.seek(4096 + 100)
            file.write(bytes([byte[0] ^ 1]))

    state = make_state(1)
    point = run(state, 9)

    assert (point.step, list(point.sources)) == (4, ["local"])
    assert len(point.bad) == 1
    assert "memory" in point.bad[0]
    assert_equal(tensors(state), undisturbed)


def test_a_checkpoint_of_another_model_is_refused_with_names(job: SidecarJob) -> None:
    run(make_state(), 3)
    state = {**make_state(), "more": torch.zeros(3)}

    with pytest.raises(backstay.RestoreFailed, match=r"not in the checkpoint \(1\): more"):
        run(state, 5)
