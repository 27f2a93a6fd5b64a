"""Checks at the door, as plain ASGI middleware: bearer token, protocol version, size of the body.

Put around the applications by `app.py`, so that no route can be reached without them. They answer
refusals in the one error shape and never look into a request's meaning.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from backstay_protocol import codec
from backstay_protocol.names import HEADER_PROTOCOL, PROTOCOL_VERSION, works_with
from backstay_sidecar import errors
from backstay_sidecar.errors import ApiError

MAX_BODY_BYTES = 16 << 20  # the largest message is an inventory of some thousand shards
BODY_SECONDS = 60.0  # a client that dribbles its body is cut off

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_PROTOCOL_HEADER = HEADER_PROTOCOL.lower().encode()


async def send_error(
    send: Send, error: ApiError, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """One whole error response in the one shape."""
    body = codec.dumps(error.reply)
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (_PROTOCOL_HEADER, PROTOCOL_VERSION.encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class RequireToken:
    """401 without one of the job's bearer tokens. Compared in constant time."""

    def __init__(self, app: Application, tokens: tuple[str, ...]) -> None:
        """`tokens`: those in force; several while the token is being changed."""
        self._app = app
        self._tokens = tuple(token.encode() for token in tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401."""
        if scope["type"] == "http" and not self._allowed(scope):
            error = ApiError(
                401,
                errors.UNAUTHORIZED,
                "this port needs the job's bearer token",
                "send the header: Authorization: Bearer $BACKSTAY_TOKEN",
            )
            await send_error(send, error, ((b"www-authenticate", b'Bearer realm="backstay"'),))
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), token) for token in self._tokens]
        return scheme.lower() == b"bearer" and any(matches)


class CheckProtocol:
    """Stamps every response with the protocol's version and refuses versions it can't work with.

    A request without the header is a person's; it is let through.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; 426 for another version, 400 for what is no version."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, _PROTOCOL_HEADER).decode("latin-1")
        if given and (error := _version_error(given)):
            await send_error(send, error)
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    *message.get("headers", ()),
                    (_PROTOCOL_HEADER, PROTOCOL_VERSION.encode()),
                ]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, stamped)


class LimitBody:
    """413 for a body over MAX_BODY_BYTES, 408 for one that takes longer than BODY_SECONDS.

    The body is read here, whole, before the application starts: routes only see small messages.
    """

    def __init__(
        self, app: Application, limit: int = MAX_BODY_BYTES, seconds: float = BODY_SECONDS
    ) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body within its bounds, then pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await send_error(send, error, ((b"connection", b"close"),))
            return
        if body is None:
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large(int(length))
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._limit:
                        raise self._too_large(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise ApiError(
                408,
                errors.REQUEST_TIMEOUT,
                f"the body did not arrive within {self._seconds:g} s",
                "send it at once",
            ) from error

    def _too_large(self, got: int) -> ApiError:
        return ApiError(
            413,
            errors.BODY_TOO_LARGE,
            f"the body has {got} bytes or more; at most {self._limit} are taken",
            "shards are never posted: offer them, and the receiver pulls",
        )


class NeverRaise:
    """Logs what an application raises, and answers 500 if it had not answered yet."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # the caller gets the one shape, the log the traceback
            log.exception("%s %s failed", scope.get("method"), scope.get("path"))
            if not started:
                await send_error(send, errors.as_api_error(error))


def _version_error(given: str) -> ApiError | None:
    major, dot, minor = given.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        return ApiError(
            400,
            errors.INVALID_REQUEST,
            f"{HEADER_PROTOCOL}: {given[:40]!r} is not a version",
            f"this sidecar speaks {PROTOCOL_VERSION}",
        )
    if not works_with(given):
        return ApiError(
            426,
            errors.VERSION_MISMATCH,
            f"the request speaks protocol {given}, this sidecar {PROTOCOL_VERSION}",
            "use Backstay of the same minor version, or of the one next to it",
        )
    return None


def _header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key.lower() == name:
            return bytes(value)
    return b""
