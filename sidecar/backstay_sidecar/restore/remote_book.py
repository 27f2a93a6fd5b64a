"""The remote tier as a book of attempts: claims, bases, commits, intents, pins, owners.

Used by the leader's rounds and duties; the shards themselves are the remote tier's affair. Methods
block and raise Unreachable (may pass) or StoreRefused (a person must mend it). Nothing is ever
overwritten: claim, base and commit are created if absent, and what was read of them is remembered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from backstay_protocol import codec
from backstay_protocol.clock import Clock
from backstay_protocol.copies import committed_copies, copy_of
from backstay_protocol.errors import BackstayError, CorruptData, ProtocolError, VersionMismatch
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MANIFEST_SUFFIX, RemoteLayout
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import TIER_OWNED, Inventory, RestoreView, ShardCopy
from backstay_protocol.names import REMOTE
from backstay_protocol.origins import OtherRun
from backstay_protocol.records import AttemptRecord, Claim, CommitRecord, Intent
from backstay_protocol.round_events import RemoteView
from backstay_sidecar.restore.ports import RemoteStore
from backstay_sidecar.restore.remote_listing import Listing, sort_keys
from backstay_sidecar.tiers.base import store_code

R = TypeVar("R")
CALLERS = 4
READERS = 8
"""Small objects that are read at once."""
REMEMBERED = 100_000
TAKE_OVER_SECONDS = 30.0
"""An owner whose newest sign of life is older is gone."""
BEAT_SECONDS = 10.0
_DIGITS = 12


class RunOwnedElsewhere(BackstayError):
    """Another job that is alive keeps its checkpoints under the same run."""


class ClaimTaken(BackstayError):
    """Another world stands in the remote tier under this attempt's number."""


def trouble_code(error: BaseException) -> str:
    """Why the remote tier can't be worked with, as one of the TIER_ codes."""
    return TIER_OWNED if isinstance(error, RunOwnedElsewhere) else store_code(error)


