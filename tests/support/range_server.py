"""A small HTTP server with Range, for tests that read shards over the network."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RangeServer:
    """Serves the files of a folder on a loopback port. Use as a context manager."""

    def __init__(self, folder: str) -> None:
        self.folder = str(folder)
        self.requests: list[tuple[str, str]] = []
        """(path, Range) of every request."""
        self.fail: dict[str, int] = {}
        """Path -> status to answer instead."""

    def __enter__(self) -> RangeServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(owner: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            owner.requests.append((self.path, wanted))
            if self.path in owner.fail:
                return self._send(owner.fail[self.path], b"")
            try:
                with open(os.path.join(owner.folder, self.path.lstrip("/")), "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                return self._send(404, b"")
            if not wanted:
                return self._send(200, data)
            start, _, stop = wanted.removeprefix("bytes=").partition("-")
            part = data[int(start) : int(stop) + 1]
            return self._send(206, part, f"bytes {start}-{stop}/{len(data)}")

        def _send(self, status: int, data: bytes, content_range: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    return Handler
