"""The keys of a run, sorted by what they are. Pure; used by RemoteBook."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import RemoteLayout


@dataclass
class Listing:
    """One listing of everything under a run's prefix."""

    claims: list[int] = field(default_factory=list)
    """Attempt numbers, ascending."""
    bases: list[int] = field(default_factory=list)
    commits: set[CheckpointId] = field(default_factory=set)
    pins: set[CheckpointId] = field(default_factory=set)
    intents: set[CheckpointId] = field(default_factory=set)
    shards: dict[CheckpointId, dict[int, int]] = field(default_factory=dict)
    """Checkpoint -> rank -> bytes of the shard, where data and manifest are both there."""
    keys: dict[CheckpointId, list[str]] = field(default_factory=dict)
    """Checkpoint -> every key in its folder."""


def sort_keys(layout: RemoteLayout, found: Iterable[tuple[str, int]]) -> Listing:
    """Keys that mean nothing here are passed over."""
    listing = Listing()
    data: dict[tuple[CheckpointId, int], int] = {}
    manifests: set[tuple[CheckpointId, int]] = set()
    for key, size in found:
        shard = layout.parse_shard_key(key)
        if shard is None:
            _sort_small(listing, layout, key)
            continue
        checkpoint, rank, kind = shard
        listing.keys.setdefault(checkpoint, []).append(key)
        if kind == "json":
            manifests.add((checkpoint, rank))
        else:
            data[checkpoint, rank] = size
    for (checkpoint, rank), size in data.items():
        if (checkpoint, rank) in manifests:
            listing.shards.setdefault(checkpoint, {})[rank] = size
    listing.claims.sort()
    listing.bases.sort()
    return listing


def _sort_small(listing: Listing, layout: RemoteLayout, key: str) -> None:
    folder, _, name = key.removeprefix(layout.root).partition("/")
    if folder == "attempts":
        stem, _, kind = name.partition(".")
        if stem.isdigit() and kind in ("json", "base.json"):
            (listing.claims if kind == "json" else listing.bases).append(int(stem))
        return
    name, _, leaf = name.partition("/")
    checkpoint = parse_checkpoint(name)
    if checkpoint is None:
        return
    if folder == "deletions":
        listing.intents.add(checkpoint)
    elif folder == "checkpoints":
        listing.keys.setdefault(checkpoint, []).append(key)
        if leaf == "commit.json":
            listing.commits.add(checkpoint)
        elif leaf == "pin.json":
            listing.pins.add(checkpoint)


def parse_checkpoint(name: str) -> CheckpointId | None:
    """A checkpoint's name, or None."""
    try:
        return CheckpointId.parse(name)
    except ValueError:
        return None
