"""The ranged pull client: one way to read shards from sidecars and from presigned URLs.

The trainer library reads a restore with it, the sidecar its neighbour's copies and the remote
tier. Bytes go from the socket straight into the caller's memory or into one reusable buffer per
thread; every chunk's digest is checked before it is handed over (the digest function is passed
in). A broken connection is taken up again at the byte where it broke. It decides nothing about
which source is the right one, and follows no redirects.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol
from urllib.parse import urlsplit

from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.crew import Crew
from backstay_protocol.errors import Cancelled, CorruptData, DigestMismatch, Unreachable
from backstay_protocol.manifest import Manifest

TIMEOUT_SECONDS = 30.0  # one read or write
CONNECT_SECONDS = 10.0
THREADS = 4
MAX_BREAKS = 5  # breaks in a row without a byte between them
SPAN_BYTES = 64 << 20  # most that one request asks for
SMALL_LIMIT = 64 << 20  # most that `exchange` reads
_FIRST_PAUSE = 0.05
_CHUNKED_READ = 256 << 10
_S3_CODE = re.compile(rb"<Code>([^<]+)</Code>")
_S3_MESSAGE = re.compile(rb"<Message>([^<]+)</Message>")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

Digest = Callable[[memoryview], str]
Deliver = Callable[[int, memoryview], None]
Into = Callable[[int], Sequence[memoryview]]


class Hasher(Protocol):
    """A digest over bytes that come in pieces, as hashlib's and xxhash's are."""

    def update(self, data: memoryview, /) -> object:
        """Add the next piece."""
        ...

    def hexdigest(self) -> str:
        """Of all pieces so far."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Where to ask: a URL, with headers, over TCP, TLS or a unix socket."""

    url: str
    """`http(s)://host[:port]/path[?query]`; over a unix socket the host is only a header."""
    headers: Mapping[str, str] = field(default_factory=dict)
    uds: str = ""
    """Path of a unix socket to connect to."""
    tls: ssl.SSLContext | None = None
    """For https: whom to trust; None: the system's authorities."""

    @property
    def name(self) -> str:
        """For errors: the URL without its query, which may carry a signature."""
        name = self.url.partition("?")[0]
        return f"{name} (over {self.uds})" if self.uds else name

    @property
    def target(self) -> str:
        """Path and query, as sent in the request line."""
        parts = urlsplit(self.url)
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


