"""The neighbor tier: another replica's disk. This side offers; the neighbour pulls and verifies.

Replication puts shards here, restore and people read copies back by ranged GETs. Which replica is
the neighbour is the leader's word and may change at any time. The receiving half is
`replication.keeper`; the bytes are served by this sidecar's own shard route while `put` waits.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.copies import copy_of
from backstay_protocol.errors import (
    Cancelled,
    CorruptData,
    DigestMismatch,
    ProtocolError,
    Refused,
    Unreachable,
)
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest, read_manifest
from backstay_protocol.messages import ErrorReply, ReplicaOffer, ReplicaReply, ShardCopy
from backstay_protocol.names import NEIGHBOR, URL_REPLICAS, URL_SHARD, URL_SHARD_MANIFEST
from backstay_protocol.pull import Endpoint, RangeReader, exchange, get_bytes
from backstay_sidecar.digest import fingerprint
from backstay_sidecar.tiers.base import ShardReader, TierFull, Unfit
from backstay_sidecar.tiers.onepass import one_pass

OFFER_SECONDS = 20.0  # for one answer to an offer
PULL_SECONDS = 1800.0  # an offer that is still being pulled then is given up
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
COMPLETE, PULLING = "complete", "pulling"


@dataclass(frozen=True)
class Neighbor:
    """Who keeps this replica's copies now."""

    replica: int
    address: str
    """`host:port` of its sidecar."""


