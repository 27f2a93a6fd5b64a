"""Shards on this node's disk: the local tier (`shards/`) and what is held for others (`replicas/`).

A shard becomes visible by the rename of its manifest, after its data was written past the page
cache, synced and renamed. Whatever a crash leaves behind is never visible and is cleaned at the
next start. The held area also shows, read-only, what siblings' folders on the same disk hold.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, glob
from threading import Event

from backstay_protocol.copies import copy_of
from backstay_protocol.errors import CorruptData, VersionMismatch
from backstay_protocol.faults import fault
from backstay_protocol.files import make_folder, read_small, sync_folder, write_atomically
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MANIFEST_SUFFIX, SHARD_SUFFIX, DiskLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import ShardCopy
from backstay_protocol.names import LOCAL, NEIGHBOR
from backstay_sidecar.digest import fingerprint
from backstay_sidecar.tiers.base import FileReader, ShardReader, TierFull, Unfit
from backstay_sidecar.tiers.onepass import one_pass
from backstay_sidecar.transfer.odirect import ALIGNMENT, DirectFile

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEFTOVER = re.compile(r"\.(part|tmp)-\d+(-\d+)?$")
_MANIFEST_NAME = re.compile(rf"(\d+){re.escape(MANIFEST_SUFFIX)}")
_FAULTS = {
    LOCAL: ("local.mid_data", "local.before_rename", "local.after_data", "local.after_manifest"),
    NEIGHBOR: ("neighbor.mid_pull", "neighbor.before_publish", "", ""),
}


@dataclass(frozen=True)
class Shelved:
    """One visible shard, without its digests."""

    copy: ShardCopy
    chain: tuple[tuple[int, int], ...]
    reason: str
    created: float


class DiskStore:
    """One area of one replica's folder. Methods block; safe for several threads."""

    def __init__(self, area: str, name: str, holder: int, run: str) -> None:
        """`area`: a folder; `name`: tier it is served as; `holder`: replica that serves it."""
        self.area = area
        self.name = name
        self._holder = holder
        self._run = run
        self.prepared = False
        """Cleared of leftovers. Nothing is written before that."""
        self.publishing = threading.Lock()
        """Data and manifest of one name must come from one writer."""
        self._preparing = threading.Lock()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[tuple[int, ...], Shelved]] = {}
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Make the folder and clear away what a crash left, once. Raises OSError."""
        with self._preparing:
            if self.prepared:
                return
            make_folder(self.area)
            for entry in _folders(self.area):
                self._clean(entry)
            self.prepared = True

    # --- write --------------------------------------------------------------------------------

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        """Copy a shard here, verifying or sealing it on the way. See WritableTier.put."""
        there = self.find(shard.manifest.checkpoint, shard.manifest.rank)
        if there is not None:
            return there
        with self.begin(shard.manifest) as writer:
            result = one_pass(shard, writer, cancel)
            if result.sink_error is not None:
                raise result.sink_error
            sealed = shard.manifest.seal(result.digests, fingerprint(result.digests))
            return writer.publish(sealed)

    def begin(self, manifest: Manifest) -> DiskWriter:
        """Reserve room for one shard. Raises TierFull or OSError."""
        if manifest.chunk_size % ALIGNMENT:
            raise Unfit(
                f"rank {manifest.rank} of {manifest.checkpoint}: chunk size {manifest.chunk_size} "
                f"is no multiple of {ALIGNMENT}, which a disk can't take"
            )
        self.prepare()
        path = DiskLayout.shard(self.area, manifest.checkpoint, manifest.rank)
        part = f"{path}.part-{os.getpid()}-{next(self._numbers)}"
        with self.full_is_told(manifest):
            self._make_folder(os.path.dirname(path))
            try:
                file = DirectFile(part, manifest.size)
            except BaseException:
                _unlink(part)
                raise
        return DiskWriter(self, manifest, file, path)

    def _make_folder(self, folder: str) -> None:
        if not os.path.isdir(folder):
            make_folder(folder)
            sync_folder(self.area)

    @contextmanager
    def full_is_told(self, manifest: Manifest) -> Iterator[None]:
        """Turn the disk's "no space left" into TierFull with numbers."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            free = "unknown"
            with contextlib.suppress(OSError):
                free = str(shutil.disk_usage(self.area).free)
            raise TierFull(
                f"{self.area}: no room for rank {manifest.rank} of {manifest.checkpoint}: it needs "
                f"{manifest.size} bytes, {free} are free; free some, or keep fewer checkpoints"
            ) from error

    # --- read ---------------------------------------------------------------------------------

    @contextmanager
    def open(self, checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        """Raises FileNotFoundError if the shard is not there whole."""
        manifest = self.find(checkpoint, rank)
        if manifest is None:
            raise FileNotFoundError(f"rank {rank} of {checkpoint} is not in {self.area}")
        path = DiskLayout.shard(self.area, checkpoint, rank)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _DiskReader(manifest, descriptor, path)
        finally:
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def find(self, checkpoint: CheckpointId, rank: int) -> Manifest | None:
        """The sealed manifest of a shard that is here whole, else None. Raises OSError."""
        path = DiskLayout.manifest(self.area, checkpoint, rank)
        try:
            manifest = read_manifest(read_small(path), path)
            size = os.stat(DiskLayout.shard(self.area, checkpoint, rank)).st_size
        except (FileNotFoundError, CorruptData, VersionMismatch):
            return None
        return manifest if self._whole(manifest, checkpoint, rank, size) else None

    def _whole(self, manifest: Manifest, checkpoint: CheckpointId, rank: int, size: int) -> bool:
        named = (manifest.run, manifest.checkpoint, manifest.rank)
        return manifest.sealed and named == (self._run, checkpoint, rank) and manifest.size == size

    def inventory(self) -> Iterator[ShardCopy]:
        """Every visible shard. Raises OSError."""
        return (shelved.copy for shelved in self.scan())

    def scan(self) -> list[Shelved]:
        """The same with what manifests say of lineage and reason. Raises OSError."""
        found: dict[str, tuple[tuple[int, ...], Shelved]] = {}
        for folder, checkpoint in _folders(self.area):
            for name in _names(folder):
                match = _MANIFEST_NAME.fullmatch(name)
                if match:
                    self._look(f"{folder}/{name}", checkpoint, int(match[1]), found)
        with self._lock:
            self._seen = found
        return [shelved for _, shelved in found.values()]

    def _look(
        self,
        path: str,
        checkpoint: CheckpointId,
        rank: int,
        found: dict[str, tuple[tuple[int, ...], Shelved]],
    ) -> None:
        """Manifests of large shards are long: each is parsed once for as long as its files stay."""
        try:
            signature = _signature(path, DiskLayout.shard(self.area, checkpoint, rank))
        except FileNotFoundError:
            return
        known = self._seen.get(path)
        if known is not None and known[0] == signature:
            found[path] = known
            return
        manifest = self.find(checkpoint, rank)
        if manifest is None:
            return
        found[path] = (
            signature,
            Shelved(
                copy=copy_of(manifest, self.name, self._holder),
                chain=manifest.chain,
                reason=manifest.reason,
                created=manifest.created,
            ),
        )

    # --- delete -------------------------------------------------------------------------------

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """Manifest first, then the bytes. No error if it is not there."""
        path = DiskLayout.shard(self.area, checkpoint, rank)
        folder = os.path.dirname(path)
        if _unlink(DiskLayout.manifest(self.area, checkpoint, rank)):
            sync_folder(folder)
        _unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)

    def _clean(self, entry: tuple[str, CheckpointId]) -> None:
        folder, checkpoint = entry
        names = _names(folder)
        for name in names:
            stem = name.removesuffix(SHARD_SUFFIX).removesuffix(MANIFEST_SUFFIX)
            if _LEFTOVER.search(name):
                _unlink(f"{folder}/{name}")
            elif stem.isdigit() and not self._keep(checkpoint, int(stem)):
                self.delete(checkpoint, int(stem))
        with contextlib.suppress(OSError):
            os.rmdir(folder)

    def _keep(self, checkpoint: CheckpointId, rank: int) -> bool:
        """Whole ones, and what another version of Backstay wrote and can read."""
        if self.find(checkpoint, rank) is not None:
            return True
        path = DiskLayout.manifest(self.area, checkpoint, rank)
        try:
            read_manifest(read_small(path), path)
        except VersionMismatch:
            return True
        except (FileNotFoundError, CorruptData):
            return False
        return False


