"""kill -9 of a trainer at each point of a save, with forked workers left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load

from backstay_protocol import slots
from backstay_protocol.layout import MemoryLayout
from support.capturing import wrong_values

ROOT = Path(__file__).parents[2]
POINTS = ["before_withdraw", "after_withdraw", "mid_copy", "before_publish", "after_publish"]


class Nursery:
    """Starts trainers, and sees to it that none of their workers outlives a test."""

    def __init__(self) -> None:
        parts = (str(ROOT / part) for part in ("protocol", "trainer_lib", "tests"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.capture_victim"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(parts), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._workers: list[int] = []

    def train(self, folder: Path, first: int, last: int, faults: str = "") -> int:
        """One trainer's exit code. Its worker lives on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"folder": str(folder), "first": first, "last": last, "faults": faults}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        self._workers.append(int((folder / "worker").read_text()))
        return code

    def kill_workers(self) -> None:
        while self._workers:
            os.kill(self._workers.pop(), signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def all_trainers() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def trainers(all_trainers: Nursery) -> Iterator[Nursery]:
    yield all_trainers
    all_trainers.kill_workers()


def published(folder: Path) -> dict[int, list[str]]:
    """Step -> wrong values, of every slot that is published, by the sidecar's protocol."""
    memory = MemoryLayout(str(folder))
    found = {}
    for rank, slot in slots.list_slots(memory):
        with (
            slots.reading(memory, rank, slot) as manifest,
            open(memory.slot(rank, slot), "rb") as f,
        ):
            if manifest is not None:
                found[manifest.step] = wrong_values(load(f.read(manifest.size)), manifest.step)
    return found


@pytest.mark.parametrize("passage", [1, 2, 4], ids=["first save", "second save", "full slots"])
@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_killed_in_a_save_leaves_only_whole_steps(
    tmp_path: Path, trainers: Nursery, point: str, passage: int
) -> None:
    assert trainers.train(tmp_path, 1, 6, f"capture.{point}=kill@{passage}") == -signal.SIGKILL
    found = published(tmp_path)
    assert not any(found.values()), found
    newest = passage if point == "after_publish" else passage - 1
    assert max(found, default=0) == newest

    assert trainers.train(tmp_path, newest + 1, newest + 3) == 0, "a worker holds up nobody"
    found = published(tmp_path)
    assert sorted(found) == [newest + 2, newest + 3]
    assert not any(found.values()), found
