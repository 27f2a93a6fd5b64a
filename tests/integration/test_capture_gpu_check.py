"""scripts/gpu-check: what it says without a GPU, and that the script itself works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_without_a_gpu_it_says_so_and_is_content() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (0, "no CUDA here\n")


@pytest.mark.timeout(180)
def test_its_checks_hold_in_a_rehearsal_on_the_cpu() -> None:
    done = run("--device", "cpu", "--gib", "0.03", "--steps", "2")
    assert "no torn tensor []" in done.stdout, done.stdout + done.stderr
    assert "nothing was published: model.weights.7 changed" in done.stdout
