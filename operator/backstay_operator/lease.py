"""The Lease by which one of several operators works, in a thread of its own.

Taken before kopf starts; when it can't be renewed in time the process ends at once, for another one
may work already. A Lease does not fence: names, uids and resourceVersions do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from backstay_operator.cluster import LEASE, Cluster, Tree
from backstay_operator.errors import AlreadyThere, ClusterError, Conflict
from backstay_operator.times import micro_text_of
from backstay_protocol.clock import Clock

DURATION_SECONDS = 15.0
DEADLINE_SECONDS = 10.0
RETRY_SECONDS = 2.0
EXIT_LOST = 3

log = logging.getLogger("backstay.lease")


@dataclass(frozen=True, kw_only=True)
class LeaseName:
    """Which Lease, and who wants it."""

    namespace: str
    name: str
    holder: str


class Lease:
    """The algorithm: another's lease is taken when it was not renewed for its whole duration.

    That is judged by our own clock from when we saw it change last, never by the times in it.
    """

    def __init__(self, cluster: Cluster, name: LeaseName, clock: Clock) -> None:
        """Not held."""
        self._cluster = cluster
        self._name = name
        self._clock = clock
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = clock.monotonic()

    async def try_take(self) -> bool:
        """Take or renew it; False: another one has it. Raises ClusterError."""
        found = await self._cluster.get(LEASE, self._name.namespace, self._name.name)
        if found is None:
            return await self._create()
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        seen = (holder, str(spec.get("renewTime")))
        now = self._clock.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        duration = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        if holder not in ("", self._name.holder) and now - self._seen_at < duration:
            return False
        return await self._replace(found, holder)

    async def release(self) -> None:
        """Give it up, so that another operator needs not wait."""
        found = await self._cluster.get(LEASE, self._name.namespace, self._name.name)
        if found is not None and found["spec"].get("holderIdentity") == self._name.holder:
            found["spec"]["holderIdentity"] = ""
            await self._cluster.replace(LEASE, found)

    async def _create(self) -> bool:
        now = micro_text_of(self._clock.time())
        body: Tree = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"namespace": self._name.namespace, "name": self._name.name},
            "spec": {**self._spec(now), "acquireTime": now, "leaseTransitions": 0},
        }
        try:
            await self._cluster.create(LEASE, body)
        except AlreadyThere:
            return False
        return True

    async def _replace(self, found: Tree, holder: str) -> bool:
        now, spec = micro_text_of(self._clock.time()), found.get("spec") or {}
        spec |= self._spec(now)
        if holder != self._name.holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        try:
            await self._cluster.replace(LEASE, {**found, "spec": spec})
        except Conflict:
            return False
        return True

    def _spec(self, now: str) -> Tree:
        return {
            "holderIdentity": self._name.holder,
            "leaseDurationSeconds": int(DURATION_SECONDS),
            "renewTime": now,
        }


class LeaseKeeper:
    """Holds the Lease from a thread: a busy event loop must not lose it."""

    def __init__(
        self,
        make_cluster: Callable[[], Cluster],
        name: LeaseName,
        clock: Clock,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        """`make_cluster`: a client of the thread's own. `lost`: instead of ending the process."""
        self._make_cluster = make_cluster
        self._name = name
        self._clock = clock
        self._lost = lost or _end_process
        self._held = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def take(self) -> None:
        """Block until it is held; from then on it is kept."""
        self._thread.start()
        log.info("waiting for Lease %s/%s", self._name.namespace, self._name.name)
        self._held.wait()

    def give_up(self, timeout_seconds: float = 5.0) -> None:
        """Stop renewing and release it."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        lease = Lease(self._make_cluster(), self._name, self._clock)
        renewed_at = self._clock.monotonic()
        why = "another operator has it"
        while not self._stop.is_set():
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    taken = await lease.try_take()
            except (ClusterError, TimeoutError) as error:
                taken, why = False, str(error) or "no answer"
                log.warning("the Lease could not be renewed: %s", why)
            now = self._clock.monotonic()
            if taken:
                renewed_at = now
                if not self._held.is_set():
                    log.info("this operator works now: it has the Lease")
                    self._held.set()
            elif self._held.is_set() and now - renewed_at >= DEADLINE_SECONDS:
                self._lost(f"the Lease was not renewed for {now - renewed_at:.0f} s: {why}")
                return
            await asyncio.to_thread(self._stop.wait, RETRY_SECONDS)
        if self._held.is_set():
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await lease.release()
            except (ClusterError, TimeoutError) as error:
                log.warning("the Lease could not be released: %s", error)


def _end_process(why: str) -> None:
    log.critical("%s; ending at once, for another operator may work", why)
    logging.shutdown()
    os._exit(EXIT_LOST)
