"""Sidecar down, memory volume full, local disk full, neighbour gone or silent: training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, URL_STATUS
from support.training_job import TrainingJob, every_tier

pytestmark = pytest.mark.timeout(180)


def test_saves_go_on_while_the_sidecar_is_down_and_are_found_when_it_returns(
    tmp_path: Path,
) -> None:
    with TrainingJob(tmp_path, steps=24, step_seconds=0.2) as job:
        job.start()
        job.wait_complete(LOCAL, 2)
        job.sidecars.kill(1)
        last = job.events(1, "step")[-1]["step"]
        job.wait(lambda: job.events(1, "step")[-1]["step"] >= last + 6, "more steps", tend=False)
        job.sidecars.start(1)
        job.wait_complete(LOCAL, last + 4)
        job.finish()
        assert job.restarts == 0


def test_a_leader_that_is_down_for_a_while_stops_nobody(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, steps=24, step_seconds=0.2) as job:
        job.start()
        job.wait_complete(NEIGHBOR, 2)
        job.sidecars.kill(0)
        last = job.events(0, "step")[-1]["step"]
        job.wait(lambda: job.events(0, "step")[-1]["step"] >= last + 6, "more steps", tend=False)
        job.sidecars.start(0)
        job.wait_complete(NEIGHBOR, last + 4)
        job.finish()
        assert job.restarts == 0


@contextmanager
def small_volume(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of its own. Needs root; elsewhere the test says so and is skipped."""
    path.mkdir(parents=True, exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"can't mount a small tmpfs here: {mount.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_memory_volume_that_is_too_small_is_told_with_the_number_needed(tmp_path: Path) -> None:
    job = TrainingJob(tmp_path, replicas=1, steps=6, step_seconds=0.0)
    with job, small_volume(Path(job.sidecars.memory(0).root), "256k"):
        job.start()
        job.wait(lambda: job.events(0, "started"), "the rank")
        ended = job._ranks[0].wait(90)
        said = (tmp_path / "rank-0.log").read_text()
        assert ended != -signal.SIGBUS
        assert "memory volume" in said, said
        assert "give it at least" in said, said
        job.kill_ranks()
        job.sidecars.kill(0)


def test_a_memory_volume_that_fills_up_later_kills_nobody(tmp_path: Path) -> None:
    job = TrainingJob(tmp_path, replicas=1, steps=16, step_seconds=0.2)
    with job, small_volume(Path(job.sidecars.memory(0).root), "8m") as volume:
        job.start()
        job.wait_complete(MEMORY, 2)
        with (volume / "somebody-elses").open("wb") as file:
            try:
                while True:
                    os.write(file.fileno(), bytes(65536))
            except OSError:
                pass
        last = job.events(0, "step")[-1]["step"]
        job.wait_step(min(16, last + 4))
        (volume / "somebody-elses").unlink()
        job.finish()
        assert job.restarts == 0
        job.sidecars.kill(0)


def test_a_full_local_disk_degrades_that_tier_and_is_caught_up_with(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_volume(disk, "2m"):
        tiers = every_tier(disk, neighbor=False)
        with TrainingJob(tmp_path, replicas=1, steps=150, step_seconds=0.2, tiers=tiers) as job:
            job.start()
            job.wait_complete(LOCAL, 2)
            ballast = disk / "ballast"
            with ballast.open("wb") as file:
                try:
                    while True:
                        os.write(file.fileno(), bytes(4096))
                except OSError:
                    pass
            job.wait(
                lambda: any(
                    not tier["ok"] and tier["tier"] == LOCAL
                    for tier in job.sidecars.request(0, "GET", URL_STATUS).json["tiers"]
                ),
                "the tier to be reported",
            )
            last = job.events(0, "step")[-1]["step"]
            ballast.unlink()
            job.wait_complete(LOCAL, last + 2)
            job.finish()
            assert job.restarts == 0


def test_a_silent_neighbour_holds_up_nothing(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, steps=30, step_seconds=0.2) as job:
        job.start()
        job.wait_complete(NEIGHBOR, 2)
        process = psutil.Process(job.sidecars._processes[1].popen.pid)
        process.suspend()
        last = job.events(0, "step")[-1]["step"]
        job.wait(lambda: job.events(0, "step")[-1]["step"] >= last + 6, "more steps", tend=False)
        process.resume()
        job.wait_complete(NEIGHBOR, last + 4)
        job.finish()
        assert job.restarts == 0
