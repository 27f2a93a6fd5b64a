"""attempt.json on two volumes: what survives a reboot, a new disk, a broken disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout
from backstay_protocol.records import HALF_BYTES, AttemptRecord, AttemptState
from backstay_sidecar.restore.promise_store import PromiseStore
from support.restore_fakes import Events

PROMISED = AttemptState(
    promised=7_000_002,
    round="r",
    record=AttemptRecord(attempt=7_000_001, base=CheckpointId(5, 6_000_001)),
    in_line=7,
)


@pytest.fixture
def places(tmp_path: Path) -> tuple[MemoryLayout, DiskLayout]:
    (tmp_path / "memory").mkdir()
    return MemoryLayout(str(tmp_path / "memory")), DiskLayout(str(tmp_path / "disk"), "ns/run", 0)


def opened(memory: MemoryLayout, disk: DiskLayout | None) -> tuple[PromiseStore, Events]:
    events = Events()
    store = PromiseStore(memory, disk, events)
    store.prepare()
    return store, events


def test_a_promise_outlives_the_process(places: tuple[MemoryLayout, DiskLayout]) -> None:
    opened(*places)[0].save(PROMISED)
    assert opened(*places)[0].state == PROMISED


def test_a_reboot_wipes_the_memory_volume_and_the_disk_still_knows(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    opened(*places)[0].save(PROMISED)
    os.unlink(places[0].attempt_file)
    assert opened(*places)[0].state == PROMISED


def test_a_new_disk_learns_from_the_memory_volume_but_is_not_in_line(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    opened(*places)[0].save(PROMISED)
    os.unlink(places[1].attempt_file)
    state = opened(*places)[0].state
    assert (state.promised, state.round, state.record) == (
        PROMISED.promised,
        PROMISED.round,
        PROMISED.record,
    )
    assert state.in_line == 0


def test_both_files_are_reserved_at_start_so_that_a_full_disk_is_no_obstacle(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    store, _ = opened(*places)
    for path in (places[0].attempt_file, places[1].attempt_file):
        assert os.stat(path).st_size == 2 * HALF_BYTES
    store.save(PROMISED)
    assert os.stat(places[1].attempt_file).st_size == 2 * HALF_BYTES


def test_a_write_torn_in_the_middle_leaves_the_older_half(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    store, _ = opened(*places)
    store.save(AttemptState(promised=1, round="a"))
    store.save(AttemptState(promised=2, round="b"))
    for path in (places[0].attempt_file, places[1].attempt_file):
        with open(path, "r+b") as file:
            halves = [file.read(HALF_BYTES), file.read(HALF_BYTES)]
            newer = next(i for i, half in enumerate(halves) if b'"round":"b"' in half)
            file.seek(newer * HALF_BYTES + 100)
            file.write(b"torn")
    assert opened(*places)[0].state.promised == 1


def test_without_a_disk_the_memory_volume_serves_alone(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    store, _ = opened(places[0], None)
    store.save(PROMISED)
    assert not store.has_disk
    assert store.state.promised == PROMISED.promised


def test_a_broken_disk_is_reported_once_and_the_memory_volume_serves_alone(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    Path(places[1].run_folder).mkdir(parents=True)
    Path(places[1].folder).write_text("a file where the folder should be")
    store, events = opened(*places)
    store.save(PROMISED)
    store.save(PROMISED)
    assert store.state == PROMISED
    assert not store.has_disk
    assert events.kinds() == ["promise_disk_failed"]
    assert places[1].attempt_file in events.all[0][1]["message"]


def test_a_disk_that_fails_for_a_while_comes_back(
    places: tuple[MemoryLayout, DiskLayout],
) -> None:
    store, events = opened(*places)
    os.unlink(places[1].attempt_file)
    os.mkdir(places[1].attempt_file)
    store.save(PROMISED)
    assert not store.has_disk
    os.rmdir(places[1].attempt_file)
    store.save(PROMISED)
    assert store.has_disk
    assert events.kinds() == ["promise_disk_failed", "promise_disk_back"]


def test_a_memory_volume_that_cannot_hold_the_file_is_an_error(tmp_path: Path) -> None:
    store = PromiseStore(MemoryLayout(str(tmp_path / "missing")), None, Events())
    with pytest.raises(FileNotFoundError):
        store.prepare()
