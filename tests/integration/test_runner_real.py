"""The runner with everything real: torchrun, the library, sidecars, the embedded store."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.local_job import LocalRun, command, manifest, survivors

pytestmark = pytest.mark.timeout(400)
SCRIPT = Path(__file__).parents[1] / "support" / "counting_job.py"
STEPS = 60


def start(tmp_path: Path, *options: str, steps: int = STEPS) -> LocalRun:
    job = manifest(
        tmp_path,
        name="counting",
        launcher="torchrun",
        command=["torchrun", str(SCRIPT), str(steps), "0.2"],
        checkpoint={
            "memory": {"everySteps": 2, "sizeLimit": "16Mi"},
            "local": {"everySteps": 4},
            "neighbor": {"everySteps": 4},
            "remote": {"embedded": True, "everySteps": 8},
        },
    )
    return LocalRun(job, *options, fakes=False, patience_seconds=200)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    running = start(tmp_path)
    yield running
    running.close()


def train(run: LocalRun, **newest: int) -> dict[str, Any]:
    """Until each tier has a checkpoint at least so new; the progress then."""
    while True:
        progress = run.wait_for("progress", phase="Training")
        if all(progress["newest"].get(tier, -1) >= step for tier, step in newest.items()):
            return progress


def test_a_job_survives_its_failures_and_its_last_checkpoint_is_pulled_after_its_end(
    run: LocalRun, tmp_path: Path
) -> None:
    here = ("--state-dir", str(run.state))
    reached = train(run, memory=6)
    assert run.fail("trainer", "--replica", "1").returncode == 0
    back = run.wait_for("recovered")
    assert back["failures"] == ["trainer"]
    assert back["base_step"] >= reached["newest"]["memory"] - 2
    assert "memory" in back["bytes_by_tier"]
    assert "remote" not in back["bytes_by_tier"]
    assert 0 <= back["detect_seconds"] <= back["resume_seconds"]
    status = command("status", *here)
    assert status.returncode == 0
    assert "Training" in status.stdout

    train(run, neighbor=back["step"] // 4 * 4 + 4)
    assert run.fail("node", "--replica", "0").returncode == 0
    back = run.wait_for("recovered")
    assert back["failures"] == ["node"]
    assert back["base_step"] > 0
    pulled = command("pull", *here, "--out", str(tmp_path / "while-running"), "-o", "json")
    assert pulled.returncode == 0, pulled.stderr

    assert run.finish() == 0, run.story()
    end = run.seen[-1]
    assert (end["event"], end["step"], end["durable_step"]) == ("job_succeeded", STEPS, STEPS)
    assert survivors(run.mark) == []
    pulled = command("pull", *here, "--out", str(tmp_path / "after"), "-o", "json")
    assert pulled.returncode == 0, pulled.stderr
    told = json.loads(pulled.stdout)
    assert told["checkpoint"].startswith(f"{STEPS:012d}-")
    assert set(told["bytes_by_tier"]) == {"remote"}
    weights = [load_file(path) for path in sorted((tmp_path / "after").glob("*.safetensors"))]
    (weight,) = [shard["model.weight"] for shard in weights if "model.weight" in shard]
    assert (weight == STEPS).all()
    assert command("verify", str(tmp_path / "after")).returncode == 0


def test_ctrl_c_takes_one_last_common_save_and_the_next_run_goes_on_from_it(
    run: LocalRun, tmp_path: Path
) -> None:
    train(run, memory=4)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.story()
    assert survivors(run.mark) == []
    stopped_at = max(event["step"] for event in run.of_kind("progress"))
    again = start(tmp_path, steps=stopped_at + 12)
    try:
        restored = again.wait_for("restore_done")
        assert restored["base_step"] >= stopped_at, "the save was taken after the last step seen"
        assert again.finish() == 0, again.story()
        assert again.seen[-1]["step"] == stopped_at + 12
    finally:
        again.close()
