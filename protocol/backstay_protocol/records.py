"""What is remembered of attempts: the record of one that began, and a sidecar's promise.

`attempt.json` holds both, on the disk and in the memory volume. It is preallocated and written in
two halves by turns, each with its digest, so neither a full disk nor a crash in the middle of a
write loses the older half.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass

from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.files import open_shared
from backstay_protocol.ids import CheckpointId

HALF_BYTES = 64 << 10
_HEADER = 80  # sequence (20 digits), length (12 digits), 40 hex digits of digest, padding, newline


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Contents that a person gave an attempt, in place of its own run's history."""

    run: str = ""
    """`<namespace>/<run name>` of the run whose checkpoint it is; empty: from nothing, by hand."""
    checkpoint: CheckpointId | None = None
    """Of that other run. Its attempt number means nothing in this one: never compare the two."""

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "nothing (a fresh start, chosen by hand)"
        return f"step {self.checkpoint.step} of attempt {self.checkpoint.attempt} of run {self.run}"


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """An attempt that has chosen its base. Written when all ranks have verified their load."""

    attempt: int
    base: CheckpointId | None
    """None: it started from nothing."""
    chain: tuple[tuple[int, int], ...] = ()
    """Lineage, nearest first: (older attempt, step at which the chain leaves it)."""
    deaths: int = 0
    """Attempts that got their go-ahead from this same base and died without a newer complete
    checkpoint, before this one."""
    restarts: int = 0
    """Attempts in a row, this one not counted, that made no newer complete checkpoint; the restart
    budget is charged with it."""
    world_size: int = 0
    replicas: int = 0
    choice: str = ""
    """Token of the manual choice (`restore:` in the job) that has been applied so far."""
    ran: bool = False
    """Whether the go-ahead was given (set by a second store)."""
    origin: Origin | None = None
    """Given contents that the attempt, or one before it without a base of its own, started from;
    `base` is then None and `chain` empty. The next attempt needs it while nothing is whole."""
    every_steps: int = 0
    """Capture interval from the attempt's first step on; 0: as the topology says."""


@dataclass(frozen=True, kw_only=True)
class AttemptState:
    """Content of attempt.json. Written and read by the sidecar only."""

    promised: int = 0
    """Greatest number promised: smaller ones are refused, and equal ones of another round."""
    round: str = ""
    """Nonce of the round that the promise was given to."""
    record: AttemptRecord | None = None
    in_line: int = 0
    """Generation of the pod that is in line on this disk (rule `known`); 0: none."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`attempts/<A>.json` in the remote tier: the number is taken."""

    attempt: int
    round: str
    owner: str
    """`<cluster>/<job uid>` whose world took it."""
    created: float


@dataclass(frozen=True, kw_only=True)
class CommitShard:
    """One shard in a commit record."""

    rank: int
    size: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """`commit.json`: the checkpoint is durable. Written last."""

    checkpoint: CheckpointId
    world_size: int
    plan: str
    chunk_size: int
    chain: tuple[tuple[int, int], ...]
    shards: tuple[CommitShard, ...]
    created: float


@dataclass(frozen=True, kw_only=True)
class Intent:
    """`deletions/<step>-<attempt>`: a leader means to delete the checkpoint."""

    checkpoint: CheckpointId
    by_attempt: int
    created: float


class AttemptFile:
    """One attempt.json on one volume. Used by the sidecar only."""

    def __init__(self, path: str) -> None:
        """`path`: the file; its folder must exist when `prepare` is called."""
        self.path = path
        self._sequence = 0

    def prepare(self) -> None:
        """Reserve the bytes of both halves. Raises OSError (disk full, read-only)."""
        descriptor = open_shared(self.path, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, 2 * HALF_BYTES)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> AttemptState | None:
        """The newest whole half, or None where there never was one. Raises OSError."""
        try:
            with open(self.path, "rb") as file:
                halves = [_decode(file.read(HALF_BYTES)), _decode(file.read(HALF_BYTES))]
        except FileNotFoundError:
            return None
        whole = [half for half in halves if half is not None]
        if not whole:
            return None
        self._sequence, state = max(whole, key=lambda half: half[0])
        return state

    def write(self, state: AttemptState) -> None:
        """Store durably over the older half. Raises OSError; the newer half is then untouched."""
        self.read()
        sequence = self._sequence + 1
        block = _encode(sequence, state)
        descriptor = open_shared(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, block, (sequence % 2) * HALF_BYTES)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._sequence = sequence


def _encode(sequence: int, state: AttemptState) -> bytes:
    body = codec.dumps(state)
    digest = hashlib.blake2b(body + str(sequence).encode(), digest_size=20).hexdigest()
    header = f"{sequence:020d} {len(body):012d} {digest}".ljust(_HEADER - 1) + "\n"
    block = header.encode() + body
    if len(block) > HALF_BYTES:
        raise OSError(f"attempt record of {len(block)} bytes; at most {HALF_BYTES} fit")
    return block.ljust(HALF_BYTES, b"\0")


def _decode(block: bytes) -> tuple[int, AttemptState] | None:
    try:
        sequence, length, digest = block[:_HEADER].decode().split()
        body = block[_HEADER : _HEADER + int(length)]
        expected = hashlib.blake2b(body + str(int(sequence)).encode(), digest_size=20).hexdigest()
        if digest != expected:
            return None
        return int(sequence), codec.from_plain(AttemptState, json.loads(body))
    except (ValueError, ProtocolError):
        return None
