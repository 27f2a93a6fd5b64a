"""Checkpoints as a job's running sidecars show them (REST, with the job's token)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backstay_cli.catalog.base import CorruptCopy, Deliver, ShardSource, sealed_manifest
from backstay_cli.client import SidecarClient
from backstay_cli.digest import digest
from backstay_protocol.errors import CorruptData, Refused, Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import (
    CheckpointList,
    CheckpointStatus,
    JobView,
    ReplicaView,
)
from backstay_protocol.names import (
    LOCAL,
    MEMORY,
    NEIGHBOR,
    URL_CHECKPOINTS,
    URL_JOB,
    URL_SHARD,
    URL_SHARD_MANIFEST,
)
from backstay_protocol.pull import Endpoint, get_bytes, pull

_TIMEOUT_SECONDS = 15.0
_STILL_FIRST = (LOCAL, NEIGHBOR, MEMORY)  # a slot may be overwritten while it is read


@dataclass(frozen=True)
class SidecarSource:
    """A copy that one sidecar serves."""

    replica: str
    tier: str
    manifest: Manifest
    endpoint: Endpoint

    @property
    def name(self) -> str:
        """For people."""
        held = "held for others" if self.tier == NEIGHBOR else self.tier
        return f"{held} of replica {self.replica}"

    def pull(self, deliver: Deliver, threads: int, cancel: threading.Event) -> None:
        """See ShardSource."""
        pull(self.endpoint, self.manifest, digest, deliver, threads=threads, cancel=cancel)


class SidecarCatalog:
    """One job, asked through one of its sidecars."""

    def __init__(
        self, address: str, token: str, reach: Callable[[ReplicaView], str] | None = None
    ) -> None:
        """`address`: `host[:port]` or a URL of any sidecar; the leader's knows all others. `reach`
        gives the URL by which another one is reached from here, or an empty text; without it, its
        own address is.
        """
        self._client = SidecarClient(address, token)
        self._base = self._client.base
        self._headers = self._client.headers
        self._reach = reach or (lambda view: f"http://{view.address}" if view.address else "")
        self._peers: dict[str, str] | None = None

    @property
    def where(self) -> str:
        """For people."""
        return f"the job at {self._base}"

    @property
    def committed_only(self) -> bool:
        """See Catalog."""
        return False

    def checkpoints(self) -> CheckpointList:
        """GET /v1/checkpoints."""
        return self._client.get(CheckpointList, URL_CHECKPOINTS)

    def job(self) -> JobView:
        """GET /v1/job; any sidecar passes it on to the leader. Raises Unreachable."""
        return self._client.get(JobView, URL_JOB)

    def sources(
        self, checkpoint: CheckpointStatus, rank: int
    ) -> Iterator[ShardSource | CorruptCopy]:
        """Each replica's tiers; the rank's own replica and its disk first."""
        for tier in _STILL_FIRST:
            for replica, base in self._in_order(checkpoint, rank):
                source = self._source(base, replica, checkpoint.checkpoint, rank, tier)
                if source is not None:
                    yield source

    def _in_order(self, checkpoint: CheckpointStatus, rank: int) -> list[tuple[str, str]]:
        peers = list(self._all_peers().items())
        own = rank * len(peers) // max(1, checkpoint.world_size)
        return peers[own:] + peers[:own]

    def _all_peers(self) -> dict[str, str]:
        """Replica -> URL of its sidecar; only the one that was named, if it does not lead."""
        if self._peers is None:
            self._peers = {"?": self._base}
            with contextlib.suppress(Refused):
                replicas = sorted(self.job().replicas, key=lambda replica: replica.replica)
                known = {str(r.replica): url for r in replicas if (url := self._reach(r))}
                self._peers = known or self._peers
        return self._peers

    def _source(
        self, base: str, replica: str, checkpoint: CheckpointId, rank: int, tier: str
    ) -> SidecarSource | CorruptCopy | None:
        query = f"?tier={tier}"
        path = URL_SHARD_MANIFEST.format(checkpoint=checkpoint, rank=rank)
        endpoint = Endpoint(f"{base}{path}{query}", self._headers)
        try:
            data = get_bytes(endpoint, timeout=_TIMEOUT_SECONDS)
        except (FileNotFoundError, Unreachable):
            return None
        try:
            manifest = sealed_manifest(data, endpoint.name, checkpoint, rank)
        except CorruptData as error:
            return CorruptCopy(endpoint.name, tier, error)
        shard = URL_SHARD.format(checkpoint=checkpoint, rank=rank)
        return SidecarSource(
            replica, tier, manifest, Endpoint(f"{base}{shard}{query}", self._headers)
        )