class Connection:
    """One kept-alive connection to an endpoint's host. One thread uses it; any may interrupt it."""

    def __init__(self, endpoint: Endpoint, timeout: float = TIMEOUT_SECONDS) -> None:
        """Connects at the first request. `timeout`: of each read and write."""
        self.endpoint = endpoint
        self._timeout = timeout
        self._http = _http_connection(endpoint, min(timeout, CONNECT_SECONDS))
        self._response: http.client.HTTPResponse | None = None

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | Iterable[memoryview] | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request, return the response with its body unread.

        Raises OSError or HTTPException; never FileNotFoundError (a missing socket is refused).
        """
        self._drop_response()
        if self._http.sock is None:
            self._connect()
        try:
            self._http.request(method, target, body=body, headers=dict(headers))
        except (BrokenPipeError, ConnectionResetError) as error:
            self._response = self._early_answer(error)
        else:
            self._response = self._http.getresponse()
        return self._response

    def _early_answer(self, broken: OSError) -> http.client.HTTPResponse:
        """A server may refuse a body that it does not want, and close, before it has read it."""
        try:
            response = self._http.getresponse()
        except (OSError, http.client.HTTPException):
            raise broken from None
        response.will_close = True
        return response

    def _connect(self) -> None:
        try:
            self._http.connect()
        except FileNotFoundError as error:
            raise ConnectionRefusedError(f"no socket at {self.endpoint.uds}") from error
        self._http.sock.settimeout(self._timeout)

    def finish(self) -> None:
        """The body was read to its end: the connection can be used again."""
        response, self._response = self._response, None
        if response is not None:
            reusable = not response.will_close
            response.close()
            if not reusable:
                self._http.close()

    def interrupt(self) -> None:
        """Make a read or write that blocks in another thread fail now."""
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._drop_response()
        self._http.close()

    def _drop_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:  # not read to its end: what is left of it spoils the connection
            response.close()
            self._http.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _http_connection(endpoint: Endpoint, timeout: float) -> http.client.HTTPConnection:
    if endpoint.uds:
        return _UnixConnection(endpoint.uds, timeout)
    parts = urlsplit(endpoint.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{endpoint.name}: expected http(s)://host[:port]/path")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    return http.client.HTTPSConnection(
        parts.hostname, parts.port, timeout=timeout, context=endpoint.tls
    )


# --- small answers -------------------------------------------------------------------------------


def exchange(
    endpoint: Endpoint,
    method: str = "GET",
    body: bytes | None = None,
    *,
    timeout: float = TIMEOUT_SECONDS,
    limit: int = SMALL_LIMIT,
) -> tuple[int, bytes]:
    """One request, its status and its whole body. Raises Unreachable; no status is an error."""
    try:
        with Connection(endpoint, timeout) as connection:
            response = connection.request(method, endpoint.target, endpoint.headers, body)
            data = response.read(limit + 1)
            complete = response.length in (0, None)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{endpoint.name}: {describe(error)}") from error
    if len(data) > limit:
        raise Unreachable(f"{endpoint.name}: the answer is longer than {limit} bytes")
    if not complete:
        raise Unreachable(f"{endpoint.name}: the connection broke inside the answer")
    return response.status, data


def get_bytes(
    endpoint: Endpoint, *, timeout: float = TIMEOUT_SECONDS, limit: int = SMALL_LIMIT
) -> bytes:
    """A small object. Raises FileNotFoundError (404, 410: proven gone) or Unreachable."""
    status, data = exchange(endpoint, timeout=timeout, limit=limit)
    if status != 200:
        _raise_status(endpoint, status, data)
    return data


def describe(error: BaseException) -> str:
    """An exception of socket, ssl or http.client in words for people."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return f"the name is not known ({error.strerror})"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionError):
        return "the connection broke"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"TLS: its certificate is not trusted ({error.verify_message}); name the authority "
            "behind it: remote.caSecret in a cluster, elsewhere BACKSTAY_S3_CA_FILE"
        )
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error) or type(error).__name__


def _raise_status(endpoint: Endpoint, status: int, body: bytes) -> None:
    said = _what_it_said(body)
    if status in (404, 410):
        raise FileNotFoundError(f"{endpoint.name}: not there ({status}{said})")
    raise Unreachable(f"{endpoint.name}: answered {status}{said}")


def _what_it_said(body: bytes) -> str:
    """The words of an error answer: a sidecar's JSON or an S3 store's XML."""
    code, message = _S3_CODE.search(body), _S3_MESSAGE.search(body)
    if code:
        words = code[1] + (b": " + message[1] if message else b"")
        return f" {words.decode(errors='replace')}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f" {json.loads(body)['error']['message']}"
    return ""


# --- ranges --------------------------------------------------------------------------------------


class _ServerTrouble(OSError):
    """An answer that says "later": treated like a broken connection."""


