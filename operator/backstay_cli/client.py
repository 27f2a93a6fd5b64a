"""One sidecar, asked over its REST API with the job's token.

Used by the catalog of running jobs and by every command that asks the leader something. Any
sidecar passes on what only the leader knows.
"""

from __future__ import annotations

import json
from typing import TypeVar

from backstay_cli.errors import UsageError
from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError, Refused, Unreachable
from backstay_protocol.messages import ErrorReply
from backstay_protocol.names import HEADER_PROTOCOL, PORT_API, PROTOCOL_VERSION
from backstay_protocol.pull import Endpoint, exchange

T = TypeVar("T")

_TIMEOUT_SECONDS = 15.0


class SidecarClient:
    """Asks one sidecar. All methods block; they raise Unreachable, Refused or UsageError."""

    def __init__(self, address: str, token: str) -> None:
        """`address`: `host[:port]` or a URL."""
        self._token = token
        base = address if "://" in address else f"http://{address}"
        if base.rpartition("]")[2].count(":") < (2 if "]" not in base else 1):
            base = f"{base}:{PORT_API}"
        self.base = base.rstrip("/")
        self.headers = {
            "Authorization": f"Bearer {token}",
            HEADER_PROTOCOL: PROTOCOL_VERSION,
        }

    def other(self, address: str) -> SidecarClient:
        """Another sidecar of the same job."""
        return SidecarClient(address, self._token)

    def get(self, kind: type[T], path: str, timeout: float = _TIMEOUT_SECONDS) -> T:
        """A message."""
        return codec.loads(kind, self.raw(path, timeout=timeout))

    def post(self, kind: type[T], path: str) -> T:
        """A message in answer to a request without a body."""
        return codec.loads(kind, self.raw(path, "POST"))

    def raw(self, path: str, method: str = "GET", timeout: float = _TIMEOUT_SECONDS) -> bytes:
        """The bytes of an answer with status 200."""
        endpoint = Endpoint(f"{self.base}{path}", self.headers)
        try:
            status, data = exchange(endpoint, method, timeout=timeout)
        except ValueError as error:
            raise UsageError(f"--address: {error}") from error
        if status == 200:
            return data
        raise _refusal(endpoint, status, data)


def _refusal(endpoint: Endpoint, status: int, data: bytes) -> Exception:
    if status == 401:
        return UsageError(
            f"{endpoint.name}: the token was refused", "set BACKSTAY_TOKEN to the job's token"
        )
    try:
        body = codec.from_plain(ErrorReply, json.loads(data)).error
    except (ValueError, ProtocolError):
        return Unreachable(f"{endpoint.name}: answered {status}, and not as a sidecar does")
    return Refused(status, body.code, f"{endpoint.name}: {body.message}", body.hint)
