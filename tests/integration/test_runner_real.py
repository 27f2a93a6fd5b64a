"""The runner with everything real: torchrun, the library, sidecars, the embedded store."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from support.local_job import LocalRun, command, manifest, survivors

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).parents[1] / "support" / "counting_job.py"


class Counting:
    """A job that counts its steps, and goes as far as it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[LocalRun] = []

    def start(self, steps: int, may: int) -> LocalRun:
        self.may(may)
        job = manifest(
            self.folder,
            name="counting",
            launcher="torchrun",
            command=["torchrun", str(SCRIPT), str(steps), str(self.folder / "permit")],
            checkpoint={
                "memory": {"everySteps": 2, "sizeLimit": "16Mi"},
                "local": {"everySteps": 4},
                "neighbor": {"everySteps": 4},
                "remote": {"embedded": True, "everySteps": 8},
            },
        )
        self.runs.append(LocalRun(job, fakes=False, patience_seconds=200))
        return self.runs[-1]

    def may(self, step: int) -> None:
        """Go up to this step."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "permit")


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Counting]:
    job = Counting(tmp_path)
    yield job
    for run in job.runs:
        run.close()


def train(run: LocalRun, step: int, **newest: int) -> None:
    """Until the step is reached and each tier has a checkpoint at least so new."""
    while True:
        progress = run.wait_for("progress", phase="Training")
        complete = progress["newest"]
        if progress["step"] >= step and all(complete.get(t, -1) >= s for t, s in newest.items()):
            return


def test_a_job_survives_its_failures_and_its_last_checkpoint_is_pulled_after_its_end(
    counting: Counting, tmp_path: Path
) -> None:
    run = counting.start(steps=24, may=7)
    here = ("--state-dir", str(run.state))
    train(run, 7, memory=6)
    assert run.fail("trainer", "--replica", "1").returncode == 0
    counting.may(9)
    back = run.wait_for("recovered")
    assert (back["failures"], back["replicas"], back["base_step"]) == (["trainer"], [1], 6)
    assert back["lost_steps"] == 1
    assert "memory" in back["bytes_by_tier"]
    assert "remote" not in back["bytes_by_tier"]
    assert 0 <= back["detect_seconds"] <= back["resume_seconds"]
    status = command("status", *here)
    assert status.returncode == 0
    assert "Training" in status.stdout

    train(run, 9, neighbor=8)
    assert run.fail("node", "--replica", "0").returncode == 0
    counting.may(11)
    back = run.wait_for("recovered")
    assert (back["failures"], back["base_step"]) == (["node"], 8)
    assert "remote" not in back["bytes_by_tier"], "the neighbor holds what the node had"
    pulled = command("pull", *here, "--out", str(tmp_path / "while-running"), "-o", "json")
    assert pulled.returncode == 0, pulled.stderr

    counting.may(24)
    assert run.finish() == 0, run.story()
    end = run.seen[-1]
    assert (end["event"], end["step"], end["durable_step"]) == ("job_succeeded", 24, 24)
    assert survivors(run.mark) == []
    pulled = command("pull", *here, "--out", str(tmp_path / "after"), "-o", "json")
    assert pulled.returncode == 0, pulled.stderr
    told = json.loads(pulled.stdout)
    assert told["checkpoint"].startswith(f"{24:012d}-")
    assert set(told["bytes_by_tier"]) == {"remote"}
    shards = [load_file(path) for path in sorted((tmp_path / "after").glob("*.safetensors"))]
    weights = [t for shard in shards for name, t in shard.items() if name.endswith("model.weight")]
    assert weights
    assert all((weight == 24).all() for weight in weights)
    assert command("verify", str(tmp_path / "after")).returncode == 0


def test_ctrl_c_takes_one_last_common_save_and_the_next_run_goes_on_from_it(
    counting: Counting,
) -> None:
    run = counting.start(steps=1000, may=7)
    train(run, 7)
    counting.may(1000)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.story()
    assert survivors(run.mark) == []
    again = counting.start(steps=1000, may=1000)
    restored = again.wait_for("restore_done")
    assert restored["base_step"] > 6, "the save was taken after those of the schedule"
    again.process.send_signal(signal.SIGINT)
    assert again.finish() == 130, again.story()
    assert survivors(again.mark) == []