class NeighborTier:
    """One per sidecar. Methods block; safe for several threads."""

    name = NEIGHBOR

    def __init__(
        self,
        *,
        replica: int,
        address: str,
        neighbor: Callable[[], Neighbor | None],
        attempt: Callable[[], int],
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`replica`, `address`: of this sidecar, which serves what it offers; `neighbor`: by the
        leader's newest word, None while there is none; `attempt`: under which offers are made;
        `headers`: the job's token; `tls`: where sidecars speak https.
        """
        self._replica = replica
        self._address = address
        self._neighbor = neighbor
        self._attempt = attempt
        self._headers = dict(headers)
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._confirmed: dict[tuple[CheckpointId, int], tuple[ShardCopy, Neighbor]] = {}

    # --- write ---------------------------------------------------------------------------------

    def put(self, shard: ShardReader, cancel: Event) -> Manifest:
        """Offer the shard until the neighbour has it whole and verified. See WritableTier.put.

        Raises Unreachable (no neighbour, no answer, or it can't take it now), TierFull, Unfit (it
        has other bytes under that name),
        FileNotFoundError (this sidecar no longer serves it), CorruptData (the source is bad),
        Cancelled.
        """
        sealed = _sealed(shard, cancel)
        begun, pause = self._clock.monotonic(), FIRST_PAUSE_SECONDS
        while not cancel.is_set():
            neighbor = self._required()
            reply = self._offer(neighbor, sealed)
            if reply.status == COMPLETE:
                self._confirm(sealed, neighbor)
                return sealed
            if reply.status != PULLING:
                self._refused(reply.why, neighbor, shard, cancel)
            if self._clock.monotonic() - begun > PULL_SECONDS:
                raise Unreachable(
                    f"replica {neighbor.replica} has pulled rank {sealed.rank} of "
                    f"{sealed.checkpoint} for {PULL_SECONDS:g} s and is not done"
                )
            cancel.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise Cancelled(f"offer of rank {sealed.rank} of {sealed.checkpoint}: told to stop")

    def _offer(self, neighbor: Neighbor, sealed: Manifest) -> ReplicaReply:
        offer = ReplicaOffer(
            checkpoint=sealed.checkpoint,
            rank=sealed.rank,
            owner=self._replica,
            address=self._address,
            attempt=self._attempt(),
            manifest=codec.to_plain(sealed),
        )
        endpoint = self._at(neighbor, URL_REPLICAS, {"Content-Type": "application/json"})
        status, answer = exchange(endpoint, "POST", codec.dumps(offer), timeout=OFFER_SECONDS)
        if status != 200:
            raise _as_refused(endpoint, status, answer)
        return codec.loads(ReplicaReply, answer)

    def _refused(self, why: str, neighbor: Neighbor, shard: ShardReader, cancel: Event) -> None:
        """The neighbour could not take it: raise what that means for this side.

        What it says of bad bytes proves nothing here (they may have gone bad on the way): only
        reading the source again does.
        """
        kind = why.partition(":")[0]
        if kind == "FileNotFoundError":
            raise FileNotFoundError(f"replica {neighbor.replica} was told here: {why}")
        if kind == "TierFull":
            raise TierFull(f"replica {neighbor.replica}: {why}")
        if kind == Unfit.__name__:
            raise Unfit(f"replica {neighbor.replica}: {why}")
        if kind in (DigestMismatch.__name__, CorruptData.__name__):
            one_pass(shard, None, cancel)
        raise Unreachable(f"replica {neighbor.replica} does not take the copy now: {why}")

    def _confirm(self, sealed: Manifest, neighbor: Neighbor) -> None:
        copy = copy_of(sealed, NEIGHBOR, neighbor.replica)
        with self._lock:
            self._confirmed[sealed.checkpoint, sealed.rank] = (copy, neighbor)

    # --- read ----------------------------------------------------------------------------------

    @contextmanager
    def open(self, checkpoint: CheckpointId, rank: int) -> Iterator[ShardReader]:
        """Read the neighbour's copy by ranged GETs.

        Raises FileNotFoundError if it does not have the shard whole, Unreachable, CorruptData.
        """
        holder = self._holder(checkpoint, rank)
        where = self._endpoint(holder, URL_SHARD_MANIFEST, checkpoint, rank)
        manifest = read_manifest(get_bytes(where), where.name)
        reader = _NeighborReader(
            manifest, RangeReader(self._endpoint(holder, URL_SHARD, checkpoint, rank))
        )
        with contextlib.closing(reader):
            yield reader

    def inventory(self) -> Iterator[ShardCopy]:
        """What neighbours have confirmed to this process. The holders' own inventories are the
        truth; after a restart the next offers fill this one again.
        """
        with self._lock:
            return iter([copy for copy, _ in self._confirmed.values()])

    # --- delete --------------------------------------------------------------------------------

    def delete(self, checkpoint: CheckpointId, rank: int) -> None:
        """Forget the copy. Its holder lets it go by itself, on the leader's word only: no sidecar
        may take a copy away from another one.
        """
        with self._lock:
            self._confirmed.pop((checkpoint, rank), None)

    # --- whom to ask ---------------------------------------------------------------------------

    def _required(self) -> Neighbor:
        neighbor = self._neighbor()
        if neighbor is None:
            raise Unreachable("the leader has not named a neighbour yet")
        return neighbor

    def _holder(self, checkpoint: CheckpointId, rank: int) -> Neighbor:
        with self._lock:
            confirmed = self._confirmed.get((checkpoint, rank))
        return confirmed[1] if confirmed is not None else self._required()

    def _endpoint(
        self, neighbor: Neighbor, path: str, checkpoint: CheckpointId, rank: int
    ) -> Endpoint:
        filled = path.format(checkpoint=checkpoint, rank=rank)
        return self._at(neighbor, f"{filled}?tier={NEIGHBOR}")

    def _at(
        self, neighbor: Neighbor, target: str, headers: Mapping[str, str] | None = None
    ) -> Endpoint:
        scheme = "http" if self._tls is None else "https"
        sent = {**self._headers, **(headers or {})}
        return Endpoint(f"{scheme}://{neighbor.address}{target}", sent, tls=self._tls)


class _NeighborReader:
    """A ShardReader over ranged GETs."""

    def __init__(self, manifest: Manifest, reader: RangeReader) -> None:
        self.manifest = manifest
        self._reader = reader

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`."""
        self._reader.read_into(offset, buffer)

    def fileno(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()


def _sealed(shard: ShardReader, cancel: Event) -> Manifest:
    """An offer carries digests: what is not sealed yet is read once for them."""
    if shard.manifest.sealed:
        return shard.manifest
    digests = one_pass(shard, None, cancel).digests
    return shard.manifest.seal(digests, fingerprint(digests))


def _as_refused(endpoint: Endpoint, status: int, body: bytes) -> Unreachable | Refused:
    """The neighbour's error in the one wire shape; 5xx: it may pass."""
    with contextlib.suppress(ProtocolError):
        error = codec.loads(ErrorReply, body).error
        if status < 500:
            return Refused(status, error.code, f"{endpoint.name}: {error.message}", error.hint)
        return Unreachable(f"{endpoint.name}: {error.message}")
    return Unreachable(f"{endpoint.name}: answered {status}")
