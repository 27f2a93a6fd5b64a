"""200 saves: memory, descriptors, threads and files stay as they were, in trainer and sidecar."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from support.training_job import TrainingJob, every_tier

pytestmark = pytest.mark.timeout(240)


def vital_signs(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    with process.oneshot():
        return {
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "anonymous": _anonymous_bytes(pid),
        }


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def files_below(path: str) -> int:
    return sum(len(files) for _, _, files in os.walk(path))


def test_two_hundred_saves_leave_everything_flat(tmp_path: Path) -> None:
    tiers = every_tier(tmp_path / "disk", every=1)
    with TrainingJob(tmp_path, steps=250, tiers=tiers, step_seconds=0.03) as job:
        job.start()
        job.wait_step(50)
        pids = {
            "trainer": job._ranks[0].pid,
            "leader": job.sidecars._processes[0].popen.pid,
            "follower": job.sidecars._processes[1].popen.pid,
        }
        before = {name: vital_signs(pid) for name, pid in pids.items()}
        files = files_below(job.sidecars.memory(0).root)
        job.wait_step(245)
        after = {name: vital_signs(pid) for name, pid in pids.items()}
        saved = job.job().replicas[0].ranks[0].saves
        assert saved >= 200, saved
        for name in pids:
            for sign, allowed in (("descriptors", 12), ("threads", 8), ("anonymous", 24 << 20)):
                grown = after[name][sign] - before[name][sign]
                assert grown <= allowed, f"{name}: {sign} grew by {grown}"
        assert files_below(job.sidecars.memory(0).root) <= files + 1
        job.finish()
        assert files_below(job.sidecars.disk(0).shards) <= 20
        assert job.restarts == 0
