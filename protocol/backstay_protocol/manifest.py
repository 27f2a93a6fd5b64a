"""The manifest: JSON beside a shard that says what the shard is. Without it the shard is not there.

The trainer writes it unsealed (no digests) by rename when the capture is whole; the sidecar seals
it with one xxh3-128 digest per chunk, taken in the pass in which it first reads the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from backstay_protocol import codec
from backstay_protocol.errors import CorruptData, ProtocolError, VersionMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.names import DEFAULT_CHUNK_BYTES, PROTOCOL_VERSION, can_read

SCHEDULE = "schedule"  # why a shard was captured: decides which tiers want it
FORCED = "forced"  # save(), an order or the end of the job: every tier wants it


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one shard file is. Written by the trainer, sealed by the sidecar, read by everybody."""

    run: str
    """`<namespace>/<run name>`."""
    step: int
    attempt: int
    rank: int
    world_size: int
    replica: int
    plan: str
    """Id of the save plan that all shards of a checkpoint must share, or `local`."""
    size: int
    """Bytes of the shard file (a slot may be longer)."""
    created: float
    """Seconds since the epoch at which the capture was whole."""
    chain: tuple[tuple[int, int], ...] = ()
    """Lineage of `attempt`, nearest first: (older attempt, step at which the chain leaves it)."""
    chunk_size: int = DEFAULT_CHUNK_BYTES
    reason: str = SCHEDULE
    metadata: dict[str, Any] = field(default_factory=dict)
    """The user's own JSON."""
    digests: tuple[str, ...] | None = None
    """One xxh3-128 hex digest per chunk; None while unsealed."""
    fingerprint: str = ""
    """xxh3-128 over the concatenated binary digests; equal fingerprints mean equal bytes."""
    format: str = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        if self.size <= 0 or self.chunk_size <= 0:
            raise ValueError(f"size {self.size} and chunk size {self.chunk_size} must be positive")
        if min(self.step, self.attempt, self.rank) < 0 or self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} at step {self.step}")
        if self.digests is not None and len(self.digests) != self.num_chunks:
            raise ValueError(f"{len(self.digests)} digests for {self.num_chunks} chunks")
        if self.digests is not None and not self.fingerprint:
            raise ValueError("sealed without a fingerprint")

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint that this shard belongs to."""
        return CheckpointId(self.step, self.attempt)

    @property
    def num_chunks(self) -> int:
        """Chunks of the file; the last one may be short."""
        return -(-self.size // self.chunk_size)

    @property
    def sealed(self) -> bool:
        """Whether the digests are known."""
        return self.digests is not None

    def chunk(self, index: int) -> tuple[int, int]:
        """Byte range [start, stop) of one chunk."""
        start = index * self.chunk_size
        return start, min(start + self.chunk_size, self.size)

    def seal(self, digests: tuple[str, ...], fingerprint: str) -> Manifest:
        """The same manifest with its digests."""
        return replace(self, digests=digests, fingerprint=fingerprint)

    def to_json(self) -> bytes:
        """As written beside the shard."""
        return codec.dumps(self)


def read_manifest(data: bytes | str, where: str) -> Manifest:
    """Parse a manifest; `where` names the file or URL in errors.

    Raises CorruptData if it is not a manifest, VersionMismatch if it is of an unknown format.
    """
    try:
        manifest = codec.loads(Manifest, data)
    except ProtocolError as error:
        raise CorruptData(f"{where}: not a manifest: {error}") from error
    if not can_read(manifest.format):
        raise VersionMismatch(
            f"{where}: manifest format {manifest.format}, this program reads {PROTOCOL_VERSION}; "
            "use the Backstay that wrote it, or a newer one"
        )
    return manifest
