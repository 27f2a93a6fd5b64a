"""Keeps copies for a neighbour: it offers, this side pulls and publishes.

The route of `POST /v1/replicas` calls `offer`, again and again until the answer is `complete`.
A pull that broke goes on with its missing chunks at the next offer. Nothing is taken under an
attempt smaller than the one promised here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

from backstay_protocol import codec
from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError, Cancelled, Unreachable
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import ReplicaOffer, ReplicaReply
from backstay_protocol.names import NEIGHBOR, URL_SHARD
from backstay_protocol.pull import Endpoint, pull
from backstay_sidecar.digest import digest
from backstay_sidecar.replication.replicator import Emit, Meter
from backstay_sidecar.replication.wanted import ShardKey
from backstay_sidecar.tiers.base import Unfit
from backstay_sidecar.tiers.disk import DiskStore, DiskWriter

NUM_PULLS = 2
PULL_THREADS = 2
FORGET_SECONDS = 120.0  # half-pulled shards that nobody offers any more are dropped

COMPLETE = "complete"
PULLING = "pulling"
REFUSED = "refused"

log = logging.getLogger(__name__)


@dataclass
class _Job:
    """One shard on its way here."""

    offer: ReplicaOffer
    manifest: Manifest
    writer: DiskWriter
    asked: float
    cancel: Event = field(default_factory=Event)
    done: set[int] = field(default_factory=set)
    running: bool = False


class Keeper:
    """One per sidecar with a disk. Methods run in the event loop; pulls in a few threads."""

    def __init__(
        self,
        store: DiskStore,
        *,
        run: str,
        replica: int,
        headers: Mapping[str, str],
        promised: Callable[[], int],
        changed: Callable[[], None],
        emit: Emit,
        meter: Meter,
        clock: Clock,
    ) -> None:
        """`headers`: sent with each pull (the job's token); `promised`: greatest number so far."""
        self._store = store
        self._run = run
        self._replica = replica
        self._headers = dict(headers)
        self._promised = promised
        self._changed = changed
        self._emit = emit
        self._meter = meter
        self._clock = clock
        self._jobs: dict[ShardKey, _Job] = {}
        self._failures: dict[ShardKey, str] = {}
        self._threads = ThreadPoolExecutor(NUM_PULLS, "pull")

    def close(self) -> None:
        """Cancel every pull."""
        for job in self._jobs.values():
            job.cancel.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def promise_grew(self) -> None:
        """Pulls under older attempts are cut off."""
        for job in self._jobs.values():
            if job.offer.attempt < self._promised():
                job.cancel.set()

    async def offer(self, offer: ReplicaOffer) -> ReplicaReply:
        """Answer an offer; start or go on with the pull where there is one to make."""
        if why := self._objection(offer):
            return ReplicaReply(status=REFUSED, why=why)
        manifest = read_manifest(codec.dumps(offer.manifest), f"offer of replica {offer.owner}")
        if why := _misfit(offer, manifest, self._run):
            return ReplicaReply(status=REFUSED, why=why)
        self._drop_forgotten()
        key = (offer.checkpoint, offer.rank)
        there = await asyncio.to_thread(self._store.find, *key)
        if there is not None:
            return _compared(there, manifest)
        if failure := self._failures.pop(key, ""):  # told once; the next offer goes on
            return ReplicaReply(status=REFUSED, why=failure)
        return await self._pull(key, offer, manifest)

    async def _pull(self, key: ShardKey, offer: ReplicaOffer, manifest: Manifest) -> ReplicaReply:
        job = self._jobs.get(key)
        if job is not None and job.manifest.fingerprint != manifest.fingerprint:
            job.cancel.set()
            return ReplicaReply(status=PULLING, why="an older offer of it is being dropped")
        if job is None:
            try:
                writer = await asyncio.to_thread(self._store.begin, manifest)
            except (OSError, BackstayError) as error:
                return ReplicaReply(status=REFUSED, why=_named(error))
            if key in self._jobs:  # a second offer came while the room was made
                writer.__exit__()
                return ReplicaReply(status=PULLING)
            job = self._jobs[key] = _Job(offer, manifest, writer, self._clock.monotonic())
        job.asked = self._clock.monotonic()
        if not job.running:
            job.running, job.offer = True, offer
            task = asyncio.get_running_loop().run_in_executor(self._threads, self._work, job)
            task.add_done_callback(lambda future: self._ended(key, job, future))
        return ReplicaReply(status=PULLING)

    def _work(self, job: _Job) -> None:
        """In a thread: pull what is missing, publish."""
        offer, manifest = job.offer, job.manifest
        path = URL_SHARD.format(checkpoint=offer.checkpoint, rank=offer.rank)
        endpoint = Endpoint(f"http://{offer.address}{path}", self._headers)

        def deliver(index: int, data: memoryview) -> None:
            job.writer.write_chunk(index, data)
            job.done.add(index)

        missing = [i for i in range(manifest.num_chunks) if i not in job.done]
        pull(
            endpoint,
            manifest,
            digest,
            deliver,
            chunks=missing,
            threads=PULL_THREADS,
            cancel=job.cancel,
        )
        if offer.attempt < self._promised():
            raise Cancelled(f"attempt {offer.attempt} is over")
        job.writer.publish(manifest)

    def _ended(self, key: ShardKey, job: _Job, future: asyncio.Future[None]) -> None:
        job.running = False
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, Cancelled):
            self._drop(key)
            return
        if error is None:
            self._drop(key)
            self._kept(job)
            return
        if not isinstance(error, (OSError, BackstayError)):
            log.error("pulling rank %s of %s", key[1], key[0], exc_info=error)
        self._meter.failed(NEIGHBOR)
        self._failures[key] = _named(error)
        self._emit(
            "pull_failed",
            checkpoint=key[0],
            rank=key[1],
            owner=job.offer.owner,
            message=str(error),
        )
        if not isinstance(error, Unreachable):
            self._drop(key)

    def _kept(self, job: _Job) -> None:
        seconds = self._clock.monotonic() - job.asked
        self._meter.moved(NEIGHBOR, job.manifest.size, seconds)
        self._emit(
            "replica_kept",
            checkpoint=job.offer.checkpoint,
            rank=job.offer.rank,
            owner=job.offer.owner,
            bytes=job.manifest.size,
        )
        self._changed()

    def _drop(self, key: ShardKey) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            job.writer.__exit__()

    def _drop_forgotten(self) -> None:
        now = self._clock.monotonic()
        for key, job in list(self._jobs.items()):
            if not job.running and now - job.asked > FORGET_SECONDS:
                self._drop(key)

    def _objection(self, offer: ReplicaOffer) -> str:
        if offer.attempt < self._promised():
            return f"the offer is of attempt {offer.attempt}; {self._promised()} is promised here"
        if offer.owner == self._replica:
            return "a sidecar keeps no copies for itself"
        return ""


def _named(error: BaseException) -> str:
    """The error's kind goes first: the offerer tells by it what to do."""
    return f"{type(error).__name__}: {error}"


def _misfit(offer: ReplicaOffer, manifest: Manifest, run: str) -> str:
    if not manifest.sealed:
        return "the manifest is not sealed"
    if manifest.run != run:
        return f"the shard is of run {manifest.run}, here is {run}"
    if (manifest.checkpoint, manifest.rank) != (offer.checkpoint, offer.rank):
        return f"the manifest is of rank {manifest.rank} of {manifest.checkpoint}"
    return ""


def _compared(there: Manifest, offered: Manifest) -> ReplicaReply:
    if there.fingerprint == offered.fingerprint:
        return ReplicaReply(status=COMPLETE)
    return ReplicaReply(
        status=REFUSED,
        why=f"{Unfit.__name__}: another copy of it is here already, with fingerprint "
        f"{there.fingerprint}",
    )
