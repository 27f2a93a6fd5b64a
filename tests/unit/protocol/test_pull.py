"""The ranged pull client against a real server that misbehaves on demand."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.errors import Cancelled, CorruptData, DigestMismatch, Unreachable
from backstay_protocol.manifest import Manifest
from backstay_protocol.pull import (
    MAX_BREAKS,
    SPAN_BYTES,
    Connection,
    Endpoint,
    Hasher,
    RangeReader,
    _spans,
    exchange,
    get_bytes,
    pull,
    read_range,
)

CHUNK = 64 << 10


def digest(view: memoryview | bytes) -> str:
    return hashlib.blake2b(view, digest_size=16).hexdigest()


def hasher() -> Hasher:
    return hashlib.blake2b(digest_size=16)


def manifest_of(data: bytes, chunk: int = CHUNK) -> Manifest:
    return Manifest(
        run="team/run",
        step=1,
        attempt=1,
        rank=0,
        world_size=1,
        replica=0,
        plan="p",
        size=len(data),
        created=1.0,
        chunk_size=chunk,
        digests=tuple(digest(data[i : i + chunk]) for i in range(0, len(data), chunk)),
        fingerprint="f",
    )


class Served:
    """What the server serves, and how badly."""

    def __init__(self) -> None:
        self.data = random.Random(1).randbytes(20 * CHUNK + 777)
        self.ranges: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.status = 0
        self.body = b""
        self.total: int | None = None
        self.ignore_range = False
        self.chunked = False
        self.drop_after: Callable[[], int | None] = lambda: None
        self.hang = threading.Event()
        self.hang.set()

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.data)


def handler_of(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return ""

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            served.ranges.append(wanted)
            served.headers.append(dict(self.headers))
            served.hang.wait()
            if served.status:
                return self._whole(served.status, served.body)
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            if not match or served.ignore_range:
                return self._whole(200, served.data)
            start, stop = int(match[1]), min(int(match[2]) + 1, len(served.data))
            if start >= len(served.data):
                return self._whole(416, b"")
            total = len(served.data) if served.total is None else served.total
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
            self._body(served.data[start:stop])
            return None

        def do_PUT(self) -> None:
            self._whole(403, b"refused before it was read")
            self.close_connection = True

        def _whole(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self._body(body)

        def _body(self, body: bytes) -> None:
            limit = served.drop_after()
            if served.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for start in range(0, len(body), 5000):
                    piece = body[start : start + 5000]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if limit is None else body[:limit])
            if limit is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    return Handler


class QuietServer(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, *_: object) -> None:
        """Clients of these tests go away in the middle."""


class UnixServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = False


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def endpoint(served: Served) -> Iterator[Endpoint]:
    server = QuietServer(("127.0.0.1", 0), handler_of(served))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Endpoint(f"http://127.0.0.1:{server.server_port}/shard?sig=secret", {"X-Token": "t"})
    served.hang.set()
    server.shutdown()
    thread.join()
    server.server_close()


def pull_whole(endpoint: Endpoint, manifest: Manifest, **options: object) -> bytes:
    got = bytearray(manifest.size)

    def deliver(index: int, view: memoryview) -> None:
        start, stop = manifest.chunk(index)
        got[start:stop] = view

    pull(endpoint, manifest, digest, deliver, **options)  # type: ignore[arg-type]
    return bytes(got)


# --- whole shards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_a_shard_arrives_whole_whatever_the_number_of_threads(
    endpoint: Endpoint, served: Served, threads: int
) -> None:
    assert pull_whole(endpoint, served.manifest, threads=threads) == served.data
    assert all(headers["X-Token"] == "t" for headers in served.headers)


def test_only_the_chunks_asked_for_are_pulled_each_once(endpoint: Endpoint, served: Served) -> None:
    got: list[int] = []
    pull(
        endpoint,
        served.manifest,
        digest,
        lambda index, _: got.append(index),
        chunks=[3, 1, 2, 9, 9, 20],
        threads=2,
    )
    assert sorted(got) == [1, 2, 3, 9, 20]


def test_neighbouring_chunks_share_a_request(endpoint: Endpoint, served: Served) -> None:
    pull_whole(endpoint, served.manifest, threads=1)
    assert len(served.ranges) < served.manifest.num_chunks


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_bytes_go_straight_into_the_callers_memory(
    endpoint: Endpoint, served: Served, num_pieces: int
) -> None:
    manifest, memory = served.manifest, bytearray(len(served.data))
    delivered: dict[int, int] = {}

    def into(index: int) -> list[memoryview]:
        start, stop = manifest.chunk(index)
        view = memoryview(memory)[start:stop]
        cuts = [len(view) * i // num_pieces for i in range(num_pieces + 1)]
        return [view[a:b] for a, b in pairwise(cuts)]

    def deliver(index: int, data: memoryview) -> None:
        delivered[index] = len(data)

    served.drop_after = lambda: 50_000
    pull(endpoint, manifest, digest, deliver, into=into, hasher=hasher)
    assert memory == served.data
    assert sorted(delivered) == list(range(manifest.num_chunks))
    assert any(delivered.values()) is (num_pieces == 1)


def test_a_bad_chunk_that_was_read_in_pieces_is_not_delivered(
    endpoint: Endpoint, served: Served
) -> None:
    manifest, memory = served.manifest, bytearray(len(served.data))
    served.data = bytes(len(served.data))

    def into(index: int) -> list[memoryview]:
        start, stop = manifest.chunk(index)
        return [memoryview(memory)[start : start + 7], memoryview(memory)[start + 7 : stop]]

    delivered: list[int] = []
    with pytest.raises(DigestMismatch, match="chunk 0"):
        pull(
            endpoint,
            manifest,
            digest,
            lambda index, _: delivered.append(index),
            into=into,
            hasher=hasher,
            threads=1,
        )
    assert delivered == []


def test_pieces_without_a_hasher_are_the_callers_mistake(
    endpoint: Endpoint, served: Served
) -> None:
    with pytest.raises(ValueError, match="hasher"):
        pull(endpoint, served.manifest, digest, lambda *_: None, into=lambda _: [])


def test_an_unsealed_manifest_is_the_callers_mistake(endpoint: Endpoint, served: Served) -> None:
    unsealed = replace(served.manifest, digests=None, fingerprint="")
    with pytest.raises(ValueError, match="not sealed"):
        pull(endpoint, unsealed, digest, lambda *_: None)


def test_nothing_to_pull_asks_nothing(endpoint: Endpoint, served: Served) -> None:
    pull(endpoint, served.manifest, digest, lambda *_: None, chunks=[])
    assert served.ranges == []


def test_chunked_answers_are_read_too(endpoint: Endpoint, served: Served) -> None:
    served.chunked = True
    assert pull_whole(endpoint, served.manifest) == served.data


def test_a_whole_answer_to_a_range_from_the_start_is_taken(
    endpoint: Endpoint, served: Served
) -> None:
    served.ignore_range = True
    buffer = bytearray(100)
    read_range(endpoint, 0, memoryview(buffer))
    assert buffer == served.data[:100]
    with pytest.raises(Unreachable, match="does not serve ranges"):
        read_range(endpoint, 100, memoryview(buffer))


# --- broken connections ---------------------------------------------------------------------------


def test_a_broken_connection_goes_on_at_the_byte_where_it_broke(
    endpoint: Endpoint, served: Served
) -> None:
    limits = iter([1000, 70_000])
    served.drop_after = lambda: next(limits, None)
    buffer = bytearray(200_000)
    read_range(endpoint, 5, memoryview(buffer))
    assert buffer == served.data[5:200_005]
    assert served.ranges == ["bytes=5-200004", "bytes=1005-200004", "bytes=71005-200004"]


def test_any_number_of_breaks_is_survived_as_long_as_bytes_arrive(
    endpoint: Endpoint, served: Served
) -> None:
    served.drop_after = lambda: 50_000
    assert pull_whole(endpoint, served.manifest, threads=3) == served.data
    assert len(served.ranges) > len(served.data) // 50_000


def test_breaks_without_a_byte_between_them_are_bounded(endpoint: Endpoint, served: Served) -> None:
    served.drop_after = lambda: 0
    with pytest.raises(Unreachable, match=rf"byte 7 of 17, {MAX_BREAKS} times in a row"):
        read_range(endpoint, 7, memoryview(bytearray(10)))
    assert len(served.ranges) == MAX_BREAKS


def test_a_server_that_fails_for_a_moment_is_asked_again(
    endpoint: Endpoint, served: Served
) -> None:
    served.status = 503

    def mend() -> None:
        while len(served.ranges) < 2:
            time.sleep(0.005)
        served.status = 0

    with ThreadPoolExecutor(1) as helper:
        helper.submit(mend)
        buffer = bytearray(10)
        read_range(endpoint, 0, memoryview(buffer))
    assert buffer == served.data[:10]


def test_nobody_there_is_unreachable_not_gone() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for where in (
        Endpoint(f"http://127.0.0.1:{port}/x"),
        Endpoint("http://agent/x", uds="/nonexistent/agent.sock"),
    ):
        with pytest.raises(Unreachable, match="refused"):
            read_range(where, 0, memoryview(bytearray(1)))
        with pytest.raises(Unreachable, match="refused"):
            get_bytes(where)


# --- what is proven -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 410])
def test_gone_is_proven_by_404_and_410(endpoint: Endpoint, served: Served, status: int) -> None:
    served.status = status
    with pytest.raises(FileNotFoundError, match=str(status)):
        pull_whole(endpoint, served.manifest)
    with pytest.raises(FileNotFoundError):
        get_bytes(endpoint)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b'{"error":{"code":"Unauthorized","message":"needs a token"}}', "needs a token"),
        (403, b"<Error><Code>ExpiredToken</Code><Message>too old</Message></Error>", "too old"),
        (500, b"", "answered 500"),
        (400, b"[]", "answered 400"),
    ],
)
def test_every_other_answer_proves_nothing_and_is_told(
    endpoint: Endpoint, served: Served, status: int, body: bytes, words: str
) -> None:
    served.status, served.body = status, body
    with pytest.raises(Unreachable, match=words) as caught:
        read_range(endpoint, 0, memoryview(bytearray(1)))
    assert "secret" not in str(caught.value)


def test_a_flipped_byte_is_named_with_its_chunk_and_its_source(
    endpoint: Endpoint, served: Served
) -> None:
    manifest = served.manifest
    bad = bytearray(served.data)
    bad[7 * CHUNK + 5] ^= 1
    served.data = bytes(bad)
    with pytest.raises(DigestMismatch, match=r"chunk 7 of http://127.0.0.1:\d+/shard:"):
        pull_whole(endpoint, manifest)


def test_a_bad_chunk_is_never_delivered(endpoint: Endpoint, served: Served) -> None:
    manifest = served.manifest
    served.data = bytes(len(served.data))
    delivered: list[int] = []
    with pytest.raises(DigestMismatch):
        pull(endpoint, manifest, digest, lambda index, _: delivered.append(index))
    assert delivered == []


def test_a_file_that_is_too_short_is_corrupt(endpoint: Endpoint, served: Served) -> None:
    manifest = served.manifest
    served.data = served.data[:-1]
    with pytest.raises(CorruptData, match="promised"):
        pull_whole(endpoint, manifest)
    with pytest.raises(CorruptData, match="ends before"):
        read_range(endpoint, len(served.data), memoryview(bytearray(1)))


def test_an_answer_for_another_range_is_not_taken(endpoint: Endpoint, served: Served) -> None:
    served.status = 206
    with pytest.raises(Unreachable, match="asked from byte 3"):
        read_range(endpoint, 3, memoryview(bytearray(4)))


# --- bounds ---------------------------------------------------------------------------------------


def test_a_silent_server_is_given_up_after_the_read_timeout(
    endpoint: Endpoint, served: Served
) -> None:
    served.hang.clear()
    with pytest.raises(Unreachable, match="no answer in time"):
        read_range(endpoint, 0, memoryview(bytearray(1)), timeout=0.05)
    with pytest.raises(Unreachable, match="no answer in time"):
        get_bytes(endpoint, timeout=0.05)


def test_the_deadline_ends_a_pull_that_hangs(endpoint: Endpoint, served: Served) -> None:
    served.hang.clear()
    with pytest.raises(Unreachable, match=r"not finished in 0\.2 s"):
        pull_whole(endpoint, served.manifest, deadline=0.2)


def test_cancel_ends_a_pull_that_hangs(endpoint: Endpoint, served: Served) -> None:
    served.hang.clear()
    cancel = threading.Event()

    def when_it_hangs() -> None:
        while not served.ranges:
            time.sleep(0.005)
        cancel.set()

    with ThreadPoolExecutor(1) as helper:
        helper.submit(when_it_hangs)
        with pytest.raises(Cancelled):
            pull_whole(endpoint, served.manifest, cancel=cancel)


def test_what_deliver_raises_ends_the_pull_and_leaves_no_thread(
    endpoint: Endpoint, served: Served
) -> None:
    def deliver(index: int, view: memoryview) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        pull(endpoint, served.manifest, digest, deliver)
    assert not [t for t in threading.enumerate() if t.name == "backstay-crew"]


# --- small things ---------------------------------------------------------------------------------


def test_one_kept_connection_serves_many_ranges(endpoint: Endpoint, served: Served) -> None:
    reader = RangeReader(endpoint)
    for start in (0, 5000, 17, len(served.data) - 3):
        buffer = bytearray(3)
        reader.read_into(start, memoryview(buffer))
        assert buffer == served.data[start : start + 3]
    reader.close()
    assert len(served.ranges) == 4


def test_a_unix_socket_serves_as_well(served: Served, tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    server = UnixServer(path, handler_of(served))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        assert pull_whole(Endpoint("http://agent/x", uds=path), served.manifest) == served.data
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_small_answers_are_bounded_and_never_cut(endpoint: Endpoint, served: Served) -> None:
    with pytest.raises(Unreachable, match="longer than 1000"):
        get_bytes(endpoint, limit=1000)
    served.drop_after = lambda: 1000
    with pytest.raises(Unreachable):
        get_bytes(endpoint)


def test_a_refusal_that_comes_before_the_body_was_read_is_seen(endpoint: Endpoint) -> None:
    with Connection(endpoint, 10) as connection:
        body = (memoryview(bytes(1 << 20)) for _ in range(64))
        headers = {"Content-Length": str(64 << 20)}
        response = connection.request("PUT", endpoint.target, headers, body)
        assert response.status == 403
    assert exchange(endpoint, "PUT", b"short")[0] == 403


def test_a_url_that_is_none_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match=r"expected http\(s\)"):
        get_bytes(Endpoint("ftp://x/y"))


@given(st.lists(st.integers(0, 200), max_size=60), st.integers(1, 8), st.integers(1, 300))
def test_spans_cover_each_chunk_once_in_bounded_runs(
    chunks: list[int], threads: int, chunk_megabytes: int
) -> None:
    wanted = sorted(set(chunks))
    spans = list(_spans(wanted, chunk_megabytes << 20, threads))
    assert [chunk for span in spans for chunk in span] == wanted
    assert all(
        len(span) == 1 or len(span) * (chunk_megabytes << 20) <= SPAN_BYTES for span in spans
    )
