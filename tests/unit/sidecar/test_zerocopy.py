"""The protocol class on a real socket: slow clients, and sends that can no longer go on."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from backstay_sidecar import zerocopy
from backstay_sidecar.auth import Application
from backstay_sidecar.zerocopy import EXTENSION, ZeroCopyProtocol

SIZE = 32 << 20


@asynccontextmanager
async def serving(app: Application) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=ZeroCopyProtocol, ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await task


class FileApp:
    """Sends `length` bytes of a file that may be shorter, and notes how the send ended."""

    def __init__(self, length: int = SIZE, size: int = SIZE) -> None:
        self.length = length
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.file.truncate(size)
        self.ended = asyncio.Event()
        self.extensions: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.extensions = scope["extensions"]
        headers = [(b"content-length", str(self.length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        part = {"file": self.file, "offset": 0, "count": self.length // 2}
        rest = {"file": self.file, "offset": self.length // 2, "count": self.length // 2}
        await send({"type": EXTENSION, **part, "more_body": True})
        await send({"type": EXTENSION, **rest})
        self.ended.set()

    def close(self) -> None:
        self.file.close()


@pytest.fixture
def app() -> Any:
    it = FileApp()
    yield it
    it.close()


async def ask(
    address: tuple[str, int], request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
) -> Any:
    reader, writer = await asyncio.open_connection(*address, limit=1 << 16)
    writer.write(request)
    return reader, writer


async def end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_file_is_sent_in_several_messages_and_the_connection_stays(app: FileApp) -> None:
    async with serving(app) as address:
        reader, writer = await ask(address)
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(SIZE)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await end(writer)
    assert app.extensions == {EXTENSION: {}}


async def test_a_file_that_ends_too_early_breaks_the_connection() -> None:
    app = FileApp(size=1000)
    async with serving(app) as address:
        reader, writer = await ask(address)
        await reader.readuntil(b"\r\n\r\n")
        body = await asyncio.wait_for(reader.read(), 10)
        assert len(body) <= 1000
        await app.ended.wait()
        await end(writer)
    app.close()


async def test_a_receiver_that_stalls_is_cut_off(
    app: FileApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zerocopy, "SEND_PIECE_SECONDS", 0.2)
    async with serving(app) as address:
        _, writer = await ask(address)
        async with asyncio.timeout(20):
            await app.ended.wait()
        await end(writer)


async def test_a_receiver_that_goes_ends_the_send(app: FileApp) -> None:
    async with serving(app) as address:
        reader, writer = await ask(address)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        async with asyncio.timeout(20):
            await app.ended.wait()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "headers without end"]
)
async def test_headers_that_do_not_arrive_are_not_waited_for(
    app: FileApp, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(zerocopy, "HEADER_SECONDS", 0.1)
    async with serving(app) as address:
        reader, writer = await ask(address, sent)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "RequestTimeout"
        await end(writer)


async def test_a_quiet_connection_between_requests_is_not_slow(
    app: FileApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zerocopy, "HEADER_SECONDS", 0.1)
    async with serving(app) as address:
        reader, writer = await ask(address)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(SIZE)
        await asyncio.sleep(0.3)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await end(writer)


async def test_connections_beyond_the_limit_are_told_so(
    app: FileApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zerocopy, "MAX_CONNECTIONS", 1)
    async with serving(app) as address:
        _, first = await ask(address, b"")
        reader, second = await ask(address, b"")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "TooManyConnections"
        await end(first)
        await end(second)
