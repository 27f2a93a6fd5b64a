"""Writes sealed shards for tests of loading, with the library's own plan and layout."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from backstay import objects, rng
from backstay.capture import RNG_KEY
from backstay.digest import digest, fingerprint
from backstay.plan import Plan
from backstay.shardfile import Item, Layout
from backstay.structure import Structure
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import Decision, ShardSources, Source

CHECKPOINT = CheckpointId(40, 1_000_001)
CHUNK = 1 << 14


def shard_bytes(
    structure: Structure, plan: Plan, rank: int, more: Mapping[str, Any] | None = None
) -> bytearray:
    """One rank's shard file, as capture writes it."""
    values = {**structure.objects(), RNG_KEY: rng.capture(), **(more or {})}
    encoded = objects.encode(values, {piece.name for piece in plan.pieces})
    extras = [Item(n, t.dtype, tuple(t.shape), (0,) * t.ndim) for n, t in encoded.tensors]
    layout = Layout(plan.items, rank, extras=extras, aliases=structure.aliases)
    frame = layout.frame(extras, len(encoded.json))
    file = bytearray(frame.size)
    file[: len(frame.header)] = frame.header
    live = [piece.tensor.now() for piece in plan.pieces]
    for start, tensor in zip(layout.starts, live, strict=True):
        if tensor is not None:  # an absent gradient: the bytes mean nothing
            _put(file, start, tensor)
    for start, (_, tensor) in zip(frame.starts, encoded.tensors, strict=True):
        _put(file, start, tensor)
    file[frame.blob_start :] = encoded.json
    return file


def sealed(file: bytes, rank: int, world_size: int, plan: str, **more: Any) -> Manifest:
    """Its manifest."""
    manifest = Manifest(
        run="team/run",
        step=CHECKPOINT.step,
        attempt=CHECKPOINT.attempt,
        rank=rank,
        world_size=world_size,
        replica=rank,
        plan=plan,
        size=len(file),
        chunk_size=CHUNK,
        created=1.0,
        **more,
    )
    digests = tuple(
        digest(bytes(file[slice(*manifest.chunk(i))])) for i in range(manifest.num_chunks)
    )
    return manifest.seal(digests, fingerprint(digests))


def write_shard(folder: str, file: bytes, manifest: Manifest) -> None:
    """Put both into a folder, named as in the local tier."""
    path = DiskLayout.shard(str(folder), manifest.checkpoint, manifest.rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(file)
    with open(DiskLayout.manifest(str(folder), manifest.checkpoint, manifest.rank), "wb") as out:
        out.write(manifest.to_json())


def write_slot(memory: MemoryLayout, slot: int, file: bytes, manifest: Manifest) -> None:
    """Put both into a slot; the slot is longer than the shard, as slots may be."""
    os.makedirs(memory.rank_folder(manifest.rank), exist_ok=True)
    with open(memory.slot(manifest.rank, slot), "wb") as out:
        out.write(bytes(file) + b"\xee" * 5000)
    with open(memory.slot_manifest(manifest.rank, slot), "wb") as out:
        out.write(manifest.to_json())


def by_file(folder: str, manifest: Manifest, holder: int = 0) -> Source:
    """The local tier as source."""
    place = (str(folder), manifest.checkpoint, manifest.rank)
    return Source(
        tier="local",
        holder=holder,
        path=DiskLayout.shard(*place),
        manifest_path=DiskLayout.manifest(*place),
    )


def by_slot(memory: MemoryLayout, slot: int, manifest: Manifest) -> Source:
    """The memory tier as source."""
    return Source(
        tier="memory",
        holder=0,
        path=memory.slot(manifest.rank, slot),
        slot=slot,
        slot_rank=manifest.rank,
        manifest_path=memory.slot_manifest(manifest.rank, slot),
    )


def by_url(url: str, manifest: Manifest, tier: str = "remote") -> Source:
    """A server that serves a folder of the local tier's shape."""
    place = ("", manifest.checkpoint, manifest.rank)
    return Source(
        tier=tier,
        holder=-1,
        url=url + DiskLayout.shard(*place),
        manifest_url=url + DiskLayout.manifest(*place),
    )


def decide(
    manifests: list[Manifest], sources: Mapping[int, list[Source]], serial: int = 1
) -> Decision:
    """A decision for the checkpoint that these manifests make up."""
    return Decision(
        round="r",
        serial=serial,
        attempt=1_000_002,
        base=CHECKPOINT,
        saved_world_size=manifests[0].world_size,
        plan=manifests[0].plan,
        shards=tuple(
            ShardSources(
                rank=m.rank,
                size=m.size,
                chunk_size=m.chunk_size,
                fingerprint=m.fingerprint,
                sources=tuple(sources[m.rank]),
            )
            for m in manifests
        ),
    )


def read_manifests(folder: str) -> list[Manifest]:
    """All manifests of the checkpoint in a folder, by rank."""
    from backstay_protocol.manifest import read_manifest

    area = f"{folder}/{CHECKPOINT}"
    names = sorted(name for name in os.listdir(area) if name.endswith(".json"))
    found = []
    for name in names:
        with open(f"{area}/{name}", "rb") as file:
            found.append(read_manifest(file.read(), name))
    return found


def with_fingerprint(source: Decision, rank: int, text: str) -> Decision:
    """The same decision with another fingerprint for one shard."""
    shards = tuple(
        dataclasses.replace(s, fingerprint=text) if s.rank == rank else s for s in source.shards
    )
    return dataclasses.replace(source, shards=shards)


def _put(file: bytearray, start: int, tensor: torch.Tensor | None) -> None:
    assert tensor is not None
    if tensor.numel():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        file[start : start + len(raw)] = raw
