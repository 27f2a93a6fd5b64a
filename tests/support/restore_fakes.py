"""Hand-written fakes of what restore and leader need: clock, store, shelf, event bus."""

from __future__ import annotations

from typing import Any

from backstay_protocol.errors import Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import Inventory, ShardCopy
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    NeighborTier,
    Peer,
    PodIdentity,
    RemoteTier,
    RestoreOptions,
    Tiers,
    Topology,
)


class FakeClock:
    """Time passes only when a test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Events:
    """Keeps what was emitted."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, /, **fields: Any) -> None:
        self.all.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.all]


class FakeStore:
    """An object store in a dict, with conditional create. `away` makes every call fail."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away = ""
        self.calls: list[str] = []

    def _touch(self, call: str) -> None:
        self.calls.append(call)
        if self.away:
            raise Unreachable(self.away)

    def create(self, key: str, data: bytes) -> bool:
        self._touch(f"create {key}")
        if key in self.objects:
            return False
        self.objects[key] = bytes(data)
        return True

    def get(self, key: str) -> bytes | None:
        self._touch(f"get {key}")
        return self.objects.get(key)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        self._touch(f"list {prefix}")
        return [(k, len(v)) for k, v in sorted(self.objects.items()) if k.startswith(prefix)]

    def delete(self, key: str) -> None:
        self._touch(f"delete {key}")
        self.objects.pop(key, None)

    def probe(self, prefix: str = "") -> None:
        self._touch(f"probe {prefix}")

    def presign_get(self, key: str, seconds: int) -> str:
        return f"https://store/{key}?for={seconds}"


class FakeShelf:
    """What one sidecar holds, as a list of copies."""

    def __init__(self, *copies: ShardCopy, chains: dict[int, Any] | None = None) -> None:
        self.copies = list(copies)
        self.chains = chains or {}
        self.sealed = 0

    def seal(self) -> None:
        self.sealed += 1

    def inventory(self) -> Inventory:
        return Inventory(copies=tuple(self.copies), chains=dict(self.chains))


def copy(
    step: int,
    attempt: int,
    rank: int,
    tier: str,
    holder: int,
    *,
    world_size: int = 2,
    plan: str = "plan",
    size: int = 100,
    fingerprint: str = "",
) -> ShardCopy:
    """A sealed copy of a small shard."""
    return ShardCopy(
        checkpoint=CheckpointId(step, attempt),
        rank=rank,
        tier=tier,
        holder=holder,
        world_size=world_size,
        plan=plan,
        size=size,
        chunk_size=64,
        fingerprint=fingerprint or f"{step}-{attempt}-{rank}",
    )


def topology(
    replicas: int = 2,
    *,
    processes: int = 1,
    root: str = "/nowhere",
    remote: RemoteTier | None = None,
    memory: MemoryTier | None = None,
    neighbor: bool = True,
    local: LocalTier | None = None,
    addresses: dict[int, str] | None = None,
    **more: Any,
) -> Topology:
    """A small job with memory, local and neighbor tiers; `remote` on request."""
    where = addresses or {i: f"127.0.0.{i + 1}:7070" for i in range(replicas)}
    more.setdefault("restore", RestoreOptions(barrier_seconds=30, remote_wait_seconds=5))
    return Topology(
        namespace="default",
        job="job",
        run_name="run",
        uid="uid",
        replicas=replicas,
        processes_per_replica=processes,
        peers=tuple(Peer(replica=i, address=where[i]) for i in range(replicas)),
        tiers=Tiers(
            memory=memory or MemoryTier(),
            local=local or LocalTier(root=root),
            neighbor=NeighborTier() if neighbor else None,
            remote=remote,
        ),
        **more,
    )


def pod(replica: int, generation: int = 7, replicas: int = 2, **more: Any) -> PodIdentity:
    """A pod of a job whose pods all have one generation, unless `more` says otherwise."""
    more.setdefault("current", dict.fromkeys(range(replicas), generation))
    return PodIdentity(replica=replica, generation=generation, uid=f"pod-{replica}", **more)


def remote_tier(bucket: str = "bucket", endpoint: str = "http://127.0.0.1:1") -> RemoteTier:
    """A remote tier's settings."""
    return RemoteTier(endpoint=endpoint, bucket=bucket, prefix="p")
