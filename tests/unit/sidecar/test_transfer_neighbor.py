"""What the neighbor tier makes of a neighbour's answers. Real HTTP, scripted answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from backstay_protocol import codec
from backstay_protocol.errors import BackstayError, Cancelled, DigestMismatch, Refused, Unreachable
from backstay_protocol.messages import ErrorBody, ErrorReply, ReplicaOffer, ReplicaReply
from backstay_protocol.names import URL_REPLICAS
from backstay_sidecar.tiers.base import TierFull, Unfit
from backstay_sidecar.tiers.neighbor import Neighbor, NeighborTier
from support.byte_shards import byte_shard


class Scripted:
    """Answers offers from a list; the last answer is repeated."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, object]] = []
        self.offers: list[ReplicaOffer] = []
        self.tokens: list[str | None] = []
        self.address = ""

    def say(self, status: str, why: str = "") -> None:
        self.replies.append((200, ReplicaReply(status=status, why=why)))


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == URL_REPLICAS
            body = self.rfile.read(int(self.headers["Content-Length"]))
            script.offers.append(codec.loads(ReplicaOffer, body))
            script.tokens.append(self.headers["Authorization"])
            status, reply = script.replies.pop(0) if script.replies[1:] else script.replies[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(reply if isinstance(reply, bytes) else codec.dumps(reply))

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    script.address = f"127.0.0.1:{server.server_port}"
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


def tier_of(*neighbors: Neighbor | None) -> NeighborTier:
    """A tier whose neighbour is the first, then the next, ... the last one stays."""
    left = list(neighbors)
    return NeighborTier(
        replica=0,
        address="10.0.0.1:7070",
        neighbor=lambda: left.pop(0) if left[1:] else left[0],
        attempt=lambda: 3_000_002,
        headers={"Authorization": "Bearer job"},
    )


def test_an_offer_says_all_that_the_neighbour_must_know(scripted: Scripted) -> None:
    scripted.say("complete")
    reader = byte_shard()
    assert tier_of(Neighbor(1, scripted.address)).put(reader, threading.Event()) == reader.manifest
    (offer,) = scripted.offers
    assert (offer.checkpoint, offer.rank, offer.owner) == (reader.checkpoint, 0, 0)
    assert (offer.address, offer.attempt) == ("10.0.0.1:7070", 3_000_002)
    assert offer.manifest == codec.to_plain(reader.manifest)
    assert scripted.tokens == ["Bearer job"]
    assert reader.reads == 0


def test_an_offer_is_repeated_until_the_copy_is_complete(scripted: Scripted) -> None:
    for status in ("pulling", "pulling", "complete"):
        scripted.say(status)
    tier = tier_of(Neighbor(1, scripted.address))
    tier.put(byte_shard(), threading.Event())
    assert len(scripted.offers) == 3
    assert [(copy.tier, copy.holder) for copy in tier.inventory()] == [("neighbor", 1)]


REFUSALS = [
    ("TierFull: no room", TierFull),
    ("FileNotFoundError: not there (404)", FileNotFoundError),
    ("Unfit: another copy of it is here already", Unfit),
    ("Unreachable: connection refused", Unreachable),
    ("the offer is of attempt 1; 2 is promised here", Unreachable),
    ("DigestMismatch: chunk 3 of http://x", Unreachable),
]


@pytest.mark.parametrize(("why", "kind"), REFUSALS, ids=[k for k, _ in REFUSALS])
def test_a_refusal_is_raised_as_what_it_means_here(
    scripted: Scripted, why: str, kind: type[Exception]
) -> None:
    scripted.say("refused", why)
    tier = tier_of(Neighbor(1, scripted.address))
    with pytest.raises(kind) as caught:
        tier.put(byte_shard(), threading.Event())
    assert why in str(caught.value)
    assert list(tier.inventory()) == []


def test_bad_bytes_are_blamed_on_the_source_only_when_it_is_read_and_bad(
    scripted: Scripted,
) -> None:
    scripted.say("refused", "DigestMismatch: chunk 3 of http://x")
    reader = byte_shard()
    reader.data[0] ^= 1
    with pytest.raises(DigestMismatch, match="chunk 0 of rank 0"):
        tier_of(Neighbor(1, scripted.address)).put(reader, threading.Event())


ANSWERS: list[tuple[int, object, type[BackstayError], str]] = [
    (
        401,
        ErrorReply(error=ErrorBody(code="Unauthorized", message="no token", hint="send it")),
        Refused,
        "no token (send it)",
    ),
    (503, ErrorReply(error=ErrorBody(code="Busy", message="later")), Unreachable, "later"),
    (502, b"<html>", Unreachable, "answered 502"),
]


@pytest.mark.parametrize(("status", "reply", "kind", "words"), ANSWERS, ids=["401", "503", "502"])
def test_an_error_of_the_wire_is_told_with_the_neighbours_words(
    scripted: Scripted, status: int, reply: object, kind: type[BackstayError], words: str
) -> None:
    scripted.replies.append((status, reply))
    with pytest.raises(kind) as caught:
        tier_of(Neighbor(1, scripted.address)).put(byte_shard(), threading.Event())
    assert words in str(caught.value)


def test_without_a_neighbour_nothing_is_offered() -> None:
    with pytest.raises(Unreachable, match="not named a neighbour"):
        tier_of(None).put(byte_shard(), threading.Event())


def test_a_neighbour_that_is_gone_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="refused"):
        tier_of(Neighbor(1, "127.0.0.1:1")).put(byte_shard(), threading.Event())


def test_a_new_neighbour_is_offered_what_the_old_one_had_begun(scripted: Scripted) -> None:
    scripted.say("pulling")
    scripted.say("complete")
    tier = tier_of(Neighbor(1, scripted.address), Neighbor(2, scripted.address))
    tier.put(byte_shard(), threading.Event())
    assert [copy.holder for copy in tier.inventory()] == [2]


def test_waiting_for_a_slow_neighbour_is_cancelled(scripted: Scripted) -> None:
    scripted.say("pulling")
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(Cancelled):
        tier_of(Neighbor(1, scripted.address)).put(byte_shard(), cancel)


def test_what_is_not_sealed_is_read_once_for_its_digests(scripted: Scripted) -> None:
    scripted.say("complete")
    reader = byte_shard(sealed=False)
    sealed = tier_of(Neighbor(1, scripted.address)).put(reader, threading.Event())
    assert sealed == byte_shard().manifest
    assert reader.reads == sealed.num_chunks
