"""What restore and leader need of the rest of the sidecar, as narrow as it can be.

The agent implements or hands over each of these; tests pass hand-written fakes. Nothing here is a
message of the wire: those are in backstay_protocol.messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from backstay_protocol.messages import (
    Inventory,
    JoinReply,
    JoinRequest,
    PromiseReply,
    PromiseRequest,
    StoreReply,
    StoreRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.records import AttemptRecord


class Emit(Protocol):
    """The sidecar's event bus: GET /v1/events and the log."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Tell everybody who listens. Must not block or raise."""
        ...


class Shelf(Protocol):
    """What this sidecar can serve by itself. The agent implements it; methods block."""

    def seal(self) -> None:
        """Seal each published slot that is not sealed yet; busy and bad ones are passed over."""
        ...

    def inventory(self) -> Inventory:
        """Every sealed copy in memory, local and held for others, with the chains they carry."""
        ...


class LeaderDoor(Protocol):
    """How a member talks to the leader: the leader itself on replica 0, HTTP elsewhere.

    Both are long polls; both raise Unreachable or Refused.
    """

    async def join(self, request: JoinRequest) -> JoinReply:
        """Tell which ranks of this replica have joined; wait for the decision."""
        ...

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        """Tell how the load went; wait for what follows."""
        ...


class MemberDoor(Protocol):
    """How the leader talks to its own member, without HTTP."""

    @property
    def record(self) -> AttemptRecord | None:
        """The newest record stored."""
        ...

    @property
    def attempt(self) -> int:
        """The attempt that its ranks train in; 0: none."""
        ...

    def round_of(self, attempt: int) -> str:
        """Name of the round that the attempt was promised to; empty: another one is promised."""
        ...

    def ran(self, round_name: str) -> bool:
        """Whether that round, the newest promised, got its go-ahead."""
        ...

    async def promise(self, request: PromiseRequest) -> PromiseReply:
        """Promise a number and report record and inventory."""
        ...

    async def store(self, request: StoreRequest) -> StoreReply:
        """Keep a record."""
        ...


class Peers(Protocol):
    """HTTP to the other sidecars of the job, with its token. `restore.peers.HttpPeers` is it."""

    async def promise(
        self, replica: int, request: PromiseRequest, timeout_seconds: float
    ) -> PromiseReply:
        """Raises Unreachable or Refused."""
        ...

    async def store(
        self, replica: int, request: StoreRequest, timeout_seconds: float
    ) -> StoreReply:
        """Raises Unreachable or Refused."""
        ...

    def url(self, replica: int) -> str:
        """`http://host:port` of one sidecar, by the newest address known."""
        ...

    def moved(self, replica: int, address: str) -> None:
        """From now on the replica is at this `host:port`."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What each request carries: the bearer token."""
        ...


class RemoteStore(Protocol):
    """The object store. `backstay_sidecar.tiers.remote.RemoteStore` is it; all methods block.

    Each raises Unreachable for what may pass, StoreRefused for what a person must mend.
    """

    def create(self, key: str, data: bytes) -> bool:
        """Create the object; False if the key exists (If-None-Match)."""
        ...

    def get(self, key: str) -> bytes | None:
        """The whole object, or None."""
        ...

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """Every (key, size) below the prefix."""
        ...

    def delete(self, key: str) -> None:
        """No error if it is not there."""
        ...

    def probe(self, prefix: str = "") -> None:
        """Prove that what a run needs works here; refuses a store without conditional create."""
        ...

    def presign_get(self, key: str, seconds: int) -> str:
        """A URL that reads the object without credentials, for so long. Raises Unreachable."""
        ...

    def address(self, key: str) -> str:
        """Where the object is, for who may read it by himself."""
        ...
