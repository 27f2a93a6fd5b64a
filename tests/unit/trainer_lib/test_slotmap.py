"""Slots: made in the background, never shrunk, never a store without a page behind it."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backstay.slotmap import SlotMap
from backstay_protocol.layout import MemoryLayout

MIB = 1 << 20
PATIENCE_SECONDS = 30.0


@pytest.fixture
def memory(tmp_path: Path) -> MemoryLayout:
    return MemoryLayout(str(tmp_path))


def made(memory: MemoryLayout, size: int, num_slots: int = 2) -> SlotMap:
    slots = SlotMap(memory, 0, num_slots)
    slots.reserve(size)
    slots.join(PATIENCE_SECONDS)
    return slots


def test_slots_are_whole_and_hold_what_is_stored(memory: MemoryLayout) -> None:
    slots = made(memory, 3 * MIB + 5)
    for slot in slots.slots:
        assert slot.capacity == 3 * MIB + 4096
        assert os.stat(slot.path).st_blocks * 512 >= slot.capacity
        assert slot.mapping is not None
        slot.mapping.view(4096, torch.float32, (2, 3)).fill_(slot.index)
        slot.mapping.write(0, b"head")
    assert Path(slots.slots[1].path).read_bytes()[:4] == b"head"
    slots.close()
    assert slots.slots[0].capacity == 0


def test_the_next_process_uses_the_same_file_and_finds_what_was_in_it(
    memory: MemoryLayout,
) -> None:
    first = made(memory, MIB)
    assert first.slots[0].mapping is not None
    first.slots[0].mapping.write(100, b"kept")
    number = os.stat(first.slots[0].path).st_ino
    first.close()
    second = made(memory, MIB)
    assert second.slots[0].mapping is not None
    assert os.stat(second.slots[0].path).st_ino == number
    assert bytes(second.slots[0].mapping.view(100, torch.uint8, (4,)).tolist()) == b"kept"


def test_a_slot_grows_in_place_and_the_old_mapping_stays_good(memory: MemoryLayout) -> None:
    slots = made(memory, MIB)
    old = slots.slots[0].mapping
    assert old is not None
    number = os.stat(slots.slots[0].path).st_ino
    slots.reserve(2 * MIB)
    slots.join(PATIENCE_SECONDS)
    old.write(7, b"through the old one")
    slots.drop_retired()
    new = slots.slots[0].mapping
    assert new is not None
    assert new is not old
    assert bytes(new.view(7, torch.uint8, (3,)).tolist()) == b"thr"
    assert os.stat(slots.slots[0].path).st_ino == number


def test_asking_again_for_what_is_there_does_nothing(memory: MemoryLayout) -> None:
    slots = made(memory, MIB)
    before = [slot.mapping for slot in slots.slots]
    slots.reserve(MIB // 2)
    slots.join(PATIENCE_SECONDS)
    assert [slot.mapping for slot in slots.slots] == before


@pytest.fixture
def file_limit() -> Iterator[int]:
    """Files of this process may not grow beyond it: no room, without a volume of one's own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, limits[1]))
    yield 4 * MIB
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_slot_that_cannot_grow_is_trouble_and_the_old_one_goes_on(
    memory: MemoryLayout, file_limit: int
) -> None:
    slots = made(memory, MIB)
    slots.reserve(2 * file_limit)
    slots.join(PATIENCE_SECONDS)
    assert os.strerror(errno.EFBIG) in slots.trouble
    assert slots.wait_for(2 * file_limit, PATIENCE_SECONDS) == []
    assert [slot.capacity for slot in slots.slots] == [MIB, MIB]


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[MemoryLayout]:
    """A real tmpfs of 8 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root; the same path is tested by a file size limit")
    yield MemoryLayout(str(where))
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_volume_names_the_room_that_is_needed_and_gives_back_what_it_took(
    small_volume: MemoryLayout,
) -> None:
    slots = made(small_volume, 6 * MIB)
    assert [slot.capacity for slot in slots.slots] == [6 * MIB, 0]
    assert f"need {12 * MIB}" in slots.trouble
    assert "checkpoint.memory.sizeLimit" in slots.trouble
    assert os.statvfs(small_volume.root).f_bavail * 4096 >= MIB


def test_room_taken_by_another_meanwhile_is_no_crash(
    small_volume: MemoryLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotMap, "_check_room", lambda *_: None)
    slots = made(small_volume, 6 * MIB)
    assert [slot.capacity for slot in slots.slots] == [6 * MIB, 0]
    assert "too small" in slots.trouble
    assert os.statvfs(small_volume.root).f_bavail * 4096 >= MIB
    (Path(small_volume.root) / "room").write_bytes(b"")
    slots.reserve(MIB)
