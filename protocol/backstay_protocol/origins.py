"""Contents that a person gives an attempt in place of its own history: another run's checkpoint.

Used by choice.py and rounds.py. Pure. Attempt numbers of two runs have nothing to do with each
other: what is seen of another run stays in its `OtherRun` and is never joined with the own copies,
chains or records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from backstay_protocol.completeness import CompleteCheckpoint, complete, incomplete
from backstay_protocol.history import Chain, Lineage, newest_lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ShardCopy
from backstay_protocol.records import AttemptRecord, Origin
from backstay_protocol.topology import ManualChoice

OriginStrike = tuple[str, CheckpointId, int]
"""A shard of another run that was proven bad or gone: (run, checkpoint, shard's rank)."""


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """What one listing of the remote tier showed of another run. Only read, never written."""

    run: str
    bases: tuple[AttemptRecord, ...] = ()
    copies: tuple[ShardCopy, ...] = ()
    chains: Mapping[int, Chain] = field(default_factory=dict)
    commits: frozenset[CheckpointId] = frozenset()
    intents: frozenset[CheckpointId] = frozenset()

    @property
    def lineage(self) -> Lineage | None:
        """Of its greatest attempt in sight."""
        told: dict[int, Chain] = {copy.checkpoint.attempt: () for copy in self.copies}
        return newest_lineage(self.bases, {**told, **self.chains})


def asks_by_hand(manual: ManualChoice | None, records: Iterable[AttemptRecord]) -> bool:
    """A person's choice applies once: until a record in sight carries its token."""
    return manual is not None and not any(manual.applied_by(record.choice) for record in records)


def origin_of(attempt: int, records: Iterable[AttemptRecord]) -> Origin | None:
    """What was given to the attempt, by any record of it: an older sidecar's lacks the field."""
    found = (r.origin for r in records if r.attempt == attempt and r.base is None)
    return next((origin for origin in found if origin is not None), None)


def run_to_list(manual: ManualChoice | None, records: Collection[AttemptRecord]) -> str:
    """The other run that the decision may need; empty: none."""
    if manual is not None and asks_by_hand(manual, records):
        return manual.run
    newest = max((record.attempt for record in records), default=0)
    origin = origin_of(newest, records)
    return origin.run if origin is not None else ""


@dataclass(frozen=True)
class Found:
    """A checkpoint of another run that can be read (`whole`), or why there is none."""

    whole: CompleteCheckpoint | None
    why: str


def find(other: OtherRun, step: int, attempt: int, struck: Collection[OriginStrike] = ()) -> Found:
    """The checkpoint of that run that is meant: -1, 0: the newest durable one on its lineage."""
    usable = [c for c in other.copies if (other.run, c.checkpoint, c.rank) not in struck]
    whole = complete(usable)
    lineage = other.lineage
    history = [c for c in whole if lineage is not None and lineage.contains(c)]
    if step < 0:
        durable = [c for c in history if c in other.commits]
        safe = [c for c in durable if c not in other.intents]
        if durable:
            return Found(whole[max(safe or durable)], "")
        return Found(None, _nothing_durable(other, whole))
    named = [c for c in (whole if attempt else history) if c.step == step]
    named = [c for c in named if not attempt or c.attempt == attempt]
    if named:
        return Found(whole[max(named)], "")
    return Found(None, _not_there(other, step, attempt, usable))


def _nothing_durable(other: OtherRun, whole: Collection[CheckpointId]) -> str:
    if not other.copies and not other.bases:
        return (
            f"run {other.run} has nothing in this bucket and prefix: see that namespace and "
            "runName are right, and that both jobs use one bucket and prefix"
        )
    return f"run {other.run} has no durable checkpoint on its lineage" + (
        f"; {len(whole)} others are whole: name one by its step and attempt" if whole else ""
    )


def _not_there(other: OtherRun, step: int, attempt: int, usable: list[ShardCopy]) -> str:
    of = f"step {step}" + (f" of attempt {attempt}" if attempt else " on the lineage")
    faults = incomplete(usable)
    parts = [fault for c, fault in faults.items() if c.step == step and attempt in (0, c.attempt)]
    there = f": {parts[0]}" if parts else ", or no longer (retention of that run may delete it)"
    return f"run {other.run} has no {of} that can be read{there}"
