"""A sidecar for tests of the trainer library: real HTTP on the real unix socket, scripted answers.

It speaks the protocol's messages and keeps what it was told. Replies are taken from the scripts in
order; with an empty script it behaves like a job that begins from nothing and finishes at once.
"""

from __future__ import annotations

import socketserver
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from backstay_protocol import codec
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.messages import (
    GO,
    LOAD,
    AgentStatus,
    CaptureNotice,
    CaptureReply,
    CheckpointStatus,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    ErrorBody,
    ErrorReply,
    JobView,
    RestoreReply,
    RestoreRequest,
    TierState,
)
from backstay_protocol.names import (
    HEADER_PROTOCOL,
    PROTOCOL_VERSION,
    URL_CAPTURES,
    URL_CHECKPOINTS,
    URL_CONFIRM,
    URL_JOB,
    URL_RESTORE,
    URL_STATUS,
)

ATTEMPT = 1_000_001


def fresh_reply(*, attempt: int = ATTEMPT, tiers: tuple[str, ...] = ("memory", "local", "remote")):
    """The answer of a job that has no checkpoint yet."""
    decision = Decision(round="r", serial=1, attempt=attempt, base=None, reason="nothing is there")
    return load_reply(decision, tiers=tiers)


def load_reply(decision: Decision, *, tiers: tuple[str, ...] = ("memory", "local", "remote")):
    """The answer that tells a rank to load."""
    return RestoreReply(status=LOAD, decision=decision, run="team/run", tiers=tiers, slots=2)


def error_reply(code: str, message: str, hint: str = "") -> ErrorReply:
    """An error of the one wire shape."""
    return ErrorReply(error=ErrorBody(code=code, message=message, hint=hint))


class FakeSidecar:
    """Use as a context manager; `volume` is an existing folder."""

    def __init__(self, volume: str, *, version: str = PROTOCOL_VERSION) -> None:
        self.memory = MemoryLayout(str(volume))
        self.version = version
        self.restores: deque[Any] = deque()
        """Scripted answers to POST /v1/restore: messages, or (status, ErrorReply)."""
        self.confirms: deque[Any] = deque()
        self.status = AgentStatus(
            run="team/run", replica=0, tiers=_tiers("memory", "local", "remote")
        )
        self.checkpoints: dict[CheckpointId, CheckpointStatus] = {}
        self.joined: list[RestoreRequest] = []
        self.verdicts: list[ConfirmRequest] = []
        self.captures: list[CaptureNotice] = []
        self.persisted: list[CheckpointId] = []
        self.job: Callable[[], JobView] | None = None
        """What GET /v1/job answers; None: there is no such route here."""
        self.complete_at_once = True
        """Every checkpoint that is asked about is complete in every tier."""
        self._server: _Server | None = None

    def __enter__(self) -> FakeSidecar:
        self._server = _Server(self.memory.socket, self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # --- what it answers ---------------------------------------------------------------------

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """A message, or (status, message)."""
        if path == URL_RESTORE:
            self.joined.append(codec.loads(RestoreRequest, body))
            return self.restores.popleft() if self.restores else fresh_reply()
        if path == URL_CONFIRM:
            self.verdicts.append(codec.loads(ConfirmRequest, body))
            return self.confirms.popleft() if self.confirms else ConfirmReply(status=GO)
        if path == URL_CAPTURES:
            self.captures.append(codec.loads(CaptureNotice, body))
            return CaptureReply()
        if path == URL_STATUS:
            return self.status
        if path == URL_JOB and self.job is not None:
            return self.job()
        if path.startswith(URL_CHECKPOINTS + "/"):
            return self._checkpoint(method, path)
        return 404, error_reply("NoSuchRoute", f"{method} {path}")

    def _checkpoint(self, method: str, path: str) -> Any:
        name, _, action = path.removeprefix(URL_CHECKPOINTS + "/").partition("/")
        checkpoint = CheckpointId.parse(name)
        if method == "POST" and action == "persist":
            self.persisted.append(checkpoint)
            return CaptureReply()
        known = self.checkpoints.get(checkpoint)
        if known is None and self.complete_at_once:
            known = checkpoint_status(checkpoint, tuple(t.tier for t in self.status.tiers))
        return known or (404, error_reply("NoSuchCheckpoint", f"{checkpoint} is not known"))


def checkpoint_status(checkpoint: CheckpointId, complete_in: tuple[str, ...]) -> CheckpointStatus:
    """A checkpoint of one rank, whole in these tiers."""
    return CheckpointStatus(
        checkpoint=checkpoint,
        world_size=1,
        complete_in=complete_in,
        present_in=dict.fromkeys(complete_in, 1),
        durable="remote" in complete_in,
        pinned=False,
        on_lineage=True,
        size=1,
    )


def _tiers(*names: str) -> tuple[TierState, ...]:
    return tuple(TierState(tier=name) for name in names)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = False
    request_queue_size = 64

    def __init__(self, path: str, fake: FakeSidecar) -> None:
        self.fake = fake
        super().__init__(path, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reply = self.server.fake.answer(self.command, self.path, body)
        status, message = reply if isinstance(reply, tuple) else (200, reply)
        data = codec.dumps(message)
        self.send_response(status)
        self.send_header(HEADER_PROTOCOL, self.server.fake.version)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