class _Stream:
    """Bytes [start, stop) of one endpoint, in order, across broken connections."""

    def __init__(
        self, connection: Connection, start: int, stop: int, size: int, cancel: threading.Event
    ) -> None:
        self._connection = connection
        self._position = start
        self._stop = stop
        self._size = size
        self._cancel = cancel
        self._breaks = 0
        self._response: http.client.HTTPResponse | None = None
        self._left = 0

    def fill(self, view: memoryview, hasher: Hasher | None = None) -> None:
        """Fill the whole view; `hasher` gets the bytes while they are in the processor's cache.

        Raises FileNotFoundError, CorruptData, Unreachable, Cancelled.
        """
        filled = 0
        while filled < len(view):
            count = self._read_some(view[filled:])
            if hasher is not None and count:
                hasher.update(view[filled : filled + count])
            filled += count
        if self._position == self._stop:
            self._end()

    def _read_some(self, view: memoryview) -> int:
        if self._cancel.is_set():
            raise Cancelled(f"{self._connection.endpoint.name}: told to stop")
        try:
            if self._response is None:
                self._response = self._ask()
            count = self._receive(self._response, view)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, FileNotFoundError):
                raise
            self._break(error)
            return 0
        self._position += count
        self._breaks = 0
        return count

    def _receive(self, response: http.client.HTTPResponse, view: memoryview) -> int:
        if response.chunked:
            count = response.readinto(view[:_CHUNKED_READ])
        else:
            count = response.fp.readinto1(view[: self._left])
        if not count:
            raise ConnectionResetError("closed before the end")
        self._left -= count
        return count

    def _ask(self) -> http.client.HTTPResponse:
        endpoint = self._connection.endpoint
        wanted = {"Range": f"bytes={self._position}-{self._stop - 1}"}
        response = self._connection.request("GET", endpoint.target, {**endpoint.headers, **wanted})
        if response.status == 206:
            self._check_range(response)
        elif response.status == 200 and self._position == 0:
            self._left = response.length or 0
        else:
            self._refuse(response)
        return response

    def _check_range(self, response: http.client.HTTPResponse) -> None:
        name = self._connection.endpoint.name
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not match or int(match[1]) != self._position:
            said = response.headers.get("Content-Range")
            raise Unreachable(f"{name}: asked from byte {self._position}, got {said!r}")
        if match[3] != "*" and int(match[3]) < self._size:
            raise CorruptData(f"{name}: holds {match[3]} bytes, promised were {self._size}")
        self._left = min(int(match[2]) + 1, self._stop) - self._position

    def _refuse(self, response: http.client.HTTPResponse) -> None:
        endpoint, status = self._connection.endpoint, response.status
        body = response.read(_CHUNKED_READ)
        if status == 416:
            raise CorruptData(
                f"{endpoint.name}: ends before byte {self._position}, promised were {self._size}"
            )
        if status >= 500 or status in (408, 429):
            raise _ServerTrouble(f"answered {status}{_what_it_said(body)}")
        if status == 200:
            raise Unreachable(f"{endpoint.name}: does not serve ranges")
        _raise_status(endpoint, status, body)

    def _break(self, error: BaseException) -> None:
        """Close, wait a little, and let the next read ask again from where this one broke."""
        self._response = None
        self._connection.close()
        self._breaks += 1
        if self._breaks >= MAX_BREAKS:
            raise Unreachable(
                f"{self._connection.endpoint.name}: {describe(error)}, at byte {self._position} "
                f"of {self._size}, {MAX_BREAKS} times in a row"
            ) from error
        self._cancel.wait(_FIRST_PAUSE * 2 ** (self._breaks - 1))

    def _end(self) -> None:
        self._response = None
        if self._left == 0:
            self._connection.finish()
        else:  # a 200 that goes on beyond what was wanted
            self._connection.close()


class RangeReader:
    """Reads ranges of one endpoint over one kept connection. For one thread at a time."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout: float = TIMEOUT_SECONDS,
        cancel: threading.Event | None = None,
    ) -> None:
        """Connects at the first read."""
        self._connection = Connection(endpoint, timeout)
        self._cancel = cancel or threading.Event()

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start`. Raises as `read_range`."""
        stop = start + len(buffer)
        _Stream(self._connection, start, stop, stop, self._cancel).fill(buffer)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def read_range(
    endpoint: Endpoint,
    start: int,
    buffer: memoryview,
    timeout: float = TIMEOUT_SECONDS,
    cancel: threading.Event | None = None,
) -> None:
    """Fill `buffer` from byte `start`, unverified.

    Raises FileNotFoundError (404, 410), CorruptData (it ends too early), Unreachable, Cancelled.
    """
    with contextlib.closing(RangeReader(endpoint, timeout=timeout, cancel=cancel)) as reader:
        reader.read_into(start, buffer)


# --- whole shards --------------------------------------------------------------------------------


