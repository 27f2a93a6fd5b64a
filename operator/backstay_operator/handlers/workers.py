"""Workers that take keys from the queue, and the resync that puts every active job on it.

A pass that fails is logged and tried again; nothing that one job does stops the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from backstay_operator.cluster import TRAINING_JOB, Cluster, Tree
from backstay_operator.errors import ClusterError, Conflict
from backstay_operator.handlers.queue import Key, WorkQueue
from backstay_operator.handlers.reconcile import Reconciler
from backstay_operator.handlers.watchdog import Watchdog
from backstay_operator.logs import about_job
from backstay_operator.metrics import Metrics
from backstay_operator.persisted import parse_record
from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError

WORKERS = 16
RESYNC_SECONDS = 30.0
TURN_SECONDS = 60.0
"""Workers that have not turned for so long are stuck."""

log = logging.getLogger("backstay.work")


class Workers:
    """All tasks of the operator but kopf's."""

    def __init__(
        self,
        queue: WorkQueue,
        reconciler: Reconciler,
        cluster: Cluster,
        namespaces: Sequence[str],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`namespaces`: empty for all."""
        self._queue = queue
        self._reconciler = reconciler
        self._cluster = cluster
        self._namespaces = tuple(namespaces) or ("",)
        self._metrics = metrics
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self.watchdog = Watchdog()

    def start(self) -> None:
        """In the running loop."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        self._tasks.append(asyncio.create_task(self._resync()))

    async def stop(self) -> None:
        """End them; a pass under way is cut off, which any pass must bear."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def trouble(self) -> str:
        """Why the operator is not healthy; empty if it is. Safe from another thread."""
        now = self._clock.monotonic()
        if self._tasks and now - self._queue.turned_at > TURN_SECONDS:
            return f"no worker has turned for {now - self._queue.turned_at:.0f} s"
        stale = self.watchdog.stale(now)
        return f"no watch brought the last change of {stale}" if stale else ""

    # --- tasks ------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            self._metrics.depth.set(len(self._queue))
            try:
                with self._metrics.passes.time(), about_job(*key):
                    await self._pass(key)
            finally:
                self._queue.done(key)

    async def _pass(self, key: Key) -> None:
        try:
            again = await self._reconciler.look(key)
        except Conflict:
            self._queue.add(key, random.uniform(0.2, 0.6))  # somebody was faster: look again
        except ClusterError as error:
            self._failed(key, str(error))
        except BackstayError as error:
            self._failed(key, f"can't be carried out: {error}")
        except Exception:  # one job's surprise must not end the work on the others
            log.exception("a pass failed")
            self._failed(key, "by our own fault, see the log above")
        else:
            self._queue.succeeded(key)
            if again is not None:
                self._queue.add(key, again)

    def _failed(self, key: Key, words: str) -> None:
        self._metrics.errors.inc()
        wait = self._queue.retry(key)
        log.warning("%s; again in %.1f s", words, wait)

    async def _resync(self) -> None:
        while True:
            try:
                await self._list_jobs()
            except ClusterError as error:
                log.warning("jobs could not be listed: %s", error)
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.0))

    async def _list_jobs(self) -> None:
        trees: list[Tree] = []
        for namespace in self._namespaces:
            trees += await self._cluster.find(TRAINING_JOB, namespace)
        now = self._clock.monotonic()
        for tree in trees:
            metadata = tree["metadata"]
            key = (metadata["namespace"], metadata["name"])
            self.watchdog.listed(key, metadata.get("resourceVersion", ""), now)
            record = parse_record((tree.get("status") or {}).get("generations") or {})
            if record is None or not record.outcome:
                self._queue.add(key, random.uniform(0.0, 2.0))
        self._metrics.note_jobs(_true_conditions(tree) for tree in trees)


def _true_conditions(tree: Tree) -> list[str]:
    listed = (tree.get("status") or {}).get("conditions") or []
    return [str(one.get("type")) for one in listed if one.get("status") == "True"]
