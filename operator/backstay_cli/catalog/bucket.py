"""Checkpoints as they lie in a bucket, without any sidecar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from backstay_cli.catalog.base import CorruptCopy, Deliver, ShardSource, sealed_manifest
from backstay_cli.digest import digest
from backstay_cli.errors import NotFound
from backstay_protocol import codec
from backstay_protocol.errors import CorruptData, ProtocolError
from backstay_protocol.history import Chain, Lineage, newest_lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import BASE_SUFFIX, RemoteLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import CheckpointList, CheckpointStatus
from backstay_protocol.names import REMOTE
from backstay_protocol.pull import Endpoint, pull
from backstay_protocol.records import AttemptRecord, CommitRecord

T = TypeVar("T")

if TYPE_CHECKING:  # the S3 client takes long to import
    from backstay_cli.bucket import Bucket


@dataclass(frozen=True)
class BucketSource:
    """A copy in the bucket."""

    manifest: Manifest
    endpoint: Endpoint
    tier: str = REMOTE

    @property
    def name(self) -> str:
        """For people."""
        return self.endpoint.name

    def pull(self, deliver: Deliver, threads: int, cancel: threading.Event) -> None:
        """See ShardSource."""
        pull(self.endpoint, self.manifest, digest, deliver, threads=threads, cancel=cancel)


@dataclass
class _Seen:
    """Keys of one checkpoint's folder."""

    data: dict[int, int] = field(default_factory=dict)
    manifests: set[int] = field(default_factory=set)
    commit: CommitRecord | None = None
    pinned: bool = False

    @property
    def whole_shards(self) -> set[int]:
        return self.manifests & self.data.keys()


class BucketCatalog:
    """One run in one bucket."""

    def __init__(self, bucket: Bucket, run: str, prefix: str) -> None:
        """`run`: `<namespace>/<run name>`."""
        self._bucket = bucket
        self._run = run
        self._layout = RemoteLayout(prefix, run)
        self._commits: dict[CheckpointId, CommitRecord] = {}

    @property
    def where(self) -> str:
        """For people."""
        return f"{self._bucket}, {self._layout.root}"

    @property
    def committed_only(self) -> bool:
        """See Catalog."""
        return True

    def checkpoints(self) -> CheckpointList:
        """By one listing, the newest base record and the commit records. Raises NotFound."""
        keys = dict(self._bucket.list(self._layout.root))
        if not keys:
            raise NotFound(
                f"{self._bucket}: nothing is kept under {self._layout.root}",
                "check --run (NAMESPACE/RUN NAME) and --prefix",
            )
        seen = self._sort(keys)
        lineage = self._lineage(keys, seen)
        found = [self._status(c, one, lineage) for c, one in sorted(seen.items(), reverse=True)]
        attempt = lineage.attempt if lineage is not None else 0
        return CheckpointList(run=self._run, attempt=attempt, checkpoints=tuple(found))

    def sources(
        self, checkpoint: CheckpointStatus, rank: int
    ) -> Iterator[ShardSource | CorruptCopy]:
        """The one copy that there is; checked against the commit record."""
        name = checkpoint.checkpoint
        key = self._layout.manifest(name, rank)
        data = self._bucket.get(key)
        if data is None:
            return
        try:
            manifest = sealed_manifest(data, key, name, rank)
            self._check_commit(manifest)
        except CorruptData as error:
            yield CorruptCopy(key, REMOTE, error)
            return
        yield BucketSource(manifest, self._bucket.source(self._layout.shard(name, rank)))

    def _check_commit(self, manifest: Manifest) -> None:
        commit = self._commits.get(manifest.checkpoint)
        if commit is None:
            return
        promised = {shard.rank: (shard.size, shard.fingerprint) for shard in commit.shards}
        if promised.get(manifest.rank) != (manifest.size, manifest.fingerprint):
            raise CorruptData(
                f"rank {manifest.rank} of {manifest.checkpoint}: size or fingerprint in its "
                "manifest is not what the commit record says"
            )

    def _sort(self, keys: dict[str, int]) -> dict[CheckpointId, _Seen]:
        seen: dict[CheckpointId, _Seen] = {}
        for key, size in keys.items():
            shard = self._layout.parse_shard_key(key)
            if shard is not None:
                checkpoint, rank, kind = shard
                one = seen.setdefault(checkpoint, _Seen())
                if kind == "json":
                    one.manifests.add(rank)
                else:
                    one.data[rank] = size
        for checkpoint, one in seen.items():
            one.pinned = self._layout.pin(checkpoint) in keys
            if self._layout.commit(checkpoint) in keys:
                one.commit = self._read(CommitRecord, self._layout.commit(checkpoint))
            if one.commit is not None:
                self._commits[checkpoint] = one.commit
        return seen

    def _lineage(self, keys: dict[str, int], seen: dict[CheckpointId, _Seen]) -> Lineage | None:
        """Of the greatest attempt that a base record, commit record or shard tells of."""
        bases = sorted(key for key in keys if key.endswith(BASE_SUFFIX))
        record = self._read(AttemptRecord, bases[-1]) if bases else None
        chains: dict[int, Chain] = {}
        for checkpoint, one in seen.items():
            if one.commit is not None:
                chains[checkpoint.attempt] = one.commit.chain
        newest = max((c.attempt for c in seen), default=0)
        if newest not in chains and (record is None or record.attempt < newest):
            chains[newest] = self._chain_in_manifest(newest, seen)
        return newest_lineage([record] if record is not None else [], chains)

    def _chain_in_manifest(self, attempt: int, seen: dict[CheckpointId, _Seen]) -> Chain:
        for checkpoint, one in seen.items():
            if checkpoint.attempt == attempt and one.manifests:
                key = self._layout.manifest(checkpoint, min(one.manifests))
                data = self._bucket.get(key)
                return read_manifest(data, key).chain if data is not None else ()
        return ()

    def _status(
        self, checkpoint: CheckpointId, one: _Seen, lineage: Lineage | None
    ) -> CheckpointStatus:
        world_size = one.commit.world_size if one.commit else self._world_size(checkpoint, one)
        whole = world_size > 0 and one.whole_shards >= set(range(world_size))
        return CheckpointStatus(
            checkpoint=checkpoint,
            world_size=world_size,
            complete_in=(REMOTE,) if whole else (),
            present_in={REMOTE: len(one.whole_shards)},
            durable=one.commit is not None and whole,
            pinned=one.pinned,
            on_lineage=lineage is not None and lineage.contains(checkpoint),
            size=sum(one.data[rank] for rank in one.whole_shards),
            created=one.commit.created if one.commit else 0.0,
        )

    def _world_size(self, checkpoint: CheckpointId, one: _Seen) -> int:
        """Of a checkpoint without a commit record: as one of its manifests says; 0: unknown."""
        if not one.manifests:
            return 0
        key = self._layout.manifest(checkpoint, min(one.manifests))
        data = self._bucket.get(key)
        try:
            return read_manifest(data, key).world_size if data is not None else 0
        except CorruptData:
            return 0

    def _read(self, kind: type[T], key: str) -> T | None:
        data = self._bucket.get(key)
        if data is None:
            return None
        try:
            return codec.loads(kind, data)
        except ProtocolError as error:
            raise CorruptData(f"{self._bucket}, {key}: {error}") from error