class DiskWriter:
    """One shard on its way to the disk. Use it in a `with`: what was not published is removed."""

    def __init__(self, store: DiskStore, manifest: Manifest, file: DirectFile, path: str) -> None:
        """Made by DiskStore.begin."""
        self._store = store
        self._manifest = manifest
        self._file = file
        self._path = path
        self._lock = threading.Lock()
        self._num_writing = 0
        self._num_written = 0
        self._mid, self._before, self._after_data, self._after = _FAULTS[store.name]

    def __enter__(self) -> DiskWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # A write that hangs in a sick disk still uses the descriptor: closing it would let that
        # thread write into whatever file gets its number next. It is left open for good.
        if not self._num_writing:
            self._file.abort()
        with contextlib.suppress(OSError):
            _unlink(self._file.path)

    def write_chunk(self, index: int, data: memoryview) -> None:
        """Put one chunk at its place. Any order, several threads. Raises TierFull or OSError."""
        start, stop = self._manifest.chunk(index)
        assert len(data) == stop - start
        with self._lock:
            self._num_writing += 1
        try:
            with self._store.full_is_told(self._manifest):
                self._file.write_at(start, data)
        finally:
            with self._lock:
                self._num_writing -= 1
        with self._lock:
            self._num_written += 1
            middle = self._num_written == max(1, self._manifest.num_chunks // 2)
        if middle:
            fault(self._mid)

    def publish(self, sealed: Manifest) -> Manifest:
        """All chunks are written: make the shard visible. Raises TierFull or OSError.

        Returns the manifest that stands: where another copy was published meanwhile, that one's.
        """
        assert sealed.sealed
        assert self._num_written >= sealed.num_chunks
        with self._store.full_is_told(sealed):
            self._file.finish()
            fault(self._before)
            with self._store.publishing:
                there = self._store.find(sealed.checkpoint, sealed.rank)
                return there if there is not None else self._rename(sealed)

    def _rename(self, sealed: Manifest) -> Manifest:
        os.rename(self._file.path, self._path)
        sync_folder(os.path.dirname(self._path))
        fault(self._after_data)
        path = DiskLayout.manifest(self._store.area, sealed.checkpoint, sealed.rank)
        write_atomically(path, sealed.to_json())
        fault(self._after)
        return sealed


class HeldTier:
    """What this sidecar holds for others: its own `replicas/`, and siblings' folders on the disk.

    Siblings' folders are those of replicas that ran on this node: their data is still good when
    their pods have moved away. They are read, never written or cleaned.
    """

    name = NEIGHBOR

    def __init__(self, layout: DiskLayout, holder: int, run: str) -> None:
        """`holder`: this sidecar's replica."""
        self.own = DiskStore(layout.replicas, NEIGHBOR, holder, run)
        self._layout = layout
        self._holder = holder
        self._run = run
        self._siblings: dict[str, DiskStore] = {}

    def siblings(self) -> list[DiskStore]:
        """Areas of other replicas' folders on this disk, as they are now."""
        pattern = f"{escape(self._layout.run_folder)}/replica-*"
        own = os.path.realpath(self._layout.folder)
        areas = [
            area
            for folder in sorted(glob(pattern))
            if os.path.realpath(folder) != own
            for area in (f"{folder}/shards", f"{folder}/replicas")
            if os.path.isdir(area)
        ]
        self._siblings = {
            area: self._siblings.get(area) or DiskStore(area, NEIGHBOR, self._holder, self._run)
            for area in areas
        }
        return list(self._siblings.values())

    @contextmanager
    def open(self, checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        """Raises FileNotFoundError if no folder has the shard whole."""
        for store in (self.own, *self.siblings()):
            if store.find(checkpoint, rank) is not None:
                with store.open(checkpoint, rank) as reader:
                    yield reader
                return
        raise FileNotFoundError(f"rank {rank} of {checkpoint} is not held here")

    def inventory(self) -> Iterator[ShardCopy]:
        """What this sidecar itself was given: it alone counts for safety against a lost node."""
        return self.own.inventory()

    def scan_all(self) -> list[Shelved]:
        """The same and siblings' folders: all that a restore may read. One entry per shard."""
        found: dict[tuple[CheckpointId, int, str], Shelved] = {}
        for store in (self.own, *self.siblings()):
            for shelved in store.scan():
                copy = shelved.copy
                found.setdefault((copy.checkpoint, copy.rank, copy.fingerprint), shelved)
        return list(found.values())

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """Of the own area only."""
        self.own.delete(checkpoint, rank)


class _DiskReader(FileReader):
    """Reads leave no pages behind: the kubelet takes page cache for used memory."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`."""
        super().read_into(offset, buffer)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)


def _folders(area: str) -> list[tuple[str, CheckpointId]]:
    found = []
    for name in _names(area):
        with contextlib.suppress(ValueError):
            found.append((f"{area}/{name}", CheckpointId.parse(name)))
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _signature(*paths: str) -> tuple[int, ...]:
    signature: list[int] = []
    for path in paths:
        stat = os.stat(path)
        signature += (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return tuple(signature)


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