def pull(
    endpoint: Endpoint,
    manifest: Manifest,
    digest: Digest,
    deliver: Deliver,
    *,
    chunks: Iterable[int] | None = None,
    into: Into | None = None,
    hasher: Callable[[], Hasher] | None = None,
    threads: int = THREADS,
    timeout: float = TIMEOUT_SECONDS,
    deadline: float | None = None,
    cancel: threading.Event | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Pull chunks of a sealed shard in parallel; each is verified, then delivered once.

    `deliver(index, bytes)` is called from several threads at once, in no order; the view is valid
    only inside the call. `into(index)` gives the memory that the chunk is read straight into, in
    pieces that have the chunk's length together (what is delivered is empty where they are more
    than one); without it each thread has one page-aligned buffer that it uses again. `hasher`
    makes a digest that takes the bytes as they come; needed with `into`, else `digest` will do.
    `chunks`: default all. `timeout`: of each connect and read; `deadline`: seconds for the whole.

    Raises FileNotFoundError (proven gone), DigestMismatch or CorruptData (proven bad), Unreachable
    (proves nothing), Cancelled, or what `deliver` raised. The first failure ends all threads.
    """
    if manifest.digests is None:
        raise ValueError(f"{endpoint.name}: the manifest is not sealed, nothing can be verified")
    if into is not None and hasher is None:
        raise ValueError("what is read into pieces can be verified by a hasher only")
    wanted = range(manifest.num_chunks) if chunks is None else sorted(set(chunks))
    spans = deque(_spans(wanted, manifest.chunk_size, threads))
    if not spans:
        return
    job = _Pull(endpoint, manifest, digest, deliver, into, hasher, timeout, spans)
    workers = min(threads, len(spans))
    job.crew.run(job.work, workers, cancel=cancel, deadline=deadline, clock=clock)


def _spans(chunks: Iterable[int], chunk_size: int, threads: int) -> Iterator[range]:
    """Runs of neighbouring chunks: long enough to save requests, many enough for all threads."""
    chunks = list(chunks)
    most = max(1, min(SPAN_BYTES // chunk_size, -(-len(chunks) // (2 * threads))))
    first = last = -2
    for chunk in chunks:
        if chunk == last + 1 and last + 1 - first < most:
            last = chunk
            continue
        if first >= 0:
            yield range(first, last + 1)
        first = last = chunk
    if first >= 0:
        yield range(first, last + 1)


class _Pull:
    """One `pull`: what its threads share."""

    def __init__(
        self,
        endpoint: Endpoint,
        manifest: Manifest,
        digest: Digest,
        deliver: Deliver,
        into: Into | None,
        hasher: Callable[[], Hasher] | None,
        timeout: float,
        spans: deque[range],
    ) -> None:
        self._endpoint = endpoint
        self._manifest = manifest
        self._digest = digest
        self._deliver = deliver
        self._into = into
        self._hasher = hasher
        self._timeout = timeout
        self._spans = spans
        self._lock = threading.Lock()
        self.crew = Crew(endpoint.name)

    def work(self) -> None:
        """What each thread does."""
        buffer = _page_aligned(self._buffer_bytes())
        with (
            Connection(self._endpoint, self._timeout) as connection,
            self.crew.interruptible(connection),
        ):
            while not self.crew.stopped.is_set():
                span = self._next_span()
                if span is None:
                    return
                self._pull_span(connection, span, buffer)

    def _buffer_bytes(self) -> int:
        if self._into is not None:
            return 0
        return min(self._manifest.chunk_size, self._manifest.size)

    def _next_span(self) -> range | None:
        with self._lock:
            return self._spans.popleft() if self._spans else None

    def _pull_span(self, connection: Connection, span: range, buffer: memoryview) -> None:
        start, stop = self._manifest.chunk(span[0])[0], self._manifest.chunk(span[-1])[1]
        stream = _Stream(connection, start, stop, self._manifest.size, self.crew.stopped)
        for index in span:
            first, last = self._manifest.chunk(index)
            views = (buffer[: last - first],) if self._into is None else self._into(index)
            hasher = None if self._hasher is None else self._hasher()
            for view in views:
                stream.fill(view, hasher)
            whole = views[0] if len(views) == 1 else memoryview(b"")
            self._verify(index, self._digest(whole) if hasher is None else hasher.hexdigest())
            self._deliver(index, whole)

    def _verify(self, index: int, got: str) -> None:
        assert self._manifest.digests is not None
        expected = self._manifest.digests[index]
        if got != expected:
            raise DigestMismatch(
                f"chunk {index} of {self._endpoint.name}: its digest is {got}, its manifest says "
                f"{expected}; this copy is bad, another source is needed"
            )


def _page_aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size)) if size else memoryview(b"")
