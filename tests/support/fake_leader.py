"""A leader's sidecar for tests of the command: real HTTP on a loopback port, scripted answers.

    with FakeLeader() as leader:
        leader.answers[URL_JOB] = job_view(...)
        call("flush", "--address", leader.address, BACKSTAY_TOKEN=TOKEN)

An answer is a message, (status, ErrorReply), or a function that gives one, called each time.
"""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from backstay_protocol import codec
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    ErrorBody,
    ErrorReply,
    JobView,
    ReplicaView,
    RestoreView,
    TierState,
)
from backstay_protocol.names import HEADER_PROTOCOL, PROTOCOL_VERSION, URL_METRICS

TOKEN = "token-of-the-fake-leader"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
ATTEMPT = 1_796_000_000_000_001


def error_reply(code: str, message: str, hint: str = "") -> ErrorReply:
    """An error of the one wire shape."""
    return ErrorReply(error=ErrorBody(code=code, message=message, hint=hint))


def job_view(
    *tiers: TierState,
    phase: str = "Training",
    message: str = "",
    step: int = 1210,
    restores: tuple[RestoreView, ...] = (),
    replicas: tuple[ReplicaView, ...] = (),
    warnings: tuple[str, ...] = (),
) -> JobView:
    """GET /v1/job of a run `team/gpt`."""
    return JobView(
        run="team/gpt",
        attempt=ATTEMPT,
        phase=phase,
        message=message,
        step=step,
        tiers=tiers,
        restores=restores,
        replicas=replicas,
        warnings=warnings,
    )


def tier(name: str, newest: int = 0, **more: Any) -> TierState:
    """A tier whose newest complete step is `newest`; 0: none."""
    checkpoint = CheckpointId(newest, ATTEMPT) if newest else None
    return TierState(tier=name, newest=checkpoint, **more)


class FakeLeader:
    """Use as a context manager."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        """Path (with query) -> what it answers."""
        self.asked: list[str] = []
        """`METHOD path`, in order."""

    def __enter__(self) -> FakeLeader:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.leader = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def address(self) -> str:
        """`127.0.0.1:<port>`."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, path: str, token: str) -> tuple[int, Any]:
        """Status and message (or bytes)."""
        self.asked.append(f"{method} {path}")
        if token != f"Bearer {TOKEN}" and path != URL_METRICS:
            return 401, error_reply("Unauthorized", "no valid token")
        found = self.answers.get(path)
        if found is None:
            return 404, error_reply("NotFound", f"there is no route {method} {path}")
        reply = found() if callable(found) else found
        return reply if isinstance(reply, tuple) else (200, reply)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    leader: FakeLeader


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization") or ""
        status, message = self.server.leader.answer(self.command, self.path, token)
        data = message if isinstance(message, bytes) else codec.dumps(message)
        size = len(data)
        if status == 200 and (part := _RANGE.fullmatch(self.headers.get("Range") or "")):
            start, stop = int(part[1]), min(int(part[2]) + 1, size)
            status, data = 206, data[start:stop]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header(HEADER_PROTOCOL, PROTOCOL_VERSION)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
