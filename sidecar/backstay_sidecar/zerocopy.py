"""The uvicorn protocol class of every listener: zero-copy sends and limits on connections.

ASGI's *zero copy send* extension (asgi.readthedocs.io, extensions) by `loop.sendfile`: bytes of a
slot or file go from the page cache to the socket without passing through Python. Used by `main`
(the class) and `routes/shards.py` (the message). It must not know what is being sent.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from backstay_protocol import codec
from backstay_protocol.names import HEADER_PROTOCOL, PROTOCOL_VERSION
from backstay_sidecar import errors
from backstay_sidecar.errors import ApiError

MAX_CONNECTIONS = 4096  # per listener; 1,000 sidecars ask the leader with a few connections each
MAX_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 10.0  # from the first byte of a request to the end of its headers
SEND_PIECE_BYTES = 32 << 20
SEND_PIECE_SECONDS = 30.0  # a receiver slower than a megabyte per second is cut off, its lock freed

EXTENSION = "http.response.zerocopysend"

log = logging.getLogger(__name__)


class _TooLarge(Exception):
    """Raised inside a parser callback, to make the parser stop."""


class ZeroCopyProtocol(HttpToolsProtocol):
    """HTTP/1.1 by httptools, with our limits, our shape of error and the extension."""

    _refusal: ApiError | None = None
    _header_bytes = 0
    _header_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or answer 503 and close it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(
                ApiError(
                    503,
                    errors.TOO_MANY_CONNECTIONS,
                    f"{MAX_CONNECTIONS} connections are open here",
                    "close idle ones or try again later",
                )
            )
            return
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer with the connection."""
        self._unwatch_headers()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request starts: its headers have HEADER_SECONDS."""
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {}}
        self._header_bytes = 0
        self._watch_headers()

    def on_url(self, url: bytes) -> None:
        """Count and keep."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count and keep."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request with a cycle that knows the extension."""
        self._unwatch_headers()
        super().on_headers_complete()
        # uvicorn builds the cycle from a module global and offers no factory. Its task has been
        # created but has not run yet, so its class can still be chosen here.
        self.cycle.__class__ = ZeroCopyCycle

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gave up: answer in the one shape, and close."""
        self._refuse(
            self._refusal or ApiError(400, errors.INVALID_REQUEST, msg, "this port speaks HTTP/1.1")
        )

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = ApiError(
                431, errors.HEADERS_TOO_LARGE, f"more than {MAX_HEADER_BYTES} bytes of headers"
            )
            raise _TooLarge

    def _watch_headers(self) -> None:
        self._unwatch_headers()
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def _unwatch_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        message = f"the headers did not arrive within {HEADER_SECONDS:g} s"
        self._refuse(ApiError(408, errors.REQUEST_TIMEOUT, message))

    def _refuse(self, error: ApiError) -> None:
        self._unwatch_headers()
        if self.transport.is_closing():
            return
        body = codec.dumps(error.reply)
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            f"{HEADER_PROTOCOL}: {PROTOCOL_VERSION}\r\n".encode(),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()


class ZeroCopyCycle(RequestResponseCycle):
    """One request and its response; takes the extension's message as well."""

    async def send(self, message: MutableMapping[str, Any]) -> None:  # type: ignore[override]
        """Send as uvicorn does, or `count` bytes of `file` from `offset` by sendfile."""
        if message["type"] != EXTENSION:
            await super().send(message)  # type: ignore[arg-type]
            return
        if self.disconnected:
            return
        try:
            await self._send_file(message["file"], message["offset"], message["count"])
        except (OSError, RuntimeError, TimeoutError) as error:
            # The headers are out: all that can be said now is a broken connection. RuntimeError is
            # what asyncio raises when the transport was closed under the send.
            log.info("a receiver did not take its bytes: %s", error or type(error).__name__)
            self.disconnected = True
            self.transport.abort()
            return
        self.expected_content_length -= message["count"]
        await super().send(
            {
                "type": "http.response.body",
                "body": b"",
                "more_body": message.get("more_body", False),
            }
        )

    async def _send_file(self, file: Any, offset: int, count: int) -> None:
        loop = asyncio.get_running_loop()
        stop = offset + count
        while offset < stop:
            piece = min(SEND_PIECE_BYTES, stop - offset)
            async with asyncio.timeout(SEND_PIECE_SECONDS):
                sent = await loop.sendfile(self.transport, file, offset, piece, fallback=True)
            if sent < piece:
                raise OSError(f"the file ends {stop - offset - sent} bytes too early")
            offset += piece
