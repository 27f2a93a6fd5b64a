"""Slots as a tier: sealed ones are served, held ones can't be withdrawn, bad ones are hidden."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from backstay_protocol import slots
from backstay_protocol.errors import CorruptData
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import FORCED, Manifest
from backstay_protocol.names import LOCAL
from backstay_sidecar.replication.sealer import Sealer
from backstay_sidecar.tiers.disk import DiskStore
from backstay_sidecar.tiers.memory import MemoryTier
from support.byte_shards import RUN, manifest_of, noise

NEVER = threading.Event()


@pytest.fixture
def layout(tmp_path: Path) -> MemoryLayout:
    return MemoryLayout(str(tmp_path / "memory"))


@pytest.fixture
def tier(layout: MemoryLayout) -> MemoryTier:
    return MemoryTier(layout, RUN, 0)


def fill(layout: MemoryLayout, manifest: Manifest, data: bytes, slot: int = 0) -> None:
    os.makedirs(layout.rank_folder(manifest.rank), exist_ok=True)
    Path(layout.slot(manifest.rank, slot)).write_bytes(data + b"more room than data")
    slots.publish(layout, manifest.rank, slot, manifest)


def test_an_unsealed_slot_is_published_but_not_served(
    layout: MemoryLayout, tier: MemoryTier
) -> None:
    data = noise(100_000)
    manifest = manifest_of(data, sealed=False)
    fill(layout, manifest, data)
    assert [found.manifest for found in tier.published()] == [manifest]
    assert list(tier.inventory()) == []
    with pytest.raises(FileNotFoundError, match="not yet sealed"):
        tier.open(manifest.checkpoint, 0).__enter__()


def test_a_sealed_slot_is_served_and_held_meanwhile(layout: MemoryLayout, tier: MemoryTier) -> None:
    data = noise(100_000)
    manifest = manifest_of(data)
    fill(layout, manifest, data)
    with tier.open(manifest.checkpoint, 0) as reader:
        with pytest.raises(slots.SlotBusy):
            slots.withdraw(layout, 0, 0)
        buffer = bytearray(len(data))
        reader.read_into(0, memoryview(buffer))
        assert buffer == data
    slots.withdraw(layout, 0, 0)
    with pytest.raises(FileNotFoundError):
        tier.open(manifest.checkpoint, 0).__enter__()


def test_the_newest_of_two_slots_does_not_hide_the_other(
    layout: MemoryLayout, tier: MemoryTier
) -> None:
    old, new = noise(50_000, 1), noise(50_000, 2)
    fill(layout, manifest_of(old, step=5), old, 0)
    fill(layout, manifest_of(new, step=6), new, 1)
    for step, data in ((5, old), (6, new)):
        with tier.open(manifest_of(data, step=step).checkpoint, 0) as reader:
            buffer = bytearray(len(data))
            reader.read_into(0, memoryview(buffer))
            assert buffer == data


def test_a_slot_that_was_cut_short_is_proven_bad(layout: MemoryLayout, tier: MemoryTier) -> None:
    data = noise(100_000)
    manifest = manifest_of(data)
    fill(layout, manifest, data)
    os.truncate(layout.slot(0, 0), 1000)
    with pytest.raises(CorruptData, match="truncated the slot"):
        tier.open(manifest.checkpoint, 0).__enter__()


def test_a_struck_slot_is_gone(layout: MemoryLayout, tier: MemoryTier) -> None:
    data = noise(100_000)
    manifest = manifest_of(data)
    fill(layout, manifest, data)
    tier.delete(manifest.checkpoint, 0)
    tier.delete(manifest.checkpoint, 0)
    assert tier.published() == []
    assert os.path.exists(layout.slot(0, 0)), "the slot itself is never removed"


def test_slots_of_another_run_and_unreadable_ones_are_passed_over(
    layout: MemoryLayout, tier: MemoryTier
) -> None:
    data = noise(50_000)
    fill(layout, replace(manifest_of(data), run="team/other"), data, 0)
    fill(layout, manifest_of(data), data, 1)
    Path(layout.slot_manifest(0, 1)).write_bytes(b"{ torn")
    assert tier.published() == []


def sealer(tier: MemoryTier, local: DiskStore | None) -> Sealer:
    return Sealer(tier, local, lambda manifest: manifest.reason == FORCED, threading.Event())


def test_one_pass_seals_the_slot_and_writes_the_disk_when_it_is_due(
    layout: MemoryLayout, tier: MemoryTier, tmp_path: Path
) -> None:
    local = DiskStore(str(tmp_path / "shards"), LOCAL, 0, RUN)
    forced, scheduled = noise(300_000, 1), noise(300_000, 2)
    fill(layout, replace(manifest_of(forced, step=1, sealed=False), reason=FORCED), forced, 0)
    fill(layout, manifest_of(scheduled, step=2, sealed=False), scheduled, 1)
    it = sealer(tier, local)
    for slot, data, in_local in ((0, forced, True), (1, scheduled, False)):
        sealed = it.seal(0, slot)
        assert sealed is not None
        assert sealed.manifest.fingerprint == manifest_of(data).fingerprint
        assert sealed.in_local is in_local
        assert it.seal(0, slot) is None, "there is nothing left to do"
    assert [copy.checkpoint.step for copy in local.inventory()] == [1]
    assert len(list(tier.inventory())) == 2


def test_a_disk_that_fails_does_not_keep_a_slot_from_being_sealed(
    layout: MemoryLayout, tier: MemoryTier, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"where a folder should be")
    local = DiskStore(str(tmp_path / "file" / "shards"), LOCAL, 0, RUN)
    data = noise(300_000)
    fill(layout, replace(manifest_of(data, sealed=False), reason=FORCED), data)
    sealed = sealer(tier, local).seal(0, 0)
    assert sealed is not None
    assert not sealed.in_local
    assert isinstance(sealed.local_error, OSError)
    assert len(list(tier.inventory())) == 1
