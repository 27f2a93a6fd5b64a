"""HTTP between sidecars: every failure is Unreachable or Refused, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from backstay_protocol import codec
from backstay_protocol.errors import Refused, Unreachable
from backstay_protocol.messages import (
    ErrorBody,
    ErrorReply,
    PromiseReply,
    PromiseRequest,
    StoreReply,
    StoreRequest,
)
from backstay_protocol.names import HEADER_PROTOCOL, PROTOCOL_VERSION, URL_PROMISE
from backstay_protocol.records import AttemptRecord
from backstay_sidecar.restore.peers import HttpPeers
from support.restore_fakes import topology

PROMISE = PromiseRequest(round="r", attempt=1, members={0: 0, 1: 0})


class Answering:
    """A server that answers everything with one status and body, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append((self.path, dict(self.headers), body))
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Answering]:
    made = Answering()
    yield made
    made.close()


def peers_at(address: str) -> HttpPeers:
    return HttpPeers(topology(2, addresses={0: "127.0.0.1:1", 1: address}), "a-token")


async def test_a_message_carries_token_and_version_and_its_reply_comes_back(
    server: Answering,
) -> None:
    server.body = codec.dumps(PromiseReply(granted=True, known=7))
    peers = peers_at(server.address)
    reply = await peers.promise(1, PROMISE, 1.0)
    await peers.close()
    assert (reply.granted, reply.known) == (True, 7)
    path, headers, body = server.asked[0]
    assert path == URL_PROMISE
    lowered = {name.lower(): value for name, value in headers.items()}
    assert lowered["authorization"] == "Bearer a-token"
    assert lowered[HEADER_PROTOCOL.lower()] == PROTOCOL_VERSION
    assert codec.loads(PromiseRequest, body) == PROMISE


async def test_an_error_of_the_wire_shape_is_a_refusal(server: Answering) -> None:
    server.status = 409
    server.body = codec.dumps(ErrorReply(error=ErrorBody(code="NotLeader", message="not me")))
    peers = peers_at(server.address)
    with pytest.raises(Refused, match="not me") as caught:
        await peers.store(1, StoreRequest(round="r", record=AttemptRecord(attempt=1, base=None)), 1)
    await peers.close()
    assert (caught.value.status, caught.value.code) == (409, "NotLeader")


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (502, b"bad gateway")])
async def test_nonsense_proves_nothing(server: Answering, status: int, body: bytes) -> None:
    server.status, server.body = status, body
    peers = peers_at(server.address)
    with pytest.raises(Unreachable, match="replica 1 at http://"):
        await peers.promise(1, PROMISE, 1.0)
    await peers.close()


async def test_a_refused_connection_names_the_replica_and_its_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    peers = peers_at(address)
    with pytest.raises(Unreachable, match=f"replica 1 at http://{address}"):
        await peers.promise(1, PROMISE, 1.0)
    await peers.close()


async def test_a_replica_that_moved_is_asked_at_its_new_address(server: Answering) -> None:
    server.body = codec.dumps(StoreReply(stored=True))
    peers = peers_at("127.0.0.1:1")
    peers.moved(1, server.address)
    peers.moved(1, "")  # not known: the last one stays
    assert peers.url(1) == f"http://{server.address}"
    request = StoreRequest(round="r", record=AttemptRecord(attempt=1, base=None))
    assert (await peers.store(1, request, 1.0)).stored
    await peers.close()


async def test_the_leader_is_always_asked_by_the_topologys_name() -> None:
    """Its pod may be replaced: the old address would be kept for ever."""
    peers = HttpPeers(topology(2), "t")
    named = peers.url(0)
    peers.moved(0, "10.0.0.1:7070")
    assert peers.url(0) == named
    await peers.close()
