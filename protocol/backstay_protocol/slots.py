"""The hand-over of a slot between trainer and sidecar.

The trainer holds the exclusive lock only to withdraw the manifest, never while it writes: a lock
lives as long as any forked data-loader worker, and must not outlive the trainer. The sidecar takes
the shared lock first and *then* looks for the manifest; while it holds the lock the slot can't be
withdrawn. Lock descriptors are opened for each use, never mapped, and close on exec.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from backstay_protocol.files import read_small, write_atomically
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import Manifest, read_manifest


class SlotBusy(Exception):
    """The other side holds the slot just now."""


def withdraw(memory: MemoryLayout, rank: int, slot: int) -> None:
    """Trainer: make the slot free to overwrite. Raises SlotBusy while a sidecar reads it."""
    with _locked(memory.slot(rank, slot), fcntl.LOCK_EX), suppress(FileNotFoundError):
        os.unlink(memory.slot_manifest(rank, slot))


def publish(memory: MemoryLayout, rank: int, slot: int, manifest: Manifest) -> None:
    """Trainer: the slot is whole. One rename makes it visible."""
    write_atomically(memory.slot_manifest(rank, slot), manifest.to_json(), sync=False)


@contextmanager
def reading(memory: MemoryLayout, rank: int, slot: int) -> Iterator[Manifest | None]:
    """Sidecar, or a trainer that restores: hold the slot still and see what is in it.

    Yields None if nothing is published. Raises SlotBusy while it is being withdrawn,
    FileNotFoundError if there is no such slot.
    """
    with _locked(memory.slot(rank, slot), fcntl.LOCK_SH):
        yield peek(memory, rank, slot)


def peek(memory: MemoryLayout, rank: int, slot: int) -> Manifest | None:
    """What the slot holds at this moment, without a lock: a hint only."""
    path = memory.slot_manifest(rank, slot)
    try:
        return read_manifest(read_small(path), path)
    except FileNotFoundError:
        return None


def seal(memory: MemoryLayout, rank: int, slot: int, sealed: Manifest) -> None:
    """Sidecar: replace the manifest by its sealed form. Call it inside `reading`."""
    write_atomically(memory.slot_manifest(rank, slot), sealed.to_json(), sync=False)


def strike(memory: MemoryLayout, rank: int, slot: int) -> None:
    """Sidecar: the slot's bytes were proven bad: hide them. Call it inside `reading`."""
    with suppress(FileNotFoundError):
        os.unlink(memory.slot_manifest(rank, slot))


def list_slots(memory: MemoryLayout) -> list[tuple[int, int]]:
    """Every (rank, slot) in the volume."""
    found = []
    for rank in _listdir(memory.ranks):
        if not rank.isdigit():
            continue
        for name in _listdir(memory.rank_folder(int(rank))):
            stem, _, number = name.partition("-")
            if stem == "slot" and number.isdigit():
                found.append((int(rank), int(number)))
    return sorted(found)


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


@contextmanager
def _locked(path: str, kind: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SlotBusy(f"{path} is in use by the other side") from error
        yield
    finally:
        os.close(descriptor)
