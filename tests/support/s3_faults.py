"""A proxy in front of a real S3 server that misbehaves on demand: what stores and networks do.

    with S3Faults(server.address) as faults:
        store = RemoteStore(endpoint=faults.endpoint, ...)
        faults.hang()
        ...
        faults.heal()

It is real TCP and HTTP/1.1 and passes everything through unchanged (signatures stay valid: the
client signs for the proxy's own address). One fault is in force at a time and can be changed while
requests run; `only` limits it to some requests.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

_SLICE = 16 << 10
Only = Callable[[str, str], bool]

REFUSE, RESET, HANG, ANSWER, THROTTLE, DROP, STRIP, HEALTHY = (
    "refuse", "reset", "hang", "answer", "throttle", "drop", "strip", "healthy",
)  # fmt: skip


@dataclass(frozen=True)
class _Fault:
    kind: str
    only: Only | None = None
    status: int = 0
    code: str = ""
    message: str = ""
    num_bytes: int = 0
    times: int | None = None


class _Broken(Exception):
    """Reset this connection now."""


class S3Faults:
    """The proxy and its control. Use it in a `with`; its methods may be called from any thread."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self._fault = _Fault(HEALTHY)
        self._changed = threading.Event()
        self._closing = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._port = 0
        self.requests: list[tuple[str, str]] = []
        """(method, path with query) of every request that arrived."""
        self.hits = 0
        """Times that the fault in force was met."""

    # --- control -------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def heal(self) -> None:
        """Pass everything through."""
        self._set(_Fault(HEALTHY))

    def refuse(self) -> None:
        """Nothing listens; open connections are reset."""
        self._set(_Fault(REFUSE))

    def reset(self, only: Only | None = None) -> None:
        """Reset the connection when a request arrives."""
        self._set(_Fault(RESET, only))

    def hang(self, only: Only | None = None) -> None:
        """Take requests and never answer (until the fault is changed: then reset)."""
        self._set(_Fault(HANG, only))

    def answer(
        self, status: int, code: str = "", message: str = "injected", only: Only | None = None
    ) -> None:
        """Answer with this status; with a code as an S3 error in XML, else as plain text."""
        self._set(_Fault(ANSWER, only, status=status, code=code, message=message))

    def wrong_signature(self) -> None:
        self.answer(403, "SignatureDoesNotMatch", "The request signature does not match")

    def expired_token(self) -> None:
        self.answer(403, "ExpiredToken", "The provided token has expired")

    def unknown_key(self) -> None:
        self.answer(403, "InvalidAccessKeyId", "The access key ID does not exist")

    def throttle(self, bytes_per_second: int, only: Only | None = None) -> None:
        """Let bodies through at this pace, each connection by itself."""
        self._set(_Fault(THROTTLE, only, num_bytes=bytes_per_second))

    def drop_after(
        self, num_bytes: int, times: int | None = None, only: Only | None = None
    ) -> None:
        """Reset a connection after so many bytes of bodies; so many times, then heal."""
        self._set(_Fault(DROP, only, num_bytes=num_bytes, times=times))

    def without_conditional_writes(self) -> None:
        """A store that does not know If-None-Match: the header is lost on the way."""
        self._set(_Fault(STRIP))

    def _set(self, fault: _Fault) -> None:
        with self._lock:
            self._fault = fault
            self.hits = 0
            self._changed.set()
            self._changed = threading.Event()
        if fault.kind == REFUSE:
            self._stop_listening()
            self._reset_all()
        elif self._listener is None:
            self._listen()

    # --- life ----------------------------------------------------------------------------------

    def __enter__(self) -> S3Faults:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with self._lock:
            self._changed.set()
        self._stop_listening()
        self._reset_all()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(128)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._spawn(self._accept, listener)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            listener.close()

    def _reset_all(self) -> None:
        with self._lock:
            for sock in self._sockets:
                _shut(sock)

    def _spawn(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(sock,), name="s3-faults")
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self._closing or listener is not self._listener:
                _reset(client)
                continue
            self._spawn(self._serve, client)

    # --- one connection ------------------------------------------------------------------------

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._sockets.add(client)
        connection = _Proxied(self, client)
        try:
            while connection.one_request():
                pass
            client.close()
        except (_Broken, OSError):
            _reset(client)
        finally:
            connection.close()
            with self._lock:
                self._sockets.discard(client)

    def fault_for(self, method: str, path: str) -> tuple[_Fault, threading.Event]:
        """What happens to this request, and the event of the next change."""
        with self._lock:
            self.requests.append((method, path))
            fault = self._fault
            if fault.only is not None and not fault.only(method, path):
                fault = _Fault(HEALTHY)
            if fault.kind != HEALTHY and fault.kind != DROP:
                self.hits += 1
            return fault, self._changed

    def drop_now(self, fault: _Fault) -> bool:
        """Whether a connection that has passed its bytes is dropped (the count may be used up)."""
        with self._lock:
            if fault is not self._fault:
                return False
            self.hits += 1
            if fault.times is not None and self.hits >= fault.times:
                self._fault = _Fault(HEALTHY)
            return True

    def connect(self) -> socket.socket:
        upstream = socket.create_connection(self._upstream, timeout=60)
        with self._lock:
            self._sockets.add(upstream)
        return upstream

    def forget(self, upstream: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(upstream)
        upstream.close()


class _Proxied:
    """One client's connection and the one to the store that belongs to it."""

    def __init__(self, owner: S3Faults, client: socket.socket) -> None:
        self._owner = owner
        self._client = client
        self._reader = client.makefile("rb")
        self._upstream: socket.socket | None = None
        self._store_reader = None
        self._passed = 0
        self._changed = threading.Event()

    def close(self) -> None:
        self._reader.close()
        if self._store_reader is not None:
            self._store_reader.close()
        if self._upstream is not None:
            self._owner.forget(self._upstream)

    def one_request(self) -> bool:
        """Serve one request; False when the client is done."""
        head = _read_head(self._reader)
        if head is None:
            return False
        method, path, _ = head[0].split(" ", 2)
        fault, changed = self._owner.fault_for(method, path)
        self._changed = changed
        length = int(_header(head, "content-length") or 0)
        if fault.kind in (REFUSE, RESET):
            raise _Broken
        if fault.kind == HANG:
            changed.wait()
            raise _Broken
        if fault.kind == ANSWER:
            self._drain(length)
            self._client.sendall(_error_answer(method, fault))
            return True
        if fault.kind == STRIP:
            head = [line for line in head if not line.lower().startswith("if-none-match:")]
        self._forward(head, length, fault)
        return self._relay(method, fault)

    def _drain(self, length: int) -> None:
        while length:
            data = self._reader.read1(min(_SLICE, length))
            if not data:
                raise _Broken
            length -= len(data)

    def _forward(self, head: list[str], length: int, fault: _Fault) -> None:
        if self._upstream is None:
            self._upstream = self._owner.connect()
            self._store_reader = self._upstream.makefile("rb")
        self._upstream.sendall(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
        self._copy(self._reader, self._upstream, length, fault)

    def _relay(self, method: str, fault: _Fault) -> bool:
        head = _read_head(self._store_reader)
        if head is None:
            raise _Broken
        self._client.sendall(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
        status = int(head[0].split(" ", 2)[1])
        bodiless = method == "HEAD" or status in (204, 304) or status < 200
        if not bodiless and "chunked" in (_header(head, "transfer-encoding") or ""):
            self._copy_chunked(fault)
        elif not bodiless:
            length = int(_header(head, "content-length") or 0)
            self._copy(self._store_reader, self._client, length, fault)
        return (_header(head, "connection") or "").lower() != "close"

    def _copy(self, source, sink: socket.socket, length: int, fault: _Fault) -> None:
        piece = max(1, fault.num_bytes // 20) if fault.kind == THROTTLE else _SLICE
        while length:
            data = source.read1(min(piece, _SLICE, length))
            if not data:
                raise _Broken
            self._pass(data, sink, fault)
            length -= len(data)

    def _pass(self, data: bytes, sink: socket.socket, fault: _Fault) -> None:
        if fault.kind == DROP and self._passed + len(data) >= fault.num_bytes:
            sink.sendall(data[: fault.num_bytes - self._passed])
            self._passed = 0
            if self._owner.drop_now(fault):
                raise _Broken
            data = data[fault.num_bytes - self._passed :]
        if fault.kind == THROTTLE:  # once the fault is changed, the rest goes at full speed
            self._changed.wait(len(data) / fault.num_bytes)
        self._passed += len(data)
        sink.sendall(data)

    def _copy_chunked(self, fault: _Fault) -> None:
        while True:
            size_line = self._store_reader.readline()
            self._client.sendall(size_line)
            size = int(size_line.split(b";")[0], 16)
            self._copy(self._store_reader, self._client, size + 2, fault)
            if size == 0:
                return


def _read_head(reader) -> list[str] | None:
    """Start line and headers without the empty line; None at the end of the stream."""
    lines: list[str] = []
    while True:
        line = reader.readline()
        if not line:
            return None
        if line == b"\r\n":
            return lines
        lines.append(line.rstrip(b"\r\n").decode("latin-1"))


def _header(head: list[str], name: str) -> str | None:
    for line in head[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name:
            return value.strip()
    return None


def _error_answer(method: str, fault: _Fault) -> bytes:
    body, kind = fault.message.encode(), "text/plain"
    if fault.code:
        kind = "application/xml"
        body = (
            f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{fault.code}</Code>"
            f"<Message>{fault.message}</Message></Error>"
        ).encode()
    head = (
        f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)


def _shut(sock: socket.socket) -> None:
    """Make whatever blocks on it fail; its own thread closes it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    """Close with RST."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
