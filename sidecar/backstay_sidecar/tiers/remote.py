"""The remote tier: shards in an S3 bucket, data first, manifest after; nothing is overwritten.

Replication puts shards here, restore and people read them, the leader lists and deletes. A shard
is visible from the moment its manifest exists. That all shards of a checkpoint are there is said
by the commit record, which is the leader's; whether an attempt may upload at all (claim and base
come first) is asked by the caller.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.copies import committed_copies, copy_of
from backstay_protocol.errors import (
    CorruptData,
    DigestMismatch,
    ProtocolError,
    VersionMismatch,
)
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import ShardCopy
from backstay_protocol.names import REMOTE
from backstay_protocol.pull import Endpoint, RangeReader
from backstay_protocol.records import CommitRecord
from backstay_sidecar.digest import digest, fingerprint
from backstay_sidecar.tiers.base import Cancelled, ShardReader, Unfit
from backstay_sidecar.tiers.remote_store import SIGNED_SECONDS, RemoteStore
from backstay_sidecar.transfer.retry import Budget, with_retries
from backstay_sidecar.transfer.s3_errors import UploadGone
from backstay_sidecar.transfer.upload import UploadSettings, upload

__all__ = ["DeletionIntended", "NameTaken", "RemoteStore", "RemoteTier"]

STALE_UPLOAD_SECONDS = 86_400.0
UPLOAD_TRIES = 3  # where two processes go on with the same upload
READERS = 8  # manifests that are read at once


class NameTaken(Unfit):
    """Other bytes, or a manifest that can't be read, lie under the shard's name in the store.

    Not CorruptData: it says nothing against the source. Nothing is overwritten; a person must look.
    """


class DeletionIntended(Cancelled):
    """The checkpoint is under a deletion intent: nothing of it is uploaded again."""


class RemoteTier:
    """Shards of one run in one bucket. Methods block; safe for several threads."""

    name = REMOTE

    def __init__(
        self,
        store: RemoteStore,
        layout: RemoteLayout,
        *,
        settings: UploadSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`settings`: how uploads travel; the reading side uses its retry policy too."""
        self._store = store
        self.layout = layout
        self._settings = settings or UploadSettings()
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, ShardCopy] = {}

    # --- write ---------------------------------------------------------------------------------

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        """Upload a shard, verifying or sealing it on the way. See WritableTier.put.

        Raises StoreError, CorruptData (the source is bad), Cancelled, DeletionIntended, NameTaken.
        """
        checkpoint = shard.manifest.checkpoint
        budget = Budget(self._settings.retry, self._clock)
        there = with_retries(budget, cancel, lambda: self._same_there(shard.manifest))
        if there is not None:
            return there
        with_retries(budget, cancel, lambda: self._refuse_if_doomed(checkpoint))
        sealed = self._upload(shard, cancel)
        fault("remote.before_manifest")
        budget = Budget(self._settings.retry, self._clock)
        with_retries(budget, cancel, lambda: self._refuse_if_doomed(checkpoint))
        return with_retries(budget, cancel, lambda: self._publish(sealed))

    def _upload(self, shard: ShardReader, cancel: Event) -> Manifest:
        for _ in range(UPLOAD_TRIES - 1):
            with contextlib.suppress(UploadGone):  # another process completed or aborted it
                return self._upload_once(shard, cancel)
        return self._upload_once(shard, cancel)

    def _upload_once(self, shard: ShardReader, cancel: Event) -> Manifest:
        manifest = shard.manifest
        verifier = _Verifier(shard)
        upload(
            self._store,
            self.layout.shard(manifest.checkpoint, manifest.rank),
            manifest.size,
            manifest.chunk_size,
            verifier.fill,
            settings=self._settings,
            cancel=cancel,
            clock=self._clock,
        )
        return verifier.sealed()

    def _publish(self, sealed: Manifest) -> Manifest:
        key = self.layout.manifest(sealed.checkpoint, sealed.rank)
        if self._store.create(key, sealed.to_json()):
            return sealed
        return self._same_there(sealed) or sealed

    def _same_there(self, ours: Manifest) -> Manifest | None:
        """The manifest that is there already, if it is of the same bytes as far as is known."""
        try:
            there = self.find(ours.checkpoint, ours.rank)
        except (CorruptData, VersionMismatch) as error:
            raise NameTaken(f"{error}; it is left alone") from error
        if there is not None and ours.sealed and ours.fingerprint != there.fingerprint:
            raise NameTaken(
                f"rank {ours.rank} of {ours.checkpoint} is in {self._store.place} already, with "
                f"other bytes (fingerprint {there.fingerprint}, here {ours.fingerprint}); it is "
                "left alone"
            )
        return there

    def _refuse_if_doomed(self, checkpoint: CheckpointId) -> None:
        if self._store.get(self.layout.deletion(checkpoint)) is not None:
            raise DeletionIntended(
                f"{self._store.place}: checkpoint {checkpoint} is under a deletion intent, "
                "so nothing of it is uploaded"
            )

    # --- read ----------------------------------------------------------------------------------

    def find(self, checkpoint: CheckpointId, rank: int) -> Manifest | None:
        """The sealed manifest of a shard, or None. Raises StoreError, CorruptData."""
        key = self.layout.manifest(checkpoint, rank)
        data = self._store.get(key)
        if data is None:
            return None
        manifest = read_manifest(data, f"{key} in {self._store.place}")
        if not manifest.sealed or (manifest.checkpoint, manifest.rank) != (checkpoint, rank):
            raise CorruptData(f"{key} in {self._store.place}: not this shard's sealed manifest")
        return manifest

    @contextmanager
    def open(self, checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        """Read by ranged GETs. Raises FileNotFoundError if the shard is not there whole."""
        manifest = self.find(checkpoint, rank)
        if manifest is None:
            raise FileNotFoundError(f"rank {rank} of {checkpoint} is not in {self._store.place}")
        reader = _RemoteReader(manifest, self, self._clock)
        try:
            yield reader
        finally:
            reader.close()

    def endpoint(self, checkpoint: CheckpointId, rank: int, seconds: int) -> tuple[Endpoint, int]:
        """A presigned endpoint of the shard's bytes, and for how long it is good."""
        return self._store.read_endpoint(self.layout.shard(checkpoint, rank), seconds)

    # --- list ----------------------------------------------------------------------------------

    def inventory(self) -> Iterator[ShardCopy]:
        """Every whole shard of the run: one listing; a commit record speaks for its manifests.

        Raises StoreError. What was read of a manifest is remembered for as long as it is listed.
        """
        listed = _Listed(self.layout, self._store.list(self.layout.checkpoints))
        with ThreadPoolExecutor(READERS, "backstay-remote") as readers:
            found = dict(self._recall(listed))
            committed = readers.map(self._committed, listed.committed_and_unknown(found))
            found.update({key: copy for copies in committed for key, copy in copies.items()})
            rest = [key for key in listed.manifests if key not in found]
            for key, copy in zip(rest, readers.map(self._read, rest), strict=True):
                if copy is not None:
                    found[key] = copy
        with self._lock:
            self._known = found
        for key, size in listed.manifests.items():
            copy = found.get(key)
            if copy is not None and copy.size == size:
                yield copy

    def _recall(self, listed: _Listed) -> dict[str, ShardCopy]:
        with self._lock:
            return {key: copy for key, copy in self._known.items() if key in listed.manifests}

    def _committed(self, checkpoint: CheckpointId) -> dict[str, ShardCopy]:
        data = self._store.get(self.layout.commit(checkpoint))
        try:
            record = codec.loads(CommitRecord, data or b"")
        except ProtocolError:
            return {}
        return {self.layout.manifest(checkpoint, c.rank): c for c in committed_copies(record)}

    def _read(self, key: str) -> ShardCopy | None:
        parsed = self.layout.parse_shard_key(key)
        assert parsed is not None
        try:
            manifest = self.find(parsed[0], parsed[1])
        except (CorruptData, VersionMismatch):
            return None
        return copy_of(manifest, REMOTE) if manifest is not None else None

    # --- delete --------------------------------------------------------------------------------

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """Manifest first, then the bytes, then what was begun. No error if it is not there."""
        key = self.layout.shard(checkpoint, rank)
        self._store.delete(self.layout.manifest(checkpoint, rank))
        self._store.delete(key)
        for upload_id in self._store.find_uploads(key):
            self._store.abort_upload(key, upload_id)

    def abort_stale_uploads(self, older_than_seconds: float = STALE_UPLOAD_SECONDS) -> int:
        """Throw away uploads of this run that nobody went on with; how many. Raises StoreError.

        They cost room and are in no listing. Call it from one sidecar, now and then. (MinIO lists
        uploads by whole keys only, so this finds none there; MinIO cleans them up by itself.)
        """
        before = self._clock.time() - older_than_seconds
        unfinished = self._store.unfinished_uploads(self.layout.checkpoints)
        stale = [found for found in unfinished if found.initiated < before]
        for found in stale:
            self._store.abort_upload(found.key, found.upload_id)
        return len(stale)


class _Listed:
    """A listing, sorted: manifests whose shard's bytes are there too."""

    def __init__(self, layout: RemoteLayout, keys: list[tuple[str, int]]) -> None:
        self.manifests: dict[str, int] = {}
        """Key of the manifest -> size of the shard's object."""
        self._checkpoints: dict[CheckpointId, list[str]] = {}
        present = {key for key, _ in keys}
        for key, size in keys:
            parsed = layout.parse_shard_key(key)
            if parsed is None or parsed[2] == "json":
                continue
            manifest = layout.manifest(parsed[0], parsed[1])
            if manifest in present:
                self.manifests[manifest] = size
                self._checkpoints.setdefault(parsed[0], []).append(manifest)
        self._committed = [c for c in self._checkpoints if layout.commit(c) in present]

    def committed_and_unknown(self, known: dict[str, ShardCopy]) -> list[CheckpointId]:
        """Committed checkpoints of which some shard is not known yet."""
        return [c for c in self._committed if any(k not in known for k in self._checkpoints[c])]


class _Verifier:
    """Reads a shard's parts and digests each chunk on the way."""

    def __init__(self, shard: ShardReader) -> None:
        self._shard = shard
        self._lock = threading.Lock()
        self._digests: dict[int, str] = {}

    def fill(self, offset: int, view: memoryview) -> None:
        """Read whole chunks. Raises DigestMismatch naming the chunk, or what the reader raises."""
        with self._lock:  # readers are for one thread at a time
            self._shard.read_into(offset, view)
        manifest = self._shard.manifest
        for start in range(0, len(view), manifest.chunk_size):
            index = (offset + start) // manifest.chunk_size
            got = digest(view[start : start + manifest.chunk_size])
            if manifest.digests is not None and manifest.digests[index] != got:
                raise DigestMismatch(
                    f"chunk {index} of rank {manifest.rank} of {manifest.checkpoint}: its digest "
                    f"is {got}, its manifest says {manifest.digests[index]}; the source is bad and "
                    "is not uploaded"
                )
            self._digests[index] = got

    def sealed(self) -> Manifest:
        """The manifest with the digests of what was read."""
        manifest = self._shard.manifest
        digests = tuple(self._digests[index] for index in range(manifest.num_chunks))
        return manifest.seal(digests, fingerprint(digests))


class _RemoteReader:
    """Reads over one kept connection; signs a new URL before the old one runs out."""

    def __init__(self, manifest: Manifest, tier: RemoteTier, clock: Clock) -> None:
        self.manifest = manifest
        self._tier = tier
        self._clock = clock
        self._reader: RangeReader | None = None
        self._renew_at = 0.0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`."""
        now = self._clock.monotonic()
        if self._reader is None or now >= self._renew_at:
            self.close()
            where, seconds = self._tier.endpoint(
                self.manifest.checkpoint, self.manifest.rank, SIGNED_SECONDS
            )
            self._reader = RangeReader(where)
            self._renew_at = now + seconds / 2
        self._reader.read_into(offset, buffer)

    def fileno(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Close the connection."""
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(OSError):
                reader.close()
