"""What a neighbour's sidecar answers, for tests of the neighbor tier: real HTTP, a real keeper.

Serves shards by range from `shards`, and takes offers into a disk store through the sidecar's own
keeper. Tokens and the other routes are the application's and are not here.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import BackstayError
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ErrorBody, ErrorReply, ReplicaOffer
from backstay_protocol.names import URL_CHECKPOINTS, URL_REPLICAS
from backstay_sidecar.replication.keeper import Keeper
from backstay_sidecar.tiers.base import ShardReader
from backstay_sidecar.tiers.disk import DiskStore

_SHARD = re.compile(URL_CHECKPOINTS + r"/(\d+-\d+)/shards/(\d+)(/manifest)?")
_PIECE = 16 << 10

Open = Callable[[CheckpointId, int], AbstractContextManager[ShardReader]]


class QuietMeter:
    """Counts nothing."""

    def moved(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Not counted."""

    def failed(self, tier: str) -> None:
        """Not counted."""


class PeerServer:
    """One sidecar's shard routes on a loopback port. Use it in a `with`."""

    def __init__(self, open_shard: Open, store: DiskStore | None = None, run: str = "") -> None:
        """`open_shard`: what is served; `store`: where offers are kept (None: no offers)."""
        self.open_shard = open_shard
        self.store = store
        self.promised = 0
        self.events: list[tuple[str, dict[str, object]]] = []
        self._run = run
        self._keeper: Keeper | None = None
        self._loop = asyncio.new_event_loop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> PeerServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False
        self._server.handle_error = lambda *_: None  # clients break off on purpose
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.01,)),
            threading.Thread(target=self._loop.run_forever),
        ]
        for thread in self._threads:
            thread.start()
        if self.store is not None:
            self._keeper = Keeper(
                self.store,
                run=self._run,
                replica=1,
                headers={},
                promised=lambda: self.promised,
                changed=lambda: None,
                emit=lambda kind, /, **fields: self.events.append((kind, fields)),
                meter=QuietMeter(),
                clock=SYSTEM_CLOCK,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        if self._keeper is not None:
            self._loop.call_soon_threadsafe(self._keeper.close)
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        self._loop.close()

    async def _drain(self) -> None:
        """Let pulls that were told to stop end, and the executor's threads with them."""
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper._threads.shutdown, True)
        await asyncio.sleep(0)
        await asyncio.get_running_loop().shutdown_default_executor()

    def offer(self, body: bytes) -> bytes:
        assert self._keeper is not None
        answer = self._keeper.offer(codec.loads(ReplicaOffer, body))
        return codec.dumps(asyncio.run_coroutine_threadsafe(answer, self._loop).result())


def _handler(owner: PeerServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == URL_REPLICAS
            try:
                self._send(200, owner.offer(body))
            except BackstayError as error:
                reply = ErrorReply(error=ErrorBody(code=type(error).__name__, message=str(error)))
                self._send(400, codec.dumps(reply))

        def do_GET(self) -> None:
            match = _SHARD.fullmatch(urlsplit(self.path).path)
            assert match
            checkpoint, rank = CheckpointId.parse(match[1]), int(match[2])
            try:
                with owner.open_shard(checkpoint, rank) as reader:
                    if match[3]:
                        self._send(200, reader.manifest.to_json())
                    else:
                        self._range(reader)
            except FileNotFoundError:
                self._send(404, b"")

        def _range(self, reader: ShardReader) -> None:
            start, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            position, stop = int(start), int(last) + 1
            self.send_response(206)
            self.send_header("Content-Length", str(stop - position))
            self.send_header("Content-Range", f"bytes {start}-{last}/{reader.manifest.size}")
            self.end_headers()
            while position < stop:
                piece = memoryview(bytearray(min(_PIECE, stop - position)))
                try:
                    reader.read_into(position, piece)
                except BackstayError:
                    self.close_connection = True
                    return
                self.wfile.write(piece)
                position += len(piece)

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    return Handler
