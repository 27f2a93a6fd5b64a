"""Makes the missing local copies of the base again after a restore, in the background.

Started by the agent when an attempt has begun. Shards that lie in this pod's memory are the local
worker's to move; here only what this pod has nowhere is pulled, from where the ranks loaded it.
The neighbour's copies follow from the local ones by themselves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event

from backstay_protocol.choice import nearest
from backstay_protocol.errors import BackstayError, CorruptData, Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import ShardPlan
from backstay_protocol.names import REMOTE, URL_SHARD, URL_SHARD_MANIFEST
from backstay_protocol.pull import Endpoint, get_bytes, pull
from backstay_sidecar.digest import digest
from backstay_sidecar.replication.replicator import Emit
from backstay_sidecar.tiers.base import ShardReader
from backstay_sidecar.tiers.disk import DiskStore

PULL_THREADS = 2
ROUNDS = 5
PAUSE_SECONDS = 5.0
"""Others load and copy at the same time: there is no hurry."""

OpenRemote = Callable[[CheckpointId, int], AbstractContextManager[ShardReader]]


@dataclass(frozen=True)
class Elsewhere:
    """How shards of other holders are reached."""

    replica: int
    url: Callable[[int], str]
    """Replica -> `http://host:port`."""
    headers: Mapping[str, str]
    open_remote: OpenRemote | None


async def refill(
    base: CheckpointId,
    shards: Iterable[ShardPlan],
    store: DiskStore,
    elsewhere: Elsewhere,
    cancel: Event,
    emit: Emit,
) -> int:
    """Pull each of `shards` that `store` lacks; returns how many were made again.

    Ends when all are there, when `cancel` is set, or after a few rounds over all sources.
    """
    made = 0
    missing = list(shards)
    for number in range(ROUNDS):
        still = []
        for plan in missing:
            if cancel.is_set():
                return made
            error = await asyncio.to_thread(_one, base, plan, store, elsewhere, cancel)
            if error:
                still.append(plan)
                if number == ROUNDS - 1:
                    emit("refill_failed", checkpoint=base, rank=plan.rank, message=error)
            else:
                made += 1
        missing = still
        if not missing:
            break
        await asyncio.sleep(PAUSE_SECONDS * (0.5 + random.random()))
    return made


def _one(
    base: CheckpointId, plan: ShardPlan, store: DiskStore, elsewhere: Elsewhere, cancel: Event
) -> str:
    """Try each source, nearest first. Empty: it is there now; else why not."""
    why = "no source is left"
    for source in nearest(plan.sources, elsewhere.replica, frozenset()):
        if source.holder == elsewhere.replica:
            continue
        try:
            if store.find(base, plan.rank) is not None:
                return ""
            if source.tier == REMOTE:
                _from_remote(base, plan, store, elsewhere, cancel)
            else:
                _from_peer(base, plan, source.tier, source.holder, store, elsewhere, cancel)
            return ""
        except (BackstayError, OSError) as error:
            why = f"{source.tier} of replica {source.holder}: {error}"
    return why


def _from_remote(
    base: CheckpointId, plan: ShardPlan, store: DiskStore, elsewhere: Elsewhere, cancel: Event
) -> None:
    if elsewhere.open_remote is None:
        raise Unreachable("there is no remote tier")
    with elsewhere.open_remote(base, plan.rank) as shard:
        _check(plan, shard.manifest)
        store.put(shard, cancel)


def _from_peer(
    base: CheckpointId,
    plan: ShardPlan,
    tier: str,
    holder: int,
    store: DiskStore,
    elsewhere: Elsewhere,
    cancel: Event,
) -> None:
    place = {"checkpoint": base, "rank": plan.rank}
    peer = elsewhere.url(holder)
    url = f"{peer}{URL_SHARD_MANIFEST.format(**place)}?tier={tier}"
    manifest = read_manifest(get_bytes(Endpoint(url, elsewhere.headers)), url)
    _check(plan, manifest)
    shard = Endpoint(f"{peer}{URL_SHARD.format(**place)}?tier={tier}", elsewhere.headers)
    with store.begin(manifest) as writer:
        pull(shard, manifest, digest, writer.write_chunk, threads=PULL_THREADS, cancel=cancel)
        writer.publish(manifest)


def _check(plan: ShardPlan, manifest: Manifest) -> None:
    if manifest.fingerprint != plan.fingerprint:
        raise CorruptData(
            f"it holds another copy of rank {plan.rank}: fingerprint {manifest.fingerprint}, "
            f"the base's is {plan.fingerprint}"
        )
