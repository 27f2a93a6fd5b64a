"""What a new attempt starts from: the leader's decision as a pure function. Used by rounds.py.

`choose` sees one frozen view of the world (records, copies, what the remote tier listed) and
answers with a base, a fresh start or a refusal, each with its reason in a sentence. Rules that it
carries (PROTOCOL.md): claimed, freshlist, lastresort, tries, onlyran, manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from backstay_protocol.history import Chain
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CopySource, ShardCopy, ShardPlan
from backstay_protocol.records import AttemptRecord
from backstay_protocol.topology import ManualChoice

Strike = tuple[CheckpointId, int, str, int]
"""A copy that was proven bad: (checkpoint, shard's rank, tier, holder)."""


@dataclass(frozen=True, kw_only=True)
class RestoreView:
    """All that is known when an attempt chooses its base. Built by rounds.py, or by the command."""

    attempt: int
    """Number of the attempt that is about to begin."""
    world_size: int
    replicas: int = 0
    records: tuple[AttemptRecord, ...] = ()
    """What the members have stored, one each (their `ran` is believed)."""
    bases: tuple[AttemptRecord, ...] = ()
    """Base records that the remote tier listed (written before the go-ahead: `ran` is never set)."""
    copies: tuple[ShardCopy, ...] = ()
    """Every copy in sight, remote ones too."""
    chains: Mapping[int, Chain] = field(default_factory=dict)
    """Attempt -> chain, from the manifests in sight."""
    remote_configured: bool = False
    claimed: bool = False
    """This attempt's claim stands in the remote tier."""
    listed: bool = False
    """The remote tier was listed after the claim."""
    intents: frozenset[CheckpointId] = frozenset()
    """Checkpoints that a leader means to delete from the remote tier."""
    struck: frozenset[Strike] = frozenset()
    manual: ManualChoice | None = None
    quarantine_after: int = 3


@dataclass(frozen=True, kw_only=True)
class Base:
    """Start from this checkpoint."""

    checkpoint: CheckpointId
    chain: Chain
    """Of the new attempt."""
    plan: str
    saved_world_size: int
    shards: tuple[ShardPlan, ...]
    deaths: int
    """Goes into the record: attempts that ran from this base and died, before this one."""
    restarts: int
    """Goes into the record: attempts in a row without a newer complete checkpoint."""
    choice: str
    """Goes into the record: token of the manual choice applied so far."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Start from nothing, at step 0."""

    restarts: int
    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """There is something, and none of it can be restored: never a silent fresh start."""

    reason: str
    findings: tuple[str, ...] = ()
    """One sentence per existing checkpoint: what is wrong with it, or how to choose it by hand."""


def choose(view: RestoreView) -> Base | Fresh | Refuse:
    """The newest checkpoint on the lineage of the greatest attempt in sight that is whole."""
    raise NotImplementedError


def nearest(
    sources: Iterable[CopySource],
    reader_replica: int,
    unreachable: Collection[CopySource] = (),
) -> tuple[CopySource, ...]:
    """The sources of one shard in the order in which a reader on `reader_replica` tries them.

    Own memory, own local, held here for others, others' memory, others' local, held by others,
    remote; what this reader could not reach comes last, in the same order.
    """
    raise NotImplementedError
