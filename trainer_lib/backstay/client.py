"""Talks to the pod's own sidecar: HTTP over the unix socket in the memory volume.

Used by restore.py, checkpointer.py and preflight.py. One connection per request (they are rare and
local), every call bounded, nothing kept between calls. It knows no policy: who may fail and who
must try again is the caller's; `patiently` is the one loop for those who must.
"""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.errors import ProtocolError, Refused, Unreachable, VersionMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    AgentStatus,
    CaptureNotice,
    CaptureReply,
    CheckpointStatus,
    ErrorReply,
)
from backstay_protocol.names import (
    HEADER_PROTOCOL,
    PROTOCOL_VERSION,
    URL_CAPTURES,
    URL_CHECKPOINT,
    URL_PERSIST,
    URL_STATUS,
    works_with,
)

T = TypeVar("T")

REPLY_LIMIT_BYTES = 256 << 20
LONG_POLL_MARGIN_SECONDS = 10.0
SHORT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
_UNIX_PATH_LIMIT = 107


class SidecarClient:
    """Requests to one sidecar. Safe to use from several threads."""

    def __init__(self, socket_path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """`socket_path`: the sidecar's listener; it need not be there yet."""
        self.socket_path = socket_path
        self._clock = clock

    def post(self, url: str, message: Any, reply: type[T], timeout_seconds: float) -> T:
        """Send one message, read one. Raises Unreachable, Refused, ProtocolError."""
        return self._exchange("POST", url, codec.dumps(message), reply, timeout_seconds)

    def get(self, url: str, reply: type[T], timeout_seconds: float = SHORT_SECONDS) -> T:
        """Read one message. Raises Unreachable, Refused, ProtocolError."""
        return self._exchange("GET", url, b"", reply, timeout_seconds)

    def notify(self, notice: CaptureNotice, timeout_seconds: float) -> bool:
        """Tell of a capture, at best: the sidecar finds it by itself where this fails."""
        try:
            return self.post(URL_CAPTURES, notice, CaptureReply, timeout_seconds).ok
        except (Unreachable, Refused, ProtocolError):
            return False

    def status(self, timeout_seconds: float = SHORT_SECONDS) -> AgentStatus:
        """How the sidecar and its tiers do."""
        return self.get(URL_STATUS, AgentStatus, timeout_seconds)

    def checkpoint(
        self, checkpoint: CheckpointId, timeout_seconds: float = SHORT_SECONDS
    ) -> CheckpointStatus | None:
        """Where one checkpoint is complete; None if the sidecar does not know it (yet)."""
        url = URL_CHECKPOINT.format(checkpoint=checkpoint)
        try:
            return self.get(url, CheckpointStatus, timeout_seconds)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def persist(self, checkpoint: CheckpointId) -> None:
        """Ask that every tier takes this checkpoint, whatever its schedule says."""
        url = URL_PERSIST.format(checkpoint=checkpoint)
        self._request("POST", url, b"{}", SHORT_SECONDS)

    def patiently(
        self, ask: Callable[[], T], bound_seconds: float, say: Callable[[str], None]
    ) -> T:
        """Repeat `ask` while the sidecar is starting or restarting. Raises the last Unreachable."""
        deadline = self._clock.monotonic() + bound_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return ask()
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and error.status not in (502, 503, 504):
                    raise
                if self._clock.monotonic() + pause > deadline:
                    raise Unreachable(str(error)) from error
                say(f"the sidecar does not answer yet ({error})")
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _exchange(
        self, method: str, url: str, body: bytes, reply: type[T], timeout_seconds: float
    ) -> T:
        return codec.loads(reply, self._request(method, url, body, timeout_seconds))

    def _request(self, method: str, url: str, body: bytes, timeout_seconds: float) -> bytes:
        connection = _UnixConnection(self.socket_path, timeout_seconds)
        headers = {HEADER_PROTOCOL: PROTOCOL_VERSION}
        if body:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, url, body or None, headers)
            response = connection.getresponse()
            data = response.read(REPLY_LIMIT_BYTES)
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"
            raise Unreachable(f"{method} {url} at {self.socket_path}: {reason}") from error
        finally:
            connection.close()
        _check_version(response.getheader(HEADER_PROTOCOL))
        if response.status >= 400:
            raise _refusal(method, url, response.status, data)
        return data


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            _connect(self.sock, self._path)
        except BaseException:
            self.sock.close()
            self.sock = None
            raise


def _connect(connection: socket.socket, path: str) -> None:
    if len(path.encode()) <= _UNIX_PATH_LIMIT:
        connection.connect(path)
        return
    # The kernel takes 107 bytes of path; a descriptor of the folder shortens any to that.
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def _check_version(version: str | None) -> None:
    if version is not None and not works_with(version):
        raise VersionMismatch(
            f"the sidecar speaks protocol {version}, this library {PROTOCOL_VERSION}; use images "
            "of the same minor version of Backstay, or of the one next to it"
        )


def _refusal(method: str, url: str, status: int, data: bytes) -> Refused:
    try:
        error = codec.loads(ErrorReply, data).error
    except ProtocolError:
        text = data[:200].decode(errors="replace")
        return Refused(status, "Unknown", f"{method} {url} answered {status}: {text}")
    return Refused(status, error.code, error.message, error.hint)
