"""`backstay agent` beside a bare torchrun: the same program, no operator and no runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backstay_protocol.names import ENV_TOKEN, ENV_VOLUME
from support.sidecar import TOKEN, SidecarJob

pytestmark = pytest.mark.timeout(240)
TRAINING = Path(__file__).resolve().parents[1] / "support" / "tiny_training.py"


def torchrun(out: Path, volume: str, steps: int) -> None:
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(TRAINING), "--out", str(out), "--steps", str(steps),
    ]  # fmt: skip
    environment = {**os.environ, ENV_VOLUME: volume, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_bare_torchrun_saves_and_goes_on_beside_the_agent(tmp_path: Path) -> None:
    with SidecarJob(tmp_path, replicas=1, per_replica=2) as job:
        volume = job.memory(0).root
        command = [
            sys.executable, "-m", "backstay_cli.main", "agent",
            "--topology", str(tmp_path / "topology.json"), "--replica", "0", "--volume", volume,
        ]  # fmt: skip
        agent = subprocess.Popen(command, env={**os.environ, ENV_TOKEN: TOKEN})
        try:
            torchrun(tmp_path, volume, steps=4)
            torchrun(tmp_path, volume, steps=6)
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(30)
        for rank in range(2):
            lines = (tmp_path / f"events-{rank}.jsonl").read_text().splitlines()
            restored = [e for e in map(json.loads, lines) if e["kind"] == "restored"]
            assert [e["step"] for e in restored] == [0, 4]
        assert {c.step for c, _ in job.on_disk(0)} >= {6}
