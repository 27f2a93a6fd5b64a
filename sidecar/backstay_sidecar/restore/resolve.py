"""From the leader's decision to paths and URLs that the ranks of one pod can open.

Used by the member. A source that lies in this pod's own volumes is named by its path (and by its
URL, for a reader that can't open it); all others by URL, nearest first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from glob import escape, glob
from urllib.parse import urlencode

from backstay_protocol.choice import nearest
from backstay_protocol.errors import CorruptData, Unreachable, VersionMismatch
from backstay_protocol.files import read_small
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.manifest import read_manifest
from backstay_protocol.messages import (
    CopySource,
    Decision,
    LeaderDecision,
    ShardPlan,
    ShardSources,
    Source,
)
from backstay_protocol.names import (
    LOCAL,
    MEMORY,
    NEIGHBOR,
    REMOTE,
    URL_SHARD,
    URL_SHARD_MANIFEST,
)
from backstay_protocol.slots import list_slots
from backstay_sidecar.restore.ports import RemoteStore

PRESIGNED_SECONDS = 24 * 3600

log = logging.getLogger("backstay.restore")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a shard lies in this pod's own volumes."""

    path: str
    manifest_path: str
    slot: int = -1
    slot_rank: int = -1


class LocalFiles:
    """Finds shards in the memory volume and on the disk of one pod. Methods block."""

    def __init__(self, memory: MemoryLayout, disk: DiskLayout | None) -> None:
        """`disk` is None where the job has no local tier."""
        self._memory = memory
        self._disk = disk

    def find(self, tier: str, checkpoint: CheckpointId, shard: ShardPlan) -> Found | None:
        """The file of that tier that holds these very bytes, by its manifest's fingerprint."""
        places = self._slots() if tier == MEMORY else self._files(tier, checkpoint, shard.rank)
        return next((place for place in places if _holds(place, checkpoint, shard)), None)

    def _slots(self) -> Iterable[Found]:
        for folder, slot in list_slots(self._memory):
            yield Found(
                path=self._memory.slot(folder, slot),
                manifest_path=self._memory.slot_manifest(folder, slot),
                slot=slot,
                slot_rank=folder,
            )

    def _files(self, tier: str, checkpoint: CheckpointId, rank: int) -> Iterable[Found]:
        if self._disk is None or tier not in (LOCAL, NEIGHBOR):
            return
        own = self._disk.shards if tier == LOCAL else self._disk.replicas
        siblings = glob(f"{escape(self._disk.run_folder)}/replica-*/*")
        for area in (own, *sorted(siblings)):
            path = DiskLayout.shard(area, checkpoint, rank)
            if os.path.exists(path):
                yield Found(path=path, manifest_path=DiskLayout.manifest(area, checkpoint, rank))


def _holds(place: Found, checkpoint: CheckpointId, shard: ShardPlan) -> bool:
    try:
        manifest = read_manifest(read_small(place.manifest_path), place.manifest_path)
    except (OSError, CorruptData, VersionMismatch):
        return False
    named = (manifest.checkpoint, manifest.rank, manifest.fingerprint)
    return named == (checkpoint, shard.rank, shard.fingerprint)


def _name(shard: ShardPlan, source: CopySource) -> str:
    """As in LeaderDecision.unreachable."""
    return f"{shard.rank}/{source.tier}/{source.holder}"


class Resolver:
    """Turns decisions of the leader into decisions for the ranks of one replica."""

    def __init__(
        self,
        replica: int,
        files: LocalFiles,
        url: Callable[[int], str],
        headers: Mapping[str, str],
        remote: RemoteStore | None,
        remote_layout: RemoteLayout | None,
    ) -> None:
        """`url`: replica -> `http://host:port`; `headers`: what a request to it must carry."""
        self._replica = replica
        self._files = files
        self._url = url
        self._headers = dict(headers)
        self._remote = remote
        self._layout = remote_layout

    def resolve(self, decision: LeaderDecision) -> Decision:
        """Blocks (looks at files). Sources keep their meaning: nothing is dropped here."""
        unreachable = frozenset(decision.unreachable.get(self._replica, ()))
        shards = tuple(
            ShardSources(
                rank=shard.rank,
                size=shard.size,
                chunk_size=shard.chunk_size,
                fingerprint=shard.fingerprint,
                sources=self._sources(decision, shard, unreachable),
            )
            for shard in decision.shards
            if decision.base is not None
        )
        return Decision(
            round=decision.round,
            serial=decision.serial,
            attempt=decision.attempt,
            base=decision.base,
            saved_world_size=decision.saved_world_size,
            plan=decision.plan,
            chain=decision.chain,
            shards=shards,
            reason=decision.reason,
            skipped_bad=decision.skipped_bad,
            base_run=decision.base_run,
        )

    def _sources(
        self, decision: LeaderDecision, shard: ShardPlan, unreachable: frozenset[str]
    ) -> tuple[Source, ...]:
        assert decision.base is not None
        out_of_reach = [source for source in shard.sources if _name(shard, source) in unreachable]
        ordered = nearest(shard.sources, self._replica, out_of_reach)
        if decision.base_run:
            return self._of_other_run(decision.base, decision.base_run, shard, ordered)
        found = (self._source(decision.base, shard, source) for source in ordered)
        return tuple(source for source in found if source is not None)

    def _of_other_run(
        self, checkpoint: CheckpointId, run: str, shard: ShardPlan, ordered: Iterable[CopySource]
    ) -> tuple[Source, ...]:
        """Only the remote tier has it: what lies here under that name is another checkpoint."""
        layout = self._layout.sibling(run) if self._layout is not None else None
        remote = [source for source in ordered if source.tier == REMOTE]
        found = (self._presigned(checkpoint, shard.rank, layout) for _ in remote)
        return tuple(source for source in found if source is not None)

    def _source(
        self, checkpoint: CheckpointId, shard: ShardPlan, source: CopySource
    ) -> Source | None:
        if source.tier == REMOTE:
            return self._presigned(checkpoint, shard.rank, self._layout)
        found = None
        if source.holder == self._replica:
            found = self._files.find(source.tier, checkpoint, shard)
        return self._served(checkpoint, shard.rank, source, found)

    def _served(
        self, checkpoint: CheckpointId, rank: int, source: CopySource, found: Found | None
    ) -> Source:
        base, query = self._url(source.holder), urlencode({"tier": source.tier})
        place = {"checkpoint": checkpoint, "rank": rank}
        return Source(
            tier=source.tier,
            holder=source.holder,
            path=found.path if found else "",
            slot=found.slot if found else -1,
            slot_rank=found.slot_rank if found else -1,
            manifest_path=found.manifest_path if found else "",
            url=f"{base}{URL_SHARD.format(**place)}?{query}",
            manifest_url=f"{base}{URL_SHARD_MANIFEST.format(**place)}?{query}",
            headers=self._headers,
        )

    def _presigned(
        self, checkpoint: CheckpointId, rank: int, layout: RemoteLayout | None
    ) -> Source | None:
        if self._remote is None or layout is None:
            return None
        return Source(
            tier=REMOTE,
            holder=-1,
            url=self._sign(self._remote, layout.shard(checkpoint, rank)),
            manifest_url=self._sign(self._remote, layout.manifest(checkpoint, rank)),
        )

    @staticmethod
    def _sign(remote: RemoteStore, key: str) -> str:
        """Without keys just now: a URL that the store refuses, so that the leader hears of it."""
        try:
            return remote.presign_get(key, PRESIGNED_SECONDS)
        except Unreachable as error:
            log.warning("can't sign for the ranks: %s", error)
            return remote.address(key)
