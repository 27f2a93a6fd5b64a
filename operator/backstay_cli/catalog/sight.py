"""What a restore would see in a bucket or on disks, as the pure choice takes it.

Used by `restore --dry-run` where no leader can be asked. It reads names, records and manifests;
never a byte of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from backstay_protocol import codec
from backstay_protocol.copies import committed_copies, copy_of
from backstay_protocol.errors import CorruptData, ProtocolError, VersionMismatch
from backstay_protocol.history import Chain
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import BASE_SUFFIX, RemoteLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import ShardCopy
from backstay_protocol.names import REMOTE
from backstay_protocol.origins import OtherRun
from backstay_protocol.records import AttemptRecord, CommitRecord

if TYPE_CHECKING:  # the S3 client takes long to import
    from backstay_cli.bucket import Bucket

T = TypeVar("T")

_AT_ONCE = 8
_BASES = 50
"""The newest so many base records are read: the greatest attempt's decides."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """All that is known when a base is chosen."""

    records: tuple[AttemptRecord, ...] = ()
    """Of members, from their disks."""
    bases: tuple[AttemptRecord, ...] = ()
    """From the remote tier."""
    copies: tuple[ShardCopy, ...] = ()
    chains: dict[int, Chain] = field(default_factory=dict)
    commits: frozenset[CheckpointId] = frozenset()
    """With a commit record in the remote tier."""
    intents: frozenset[CheckpointId] = frozenset()
    remote: bool = False
    """There is a remote tier, and it was listed."""

    def with_other(self, other: Sight) -> Sight:
        """Both together."""
        return Sight(
            records=self.records + other.records,
            bases=self.bases + other.bases,
            copies=self.copies + other.copies,
            chains={**self.chains, **other.chains},
            commits=self.commits | other.commits,
            intents=self.intents | other.intents,
            remote=self.remote or other.remote,
        )

    def as_other(self, run: str) -> OtherRun:
        """What was seen of another run's part of the remote tier."""
        return OtherRun(
            run=run,
            bases=self.bases,
            copies=self.copies,
            chains=self.chains,
            commits=self.commits,
            intents=self.intents,
        )

    @property
    def attempts(self) -> list[int]:
        """Every number in sight."""
        told = [record.attempt for record in (*self.records, *self.bases)]
        return [*told, *(copy.checkpoint.attempt for copy in self.copies), *self.chains]

    @property
    def world_size(self) -> int:
        """Of the newest record that tells it, else of the newest copy; 1: nothing is there."""
        records = [r for r in (*self.records, *self.bases) if r.world_size]
        if records:
            return max(records, key=lambda record: record.attempt).world_size
        newest = max(self.copies, key=lambda copy: copy.checkpoint, default=None)
        return newest.world_size if newest is not None else 1


def bucket_sight(bucket: Bucket, layout: RemoteLayout, run: str) -> Sight:
    """By one listing and the small objects in it. Raises CommandError."""
    return _BucketReader(bucket, layout, run).sight()


class _BucketReader:
    def __init__(self, bucket: Bucket, layout: RemoteLayout, run: str) -> None:
        self._bucket = bucket
        self._layout = layout
        self._run = run

    def sight(self) -> Sight:
        keys = dict(self._bucket.list(self._layout.root))
        shards = self._shards(keys)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            bases = threads.map(self._base, sorted(k for k in keys if self._is_base(k))[-_BASES:])
            commits = dict(threads.map(self._commit, [c for c in shards if self._marked(c, keys)]))
            loose = [
                (checkpoint, rank, size)
                for checkpoint, sizes in shards.items()
                if commits.get(checkpoint) is None
                for rank, size in sizes.items()
            ]
            manifests = list(threads.map(self._manifest, loose))
        copies = [copy_of(m, REMOTE) for m in manifests if m is not None]
        chains = {m.attempt: m.chain for m in manifests if m is not None}
        for checkpoint, commit in commits.items():
            if commit is not None:
                sizes = shards[checkpoint]
                copies += [c for c in committed_copies(commit) if sizes.get(c.rank) == c.size]
                chains[checkpoint.attempt] = commit.chain
        return Sight(
            bases=tuple(base for base in bases if base is not None),
            copies=tuple(copies),
            chains=chains,
            commits=frozenset(c for c, commit in commits.items() if commit is not None),
            intents=frozenset(self._intents(keys)),
            remote=True,
        )

    def _is_base(self, key: str) -> bool:
        return key.startswith(self._layout.attempts) and key.endswith(BASE_SUFFIX)

    def _marked(self, checkpoint: CheckpointId, keys: Iterable[str]) -> bool:
        return self._layout.commit(checkpoint) in keys

    def _shards(self, keys: dict[str, int]) -> dict[CheckpointId, dict[int, int]]:
        """Checkpoint -> rank -> bytes, of shards that have both objects."""
        found: dict[CheckpointId, dict[int, int]] = {}
        for key, size in keys.items():
            shard = self._layout.parse_shard_key(key)
            if shard is None or shard[2] == "json":
                continue
            checkpoint, rank, _ = shard
            if self._layout.manifest(checkpoint, rank) in keys:
                found.setdefault(checkpoint, {})[rank] = size
        return found

    def _intents(self, keys: Iterable[str]) -> Iterable[CheckpointId]:
        for key in keys:
            if key.startswith(self._layout.deletions):
                try:
                    yield CheckpointId.parse(key.removeprefix(self._layout.deletions))
                except ValueError:
                    continue

    def _base(self, key: str) -> AttemptRecord | None:
        return self._read(AttemptRecord, key)

    def _commit(self, checkpoint: CheckpointId) -> tuple[CheckpointId, CommitRecord | None]:
        return checkpoint, self._read(CommitRecord, self._layout.commit(checkpoint))

    def _manifest(self, shard: tuple[CheckpointId, int, int]) -> Manifest | None:
        checkpoint, rank, size = shard
        key = self._layout.manifest(checkpoint, rank)
        data = self._bucket.get(key)
        try:
            manifest = read_manifest(data, key) if data is not None else None
        except (CorruptData, VersionMismatch):
            return None
        if manifest is None or not manifest.sealed or manifest.size != size:
            return None
        right = (manifest.run, manifest.checkpoint, manifest.rank) == (self._run, checkpoint, rank)
        return manifest if right else None

    def _read(self, kind: type[T], key: str) -> T | None:
        data = self._bucket.get(key)
        try:
            return codec.loads(kind, data) if data is not None else None
        except ProtocolError:
            return None
