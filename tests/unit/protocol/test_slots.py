from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backstay_protocol import slots
from backstay_protocol.errors import CorruptData
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import Manifest


@pytest.fixture
def memory(tmp_path: Path) -> MemoryLayout:
    layout = MemoryLayout(str(tmp_path))
    os.makedirs(layout.rank_folder(0))
    Path(layout.slot(0, 0)).write_bytes(b"x" * 16)
    return layout


def manifest(step: int = 1) -> Manifest:
    return Manifest(
        run="n/r",
        step=step,
        attempt=1,
        rank=0,
        world_size=1,
        replica=0,
        plan="p",
        size=16,
        created=0.0,
    )


def test_a_published_slot_is_seen_until_it_is_withdrawn(memory: MemoryLayout) -> None:
    assert slots.peek(memory, 0, 0) is None
    slots.publish(memory, 0, 0, manifest())
    assert slots.peek(memory, 0, 0) == manifest()
    slots.withdraw(memory, 0, 0)
    assert slots.peek(memory, 0, 0) is None
    slots.withdraw(memory, 0, 0)  # free already


def test_a_slot_can_not_be_withdrawn_while_a_sidecar_reads_it(memory: MemoryLayout) -> None:
    slots.publish(memory, 0, 0, manifest())
    with slots.reading(memory, 0, 0) as seen:
        assert seen == manifest()
        with pytest.raises(slots.SlotBusy, match="in use by the other side"):
            slots.withdraw(memory, 0, 0)
        with slots.reading(memory, 0, 0) as again:  # readers share
            assert again == manifest()
    slots.withdraw(memory, 0, 0)


def test_a_slot_can_not_be_read_while_it_is_being_withdrawn(memory: MemoryLayout) -> None:
    with open(memory.slot(0, 0), "rb+") as trainer:
        fcntl.flock(trainer, fcntl.LOCK_EX)
        with pytest.raises(slots.SlotBusy), slots.reading(memory, 0, 0):
            pass


def test_what_is_read_is_looked_for_only_under_the_lock(memory: MemoryLayout) -> None:
    slots.publish(memory, 0, 0, manifest(1))
    slots.withdraw(memory, 0, 0)
    with slots.reading(memory, 0, 0) as seen:
        assert seen is None


def test_sealing_replaces_the_manifest_and_striking_hides_it(memory: MemoryLayout) -> None:
    slots.publish(memory, 0, 0, manifest())
    with slots.reading(memory, 0, 0) as seen:
        assert seen is not None
        slots.seal(memory, 0, 0, seen.seal(("d",), "f"))
    sealed = slots.peek(memory, 0, 0)
    assert sealed is not None
    assert sealed.sealed
    with slots.reading(memory, 0, 0):
        slots.strike(memory, 0, 0)
        slots.strike(memory, 0, 0)
    assert slots.peek(memory, 0, 0) is None


def test_a_slot_that_is_not_there_is_said(memory: MemoryLayout) -> None:
    with pytest.raises(FileNotFoundError), slots.reading(memory, 0, 7):
        pass


def test_a_torn_manifest_is_not_a_checkpoint(memory: MemoryLayout) -> None:
    Path(memory.slot_manifest(0, 0)).write_bytes(manifest().to_json()[:-5])
    with pytest.raises(CorruptData, match="slot-0"):
        slots.peek(memory, 0, 0)


def test_all_slots_are_listed_and_nothing_else(memory: MemoryLayout) -> None:
    os.makedirs(memory.rank_folder(12))
    for name in ("slot-1", "slot-0", "slot-0.json", "slot-x", "control"):
        Path(memory.rank_folder(12), name).touch()
    os.makedirs(f"{memory.ranks}/lost+found")
    assert slots.list_slots(memory) == [(0, 0), (12, 0), (12, 1)]
    assert slots.list_slots(MemoryLayout("/nonexistent")) == []


def test_a_lock_dies_with_its_process_and_is_not_inherited(memory: MemoryLayout) -> None:
    """A trainer that is killed in the middle of a withdrawal does not hold up anybody."""
    code = (
        "import fcntl, os, sys, subprocess\n"
        "file = open(sys.argv[1], 'rb+'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "subprocess.Popen(['sleep', '1'], stdout=subprocess.DEVNULL)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, memory.slot(0, 0)], check=False, timeout=30)
    slots.withdraw(memory, 0, 0)


def test_descriptors_are_closed(memory: MemoryLayout) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        slots.publish(memory, 0, 0, manifest())
        with slots.reading(memory, 0, 0):
            pass
        slots.withdraw(memory, 0, 0)
    assert len(os.listdir("/proc/self/fd")) == before
