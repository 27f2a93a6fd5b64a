"""`/healthz` and `/metrics`, each on a port of its own, in threads that outlive a hanging loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

_TEXT = "text/plain; charset=utf-8"
Answer = tuple[int, str, bytes]


class HttpThread:
    """A tiny server: path -> answer."""

    def __init__(self, port: int, routes: dict[str, Callable[[], Answer]], host: str = "") -> None:
        """Listens at once. `port` 0: any free one. Raises OSError."""
        self._server = ThreadingHTTPServer((host, port), _handler(routes))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name=f"http-{port}", daemon=True
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def health_routes(trouble: Callable[[], str]) -> dict[str, Callable[[], Answer]]:
    """`trouble`: why the operator is not healthy; empty if it is."""

    def healthz() -> Answer:
        why = trouble()
        return (500, _TEXT, f"{why}\n".encode()) if why else (200, _TEXT, b"ok\n")

    return {"/healthz": healthz, "/readyz": healthz}


def metrics_routes(registry: CollectorRegistry) -> dict[str, Callable[[], Answer]]:
    """Prometheus' text."""
    return {"/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry))}


def _handler(routes: dict[str, Callable[[], Answer]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            route = routes.get(self.path.partition("?")[0])
            status, kind, body = route() if route else (404, _TEXT, b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are no news."""

    return Handler