class RemoteBook:
    """One per leader."""

    def __init__(
        self, store: RemoteStore, layout: RemoteLayout, run: str, owner: str, clock: Clock
    ) -> None:
        """`owner`: `<cluster>/<job uid>`."""
        self._store = store
        self._layout = layout
        self._run = run
        self._owner = owner
        self._clock = clock
        self._bases: dict[int, AttemptRecord] = {}
        self._commits: dict[CheckpointId, CommitRecord] = {}
        self._manifests: dict[str, Manifest] = {}
        self._others: dict[str, RemoteBook] = {}
        """Books of other runs, only to be read."""
        self._probed = False
        self._named = False
        self._readers = ThreadPoolExecutor(READERS, "backstay-book-read")
        self._callers = ThreadPoolExecutor(CALLERS, "backstay-book")

    def close(self) -> None:
        """End the threads."""
        for other in tuple(self._others.values()):
            other.close()
        self._callers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def call(self, work: Callable[[RemoteBook], R]) -> R:
        """Run a method of this book in a thread of its own: a hung store holds up nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._callers, work, self)

    # --- claims and bases ----------------------------------------------------------------------

    def claim(self, claim: Claim) -> Claim | None:
        """Take the number: None if it is ours now, else the claim that stands there.

        Raises RunOwnedElsewhere if another living job owns the run, StoreRefused for a store that
        would give the same number to two.
        """
        if not self._probed:
            self._store.probe(self._layout.root)
            self._probed = True
        self.own()
        key = self._layout.claim(claim.attempt)
        if self._store.create(key, codec.dumps(claim)):
            return None
        data = self._store.get(key)
        try:
            return codec.loads(Claim, data or b"")
        except ProtocolError:
            return Claim(attempt=claim.attempt, round="", owner="", created=0.0)

    def write_base(self, record: AttemptRecord) -> AttemptRecord:
        """Create the base record; returns the one that stands (an earlier try of ours, mostly)."""
        key = self._layout.base(record.attempt)
        if self._store.create(key, codec.dumps(record)):
            self._bases[record.attempt] = record
        found = self.bases((record.attempt,))
        return found[0] if found else record

    def claims(self) -> tuple[int, ...]:
        """Numbers of all claims, ascending."""
        return tuple(sort_keys(self._layout, self._store.list(self._layout.attempts)).claims)

    def bases(self, attempts: Iterable[int]) -> tuple[AttemptRecord, ...]:
        """Their base records, as far as they can be read."""
        wanted = list(attempts)
        missing = [attempt for attempt in wanted if attempt not in self._bases]
        self._each(self._read_base, missing)
        return tuple(self._bases[attempt] for attempt in wanted if attempt in self._bases)

    def _read_base(self, attempt: int) -> None:
        data = self._store.get(self._layout.base(attempt))
        if data is not None:
            record = _read_or_none(AttemptRecord, data)
            if record is not None:
                self._bases[attempt] = record

    # --- looking -------------------------------------------------------------------------------

    def listing(self) -> Listing:
        """Every key of the run."""
        return sort_keys(self._layout, self._store.list(self._layout.root))

    def view(self, runs: Iterable[str] = ()) -> RemoteView:
        """What a round must know: one listing, and what the small objects in it say.

        `runs`: other runs that are looked at as well; nothing is written there.
        """
        listing = self.listing()
        return RemoteView(
            claims=tuple(listing.claims),
            bases=self.bases(listing.bases),
            inventory=self.inventory(listing),
            commits=frozenset(listing.commits),
            intents=frozenset(listing.intents),
            others=tuple(self._other(run) for run in runs),
        )

    def _other(self, run: str) -> OtherRun:
        if run not in self._others:
            layout = self._layout.sibling(run)
            self._others[run] = RemoteBook(self._store, layout, run, self._owner, self._clock)
        book = self._others[run]
        listing = book.listing()
        inventory = book.inventory(listing)
        return OtherRun(
            run=run,
            bases=book.bases(listing.bases),
            copies=inventory.copies,
            chains=inventory.chains,
            commits=frozenset(listing.commits),
            intents=frozenset(listing.intents),
        )

    def inventory(self, listing: Listing) -> Inventory:
        """Every whole shard. A commit record speaks for all of its checkpoint's manifests."""
        commits = self.commits(listing.commits)
        copies: list[ShardCopy] = []
        chains: dict[int, tuple[tuple[int, int], ...]] = {}
        loose: list[tuple[CheckpointId, int, int]] = []
        for checkpoint, sizes in listing.shards.items():
            commit = commits.get(checkpoint)
            if commit is None:
                loose += [(checkpoint, rank, size) for rank, size in sizes.items()]
                continue
            copies += [c for c in committed_copies(commit) if sizes.get(c.rank) == c.size]
            chains[checkpoint.attempt] = commit.chain
        for manifest in self._manifests_of(loose):
            copies.append(copy_of(manifest, REMOTE))
            chains[manifest.attempt] = manifest.chain
        return Inventory(copies=tuple(copies), chains=chains)

    def commits(self, checkpoints: Iterable[CheckpointId]) -> dict[CheckpointId, CommitRecord]:
        """Their commit records, as far as they can be read."""
        wanted = list(checkpoints)
        self._each(self._read_commit, [c for c in wanted if c not in self._commits])
        return {c: self._commits[c] for c in wanted if c in self._commits}

    def _read_commit(self, checkpoint: CheckpointId) -> None:
        data = self._store.get(self._layout.commit(checkpoint))
        record = _read_or_none(CommitRecord, data) if data is not None else None
        if record is not None:
            self._commits[checkpoint] = record

    def _manifests_of(self, shards: list[tuple[CheckpointId, int, int]]) -> list[Manifest]:
        keys = {self._layout.manifest(c, rank): size for c, rank, size in shards}
        self._each(self._read_manifest, [key for key in keys if key not in self._manifests])
        found = ((self._manifests.get(key), size) for key, size in keys.items())
        whole = [m for m, size in found if m is not None and m.size == size]
        if len(self._manifests) > REMEMBERED:
            self._manifests.clear()
        return whole

    def _read_manifest(self, key: str) -> None:
        data = self._store.get(key)
        if data is None:
            return
        try:
            manifest = read_manifest(data, key)
        except (CorruptData, VersionMismatch):
            return
        named = (manifest.checkpoint, manifest.rank, "json")
        if (
            manifest.sealed
            and manifest.run == self._run
            and self._layout.parse_shard_key(key) == named
        ):
            self._manifests[key] = manifest

    def explain(self, view: RestoreView) -> None:
        """Keep why a restore chose as it did, for people; it is no claim and no base."""
        self._store.create(self._layout.explanation(view.attempt), codec.dumps(view))

    # --- marks ---------------------------------------------------------------------------------

    def commit(self, record: CommitRecord) -> bool:
        """Mark a checkpoint durable; False if it was already."""
        created = self._store.create(self._layout.commit(record.checkpoint), codec.dumps(record))
        if created:
            self._commits[record.checkpoint] = record
        return created

    def pin(self, checkpoint: CheckpointId) -> None:
        """Keep it until it is unpinned."""
        self._store.create(self._layout.pin(checkpoint), b"{}")

    def unpin(self, checkpoint: CheckpointId) -> None:
        """No longer keep it."""
        self._store.delete(self._layout.pin(checkpoint))

    def intend(self, intent: Intent) -> None:
        """Say that the checkpoint is going to be deleted."""
        self._store.create(self._layout.deletion(intent.checkpoint), codec.dumps(intent))

    def intent(self, checkpoint: CheckpointId) -> Intent | None:
        """What the intent says; None if it is gone or can't be read."""
        data = self._store.get(self._layout.deletion(checkpoint))
        return _read_or_none(Intent, data) if data is not None else None

    def forget_intent(self, checkpoint: CheckpointId) -> None:
        """Remove an intent that is a day old and carried out."""
        self._store.delete(self._layout.deletion(checkpoint))

    def remove_commit(self, checkpoint: CheckpointId) -> None:
        """First step of a delete: it is no longer durable."""
        self._commits.pop(checkpoint, None)
        self._store.delete(self._layout.commit(checkpoint))

    def remove_shards(self, checkpoint: CheckpointId) -> None:
        """Last step of a delete: every object of the checkpoint, manifests before their bytes."""
        folder = self._layout.folder(checkpoint)
        keys = [key for key, _ in self._store.list(folder)]
        for key in sorted(keys, key=lambda key: (not key.endswith(MANIFEST_SUFFIX), key)):
            self._manifests.pop(key, None)
            self._store.delete(key)
            fault("delete.mid_shards")

    # --- whose run it is -----------------------------------------------------------------------

    def own(self) -> None:
        """Show that this job lives and owns the run. Raises RunOwnedElsewhere.

        run.json is created once and names the run. Signs of life are objects of their own
        (`owners/<seconds>-<owner>`): a new one is created, then the older ones of it are deleted.
        """
        now = self._clock.time()
        folder = f"{self._layout.root}owners/"
        mine, stale = [], []
        for key, _ in self._store.list(folder):
            seconds, _, owner = key.removeprefix(folder).partition("-")
            if owner == _plain(self._owner):
                mine.append(key)
            elif seconds.isdigit() and now - int(seconds) < TAKE_OVER_SECONDS:
                raise RunOwnedElsewhere(
                    f"run {self._run} is in use by job {owner}, whose last sign of life is "
                    f"{max(0.0, now - int(seconds)):.0f} s old; give this job another runName, "
                    "or stop the other one"
                )
            else:
                stale.append(key)
        if not self._named:
            about = {"run": self._run, "owner": self._owner, "created": now}
            self._store.create(self._layout.run_record, json.dumps(about).encode())
            self._named = True
        beat = f"{folder}{int(now):0{_DIGITS}d}-{_plain(self._owner)}"
        self._store.create(beat, b"{}")
        for key in (*mine, *stale):
            if key != beat:
                self._store.delete(key)

    def disown(self) -> None:
        """The job ends in order: the next owner need not wait."""
        folder = f"{self._layout.root}owners/"
        for key, _ in self._store.list(folder):
            if key.endswith(f"-{_plain(self._owner)}"):
                self._store.delete(key)

    def _each(self, work: Callable[[R], None], items: list[R]) -> None:
        for _ in self._readers.map(work, items):
            pass


def _read_or_none(kind: type[R], data: bytes) -> R | None:
    try:
        return codec.loads(kind, data)
    except ProtocolError:
        return None


def _plain(owner: str) -> str:
    """An owner's name as part of a key."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in owner)
