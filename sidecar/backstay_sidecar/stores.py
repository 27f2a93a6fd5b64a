"""The tiers of one sidecar, made from its settings. Used by the agent; opens nothing by itself."""

from __future__ import annotations

from collections.abc import Callable

from backstay_protocol import codec
from backstay_protocol.authorities import authorities
from backstay_protocol.clock import Clock
from backstay_protocol.files import write_atomically
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.messages import RestoreView
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE
from backstay_sidecar import errors
from backstay_sidecar.errors import ApiError
from backstay_sidecar.replication.gate import Gated
from backstay_sidecar.settings import S3Credentials, Settings
from backstay_sidecar.tiers.base import Tier
from backstay_sidecar.tiers.disk import DiskStore, HeldTier
from backstay_sidecar.tiers.memory import MemoryTier
from backstay_sidecar.tiers.remote import RemoteTier
from backstay_sidecar.tiers.remote_store import RemoteStore
from backstay_sidecar.transfer.upload import UploadSettings


class Stores:
    """Where this sidecar's shards lie."""

    def __init__(self, settings: Settings, clock: Clock, attempt: Callable[[], int]) -> None:
        """`attempt`: the one that is followed now, 0: none; uploads need its claim."""
        topology, replica = settings.topology, settings.replica
        local = topology.tiers.local
        self.layout = MemoryLayout(settings.volume)
        self.memory = MemoryTier(self.layout, topology.run, replica)
        self.disk = DiskLayout(local.root, topology.run, replica) if local else None
        self.local: DiskStore | None = None
        self.held: HeldTier | None = None
        if self.disk is not None:
            self.local = DiskStore(self.disk.shards, LOCAL, replica, topology.run)
            self.held = HeldTier(self.disk, replica, topology.run)
        self.remote_store = _remote_store(settings)
        self._remote = _remote_tier(settings, self.remote_store, clock)
        self.remote = self._gate(attempt)

    def abort_stale_uploads(self) -> int:
        """Throw away old unfinished uploads of this run; how many. Blocks. Raises StoreError."""
        return self._remote.abort_stale_uploads() if self._remote is not None else 0

    def keep_restores(self, restores: tuple[RestoreView, ...]) -> None:
        """The leader's last restores, for after the fact, where no remote tier keeps them. Blocks.
        Raises OSError.
        """
        if self.disk is not None:
            write_atomically(self.disk.restores_file, codec.dumps(restores), sync=False)

    def _gate(self, attempt: Callable[[], int]) -> Gated | None:
        tier, store = self._remote, self.remote_store
        if tier is None or store is None:
            return None
        return Gated(
            tier,
            attempt=attempt,
            probe=lambda: store.probe(tier.layout.root),
            recorded=lambda number: store.get(tier.layout.base(number)) is not None,
        )

    @property
    def own_areas(self) -> tuple[DiskStore, ...]:
        """Where this sidecar writes; empty without a local tier."""
        if self.local is None or self.held is None:
            return ()
        return (self.local, self.held.own)

    def shelves(self, tier: str = "") -> list[Tier]:
        """The tiers whose bytes this sidecar serves, nearest first; with `tier` that one only.

        Raises ApiError for a tier that is not served.
        """
        found: dict[str, Tier | None] = {
            MEMORY: self.memory,
            LOCAL: self.local,
            NEIGHBOR: self.held,
        }
        if tier == REMOTE:
            raise ApiError(
                400, errors.INVALID_REQUEST, "the remote tier is not served here", "ask the store"
            )
        if tier and tier not in found:
            raise ApiError(
                400, errors.INVALID_REQUEST, f"there is no tier {tier!r}", f"one of {list(found)}"
            )
        return [it for name, it in found.items() if it is not None and tier in ("", name)]


def _remote_store(settings: Settings) -> RemoteStore | None:
    tier = settings.topology.tiers.remote
    if tier is None:
        return None
    credentials = settings.credentials or S3Credentials(access_key="", secret_key="")
    return RemoteStore(
        endpoint=tier.endpoint,
        bucket=tier.bucket,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        session_token=credentials.session_token,
        region=tier.region,
        authorities=authorities(settings.s3_ca_file),
    )


def _remote_tier(settings: Settings, store: RemoteStore | None, clock: Clock) -> RemoteTier | None:
    tier = settings.topology.tiers.remote
    if tier is None or store is None:
        return None
    layout = RemoteLayout(tier.prefix, settings.topology.run)
    uploads = UploadSettings(concurrency=tier.concurrency)
    return RemoteTier(store, layout, settings=uploads, clock=clock)
