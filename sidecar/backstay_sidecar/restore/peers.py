"""HTTP to the other sidecars of the job. One client per sidecar; made by main, closed by it.

It knows where each replica is, carries the job's token, and turns every failure into the protocol's
errors: Unreachable (no whole answer; proves nothing) or Refused (understood, and said no).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import httpx

from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError, Refused, Unreachable
from backstay_protocol.messages import (
    ErrorReply,
    JoinReply,
    JoinRequest,
    ProgressReply,
    ProgressRequest,
    PromiseReply,
    PromiseRequest,
    ReplicaOffer,
    ReplicaReply,
    StoreReply,
    StoreRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.names import (
    HEADER_PROTOCOL,
    PROTOCOL_VERSION,
    URL_JOIN,
    URL_PROGRESS,
    URL_PROMISE,
    URL_REPLICAS,
    URL_STORE,
    URL_VERDICT,
)
from backstay_protocol.topology import Topology

T = TypeVar("T")
LEADER = 0
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
"""How much longer than a long poll's own bound an answer may take."""
MAX_CONNECTIONS = 256


class HttpPeers:
    """Implements ports.Peers and ports.LeaderDoor."""

    def __init__(self, topology: Topology, token: str) -> None:
        """`token`: the job's bearer token; empty: none is sent."""
        self._addresses = {peer.replica: peer.address for peer in topology.peers}
        self._headers = {HEADER_PROTOCOL: PROTOCOL_VERSION}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.AsyncClient(
            headers=self._headers,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64),
            trust_env=False,
        )

    async def close(self) -> None:
        """Drop every connection."""
        await self._client.aclose()

    @property
    def headers(self) -> Mapping[str, str]:
        """What a reader must send with a request of its own."""
        return self._headers

    def url(self, replica: int) -> str:
        """`http://host:port`."""
        return f"http://{self._addresses[replica]}"

    def moved(self, replica: int, address: str) -> None:
        """From now on the replica is at this `host:port`.

        The leader is always asked for by the topology's name: when its pod is replaced, the one
        that would tell of it is itself.
        """
        if address and replica != LEADER:
            self._addresses[replica] = address

    async def join(self, request: JoinRequest) -> JoinReply:
        """Long poll at the leader."""
        return await self.call(LEADER, URL_JOIN, request, JoinReply, request.wait_seconds)

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        """Long poll at the leader."""
        return await self.call(LEADER, URL_VERDICT, request, VerdictReply, request.wait_seconds)

    async def progress(self, request: ProgressRequest) -> ProgressReply:
        """Long poll at the leader."""
        return await self.call(LEADER, URL_PROGRESS, request, ProgressReply, request.wait_seconds)

    async def promise(
        self, replica: int, request: PromiseRequest, timeout_seconds: float
    ) -> PromiseReply:
        """Leader to member; may take as long as sealing its slots does."""
        return await self.call(replica, URL_PROMISE, request, PromiseReply, timeout_seconds)

    async def store(
        self, replica: int, request: StoreRequest, timeout_seconds: float
    ) -> StoreReply:
        """Leader to member."""
        return await self.call(replica, URL_STORE, request, StoreReply, timeout_seconds)

    async def offer(self, replica: int, request: ReplicaOffer) -> ReplicaReply:
        """Ask a neighbour to keep a copy."""
        return await self.call(replica, URL_REPLICAS, request, ReplicaReply, 0.0)

    async def call(
        self,
        replica: int,
        path: str,
        message: Any,
        reply: type[T],
        wait_seconds: float,
        *,
        method: str = "POST",
    ) -> T:
        """Send a message and read the reply. Raises Unreachable or Refused."""
        url = f"{self.url(replica)}{path}"
        timeout = httpx.Timeout(wait_seconds + ANSWER_SECONDS, connect=CONNECT_SECONDS)
        try:
            answer = await self._client.request(
                method,
                url,
                content=codec.dumps(message),
                headers={"Content-Type": "application/json"},
                timeout=timeout,
            )
        except httpx.HTTPError as error:
            raise Unreachable(
                f"replica {replica} at {url}: {type(error).__name__}: {error or 'no answer'}"
            ) from error
        if not answer.is_success:
            raise _refusal(replica, url, answer)
        try:
            return codec.loads(reply, answer.content)
        except ProtocolError as error:
            raise Unreachable(f"replica {replica} at {url} answered nonsense: {error}") from error


def _refusal(replica: int, url: str, answer: httpx.Response) -> Refused | Unreachable:
    try:
        body = codec.loads(ErrorReply, answer.content).error
    except ProtocolError:
        return Unreachable(f"replica {replica} at {url}: HTTP {answer.status_code}")
    return Refused(answer.status_code, body.code, body.message, body.hint)
