"""The leader's sidecar of a job, asked over HTTP with the job's own token.

Its address is the pod's; it comes and goes, so no answer is an answer. Nothing here decides.
"""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

import httpx

from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.messages import ErrorReply, FlushReply, JobView, Placement, Policy
from backstay_protocol.names import (
    HEADER_PROTOCOL,
    PORT_API,
    PROTOCOL_VERSION,
    URL_FLUSH,
    URL_JOB,
    URL_PLACEMENT,
    URL_POLICY,
)

log = logging.getLogger("backstay.leaders")

_TIMEOUT = httpx.Timeout(3.0, connect=1.5)
_Message = TypeVar("_Message", JobView, FlushReply)


class Leaders(Protocol):
    """What the operator asks of leaders. `host`: the pod's IP."""

    refused: set[str]
    """Hosts that answered last that the token is wrong."""

    async def job(self, host: str, token: str) -> JobView | None:
        """GET /v1/job; None: no answer."""
        ...

    async def flush(self, host: str, token: str) -> FlushReply | None:
        """POST /v1/flush; None: no answer."""
        ...

    async def set_policy(self, host: str, token: str, policy: Policy) -> bool:
        """PUT /v1/policy: other schedules and retention. False: not now."""
        ...

    async def set_placement(self, host: str, token: str, placement: Placement) -> bool:
        """PUT /v1/placement: where the pods run. False: not now."""
        ...


class HttpLeaders:
    """`Leaders`, for real."""

    def __init__(self) -> None:
        """Opens no connection yet."""
        self.refused: set[str] = set()
        self._of_another_version: set[str] = set()
        self._client = httpx.AsyncClient(
            timeout=_TIMEOUT, trust_env=False, headers={HEADER_PROTOCOL: PROTOCOL_VERSION}
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def job(self, host: str, token: str) -> JobView | None:
        """See Leaders."""
        return await self._ask("GET", URL_JOB, host, token, JobView)

    async def flush(self, host: str, token: str) -> FlushReply | None:
        """See Leaders."""
        return await self._ask("POST", URL_FLUSH, host, token, FlushReply)

    async def set_policy(self, host: str, token: str, policy: Policy) -> bool:
        """See Leaders."""
        return await self._put(URL_POLICY, host, token, policy)

    async def set_placement(self, host: str, token: str, placement: Placement) -> bool:
        """See Leaders."""
        return await self._put(URL_PLACEMENT, host, token, placement)

    async def _put(self, path: str, host: str, token: str, message: Policy | Placement) -> bool:
        try:
            answer = await self._client.put(
                _url(host, path),
                content=codec.dumps(message),
                headers={**_bearer(token), "Content-Type": "application/json"},
            )
        except httpx.HTTPError:
            return False
        return answer.is_success

    async def _ask(
        self, method: str, path: str, host: str, token: str, kind: type[_Message]
    ) -> _Message | None:
        try:
            answer = await self._client.request(method, _url(host, path), headers=_bearer(token))
        except httpx.HTTPError:
            self.refused.discard(host)  # who comes there next may go by the right one
            return None
        try:
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                self.refused.add(host)
                return None
            self.refused.discard(host)
            self._note_version(host, answer)
            answer.raise_for_status()
            return codec.loads(kind, answer.content)
        except (httpx.HTTPError, ProtocolError):
            return None

    def _note_version(self, host: str, answer: httpx.Response) -> None:
        """Say once for each leader why a job of another build has no status."""
        if answer.status_code != httpx.codes.UPGRADE_REQUIRED:
            self._of_another_version.discard(host)
        elif host not in self._of_another_version:
            self._of_another_version.add(host)
            log.warning(
                "the leader at %s is of a version that this operator can't ask: %s; bring sidecars "
                "and operator within one minor version (docs/compatibility.md)",
                host,
                _message(answer),
            )


def _message(answer: httpx.Response) -> str:
    try:
        return codec.loads(ErrorReply, answer.content).error.message
    except ProtocolError:
        return f"HTTP {answer.status_code}"


def _url(host: str, path: str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{PORT_API}{path}"


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
