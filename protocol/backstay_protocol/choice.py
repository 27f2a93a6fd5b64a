"""What a new attempt starts from: the leader's decision as a pure function. Used by rounds.py.

`choose` sees one frozen view of the world (records, copies, what the remote tier listed) and
answers with a base, a fresh start or a refusal, each with its reason in a sentence. Rules that it
carries (tests/support/protocol_rules.py): claimed, freshlist, lastresort, tries, onlyran, manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from backstay_protocol.completeness import CompleteCheckpoint, complete, incomplete
from backstay_protocol.history import (
    Chain,
    Lineage,
    chain_after,
    newest_lineage,
    newest_record,
)
from backstay_protocol.ids import CheckpointId, generation_of
from backstay_protocol.messages import CopySource, ShardCopy, ShardPlan
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE
from backstay_protocol.origins import (
    OriginStrike,
    OtherRun,
    asks_by_hand,
    find,
    origin_of,
)
from backstay_protocol.records import AttemptRecord, Origin
from backstay_protocol.topology import ManualChoice

Strike = tuple[CheckpointId, int, str, int]
"""A copy that was proven bad: (checkpoint, shard's rank, tier, holder)."""

_NEARNESS = (MEMORY, LOCAL, NEIGHBOR)


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
    """Base records that the remote tier listed; `ran` is never set there."""
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
    others: Mapping[str, OtherRun] = field(default_factory=dict)
    """Other runs that were listed after the claim, by name."""
    struck_origins: frozenset[OriginStrike] = frozenset()
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
    origin: Origin | None = None
    """Goes into the record: a person asked for it, whatever there is."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Start from another run's checkpoint: a fresh start with given contents."""

    origin: Origin
    checkpoint: CheckpointId
    """Of the other run; for loading only, never for the record's base."""
    plan: str
    saved_world_size: int
    shards: tuple[ShardPlan, ...]
    restarts: int
    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """There is something, and none of it can be restored: never a silent fresh start."""

    reason: str
    findings: tuple[str, ...] = ()
    """One sentence per existing checkpoint: what is wrong with it, or how to choose it by hand."""


Chosen = Base | Fresh | Given


def choose(view: RestoreView) -> Chosen | Refuse:
    """The newest checkpoint on the lineage of the greatest attempt in sight that is whole.

    While there is none, an attempt that was given its contents by hand is given them again.
    """
    head = head_of(view)
    if _asks_by_hand(view):
        return _by_hand(view, head)
    if head is not None:
        for candidates, remark in _preferences(view, head):
            if candidates:
                return _base(view, head, candidates[max(candidates)], remark)
        origin = origin_of(head.attempt, records_of(view))
        if origin is not None:
            return _given_again(view, head, origin)
    return _from_nothing(view, head)


def nearest(
    sources: Iterable[CopySource],
    reader_replica: int,
    unreachable: Collection[CopySource] = (),
) -> tuple[CopySource, ...]:
    """The sources of one shard in the order in which a reader on `reader_replica` tries them.

    Own memory, own local, held here for others, others' memory, others' local, held by others,
    remote; what this reader could not reach comes last, in the same order. Readers start at
    different holders, so that a world that reloads does not fall on one.
    """

    def distance(source: CopySource) -> tuple[bool, bool, bool, int, bool, int]:
        away = source.holder != reader_replica
        remote = source.tier == REMOTE
        tier = 0 if remote else _NEARNESS.index(source.tier)
        passed = source.holder < reader_replica
        return source in unreachable, remote, away, tier, passed, source.holder

    return tuple(sorted(sources, key=distance))


# --- what is in sight -----------------------------------------------------------------------------


def records_of(view: RestoreView) -> tuple[AttemptRecord, ...]:
    """Those that count: the remote tier's only after a claim and a look."""
    return view.records + (view.bases if _remote_counts(view) else ())


def _remote_counts(view: RestoreView) -> bool:
    """Rules `claimed` and `known`: without a claim, and a look after it, remote is no source."""
    return view.claimed and view.listed


def head_of(view: RestoreView) -> Lineage | None:
    """Whose lineage rules: records and manifests tell alike of attempts (rule `manifest`)."""
    told: dict[int, Chain] = {copy.attempt: () for copy in (c.checkpoint for c in view.copies)}
    told.update(view.chains)
    return newest_lineage(records_of(view), told)


def usable(view: RestoreView, *, under_intent: bool) -> list[ShardCopy]:
    """Copies that count: not proven bad, remote ones by the rules `claimed` and `intent`."""
    return [
        copy
        for copy in view.copies
        if (copy.checkpoint, copy.rank, copy.tier, copy.holder) not in view.struck
        and (
            copy.tier != REMOTE
            or (_remote_counts(view) and (under_intent or copy.checkpoint not in view.intents))
        )
    ]


def _ran(view: RestoreView, attempt: int) -> bool:
    """Rule `onlyran`: the go-ahead was stored by every member whose record can be read."""
    told = [record.ran for record in view.records if record.attempt == attempt]
    return bool(told) and all(told)


def _newest(view: RestoreView, head: Lineage | None) -> AttemptRecord | None:
    """The record of the head, where one can be read (it may be known by manifests alone)."""
    record = newest_record(records_of(view))
    if record is None or head is None or record.attempt != head.attempt:
        return None
    return record


def _deaths(view: RestoreView, head: Lineage | None, base: CheckpointId | None) -> int:
    """Rule `tries`: attempts that ran from `base` and died; the count is in the record."""
    record = _newest(view, head)
    if record is None or record.base != base:
        return 0
    return record.deaths + _ran(view, record.attempt)


def _restarts(view: RestoreView, head: Lineage | None, base: CheckpointId | None) -> int:
    record = _newest(view, head)
    if record is None or (base is not None and (record.base is None or base > record.base)):
        return 0
    if generation_of(view.attempt) > generation_of(record.attempt):
        return record.restarts  # a pod was replaced: its node's or the cluster's fault
    return record.restarts + _ran(view, record.attempt)


def _applied(view: RestoreView) -> str:
    record = newest_record(records_of(view))
    return record.choice if record else ""


# --- choosing -------------------------------------------------------------------------------------

_Candidates = dict[CheckpointId, CompleteCheckpoint]


def _preferences(view: RestoreView, head: Lineage) -> Iterable[tuple[_Candidates, str]]:
    """Sets of candidates, best first. Rule `lastresort`: intents and quarantine only order them."""
    sick = quarantined(view, head)
    safe = _on_lineage(head, usable(view, under_intent=False))
    doomed = "; its remote copies are about to be deleted, but nothing else is left"
    again = f"; {_deaths(view, head, sick)} attempts died from it, but nothing else is left"
    yield _without(safe, sick), _past(sick, safe)
    yield safe, again
    everything = _on_lineage(head, usable(view, under_intent=True))
    yield _without(everything, sick), doomed
    yield everything, doomed + again


def _on_lineage(head: Lineage, copies: list[ShardCopy]) -> _Candidates:
    return complete(copy for copy in copies if head.contains(copy.checkpoint))


def quarantined(view: RestoreView, head: Lineage) -> CheckpointId | None:
    """The base from which too many attempts that got their go-ahead have died."""
    record = _newest(view, head)
    if record is None or record.base is None or view.quarantine_after <= 0:
        return None
    sick = _deaths(view, head, record.base) >= view.quarantine_after
    return record.base if sick else None


def _without(candidates: _Candidates, sick: CheckpointId | None) -> _Candidates:
    return {name: found for name, found in candidates.items() if name != sick}


def _past(sick: CheckpointId | None, safe: _Candidates) -> str:
    return f"; {sick} is quarantined" if sick in safe else ""


def _base(view: RestoreView, head: Lineage, found: CompleteCheckpoint, remark: str) -> Base:
    checkpoint = found.checkpoint
    reason = (
        f"{checkpoint.step} of attempt {checkpoint.attempt} is the newest checkpoint on the "
        f"lineage of attempt {head.attempt} for whose every shard there is a source"
    )
    if found.world_size != view.world_size:
        remark += f"; saved by {found.world_size} ranks, read by {view.world_size}"
    return Base(
        checkpoint=checkpoint,
        chain=chain_after(head, checkpoint, view.chains),
        plan=found.plan,
        saved_world_size=found.world_size,
        shards=found.shards,
        deaths=_deaths(view, head, checkpoint),
        restarts=_restarts(view, head, checkpoint),
        choice=_applied(view),
        reason=f"step {reason}{remark}",
    )


def _from_nothing(view: RestoreView, head: Lineage | None) -> Fresh | Refuse:
    """Rule `freshlist`, and: what exists and can't be restored is an error, not a fresh start."""
    if view.copies:
        return Refuse(
            reason="no checkpoint in sight can be restored", findings=_findings(view, head)
        )
    begun = newest_record(record for record in records_of(view) if record.base is not None)
    if begun is not None:
        return Refuse(
            reason=f"attempt {begun.attempt} started from {begun.base}, and no shard of any "
            "checkpoint is in sight; to start from nothing give the job another runName"
        )
    if _may_hide_some(view):
        return Refuse(
            reason="no checkpoint is in sight here and the remote tier could not be listed; "
            "it may hold some"
        )
    where = (
        "the remote tier was listed and is empty" if view.remote_configured else "no remote tier"
    )
    return Fresh(
        restarts=_restarts(view, head, None),
        choice=_applied(view),
        reason=f"there is no checkpoint anywhere in sight ({where}): starting from nothing",
    )


def _may_hide_some(view: RestoreView) -> bool:
    """Rule `freshlist`: a remote tier that was not listed may hold what is not in sight here."""
    return view.remote_configured and not _remote_counts(view)


# --- by hand --------------------------------------------------------------------------------------


def _asks_by_hand(view: RestoreView) -> bool:
    return asks_by_hand(view.manual, records_of(view))


def _by_hand(view: RestoreView, head: Lineage | None) -> Chosen | Refuse:
    wanted = view.manual
    assert wanted is not None
    if wanted.fresh:
        return Fresh(
            restarts=0,
            choice=wanted.token,
            reason="a start from nothing was chosen by hand (`restore.fresh` in the job)",
            origin=Origin(),
        )
    if wanted.run:
        return _from_other(view, wanted)
    whole = complete(usable(view, under_intent=True))
    matching = [
        checkpoint
        for checkpoint in whole
        if checkpoint.step == wanted.step
        and (
            checkpoint.attempt == wanted.attempt
            or (not wanted.attempt and head is not None and head.contains(checkpoint))
        )
    ]
    if not matching:
        of = f" of attempt {wanted.attempt}" if wanted.attempt else " on the lineage"
        return Refuse(
            reason=f"the job asks to restore step {wanted.step}{of}, which can't be restored; "
            "change or remove `restore` in the job",
            findings=_findings(view, head),
        )
    found = whole[max(matching)]
    return Base(
        checkpoint=found.checkpoint,
        chain=chain_after(head, found.checkpoint, view.chains),
        plan=found.plan,
        saved_world_size=found.world_size,
        shards=found.shards,
        deaths=0,
        restarts=0,
        choice=wanted.token,
        reason=f"step {found.checkpoint.step} of attempt {found.checkpoint.attempt} was chosen by "
        "hand (`restore` in the job)",
    )


def _from_other(view: RestoreView, wanted: ManualChoice) -> Given | Refuse:
    other = view.others.get(wanted.run)
    if other is None:
        return Refuse(reason=_not_listed(wanted.run, view))
    found = find(other, wanted.run_step, wanted.run_attempt, view.struck_origins)
    if found.whole is None:
        return Refuse(
            reason=f"the job asks to start from another run, which can't be done: {found.why}; "
            "change or remove `restore.from` in the job"
        )
    which = "the newest durable one of that run" if wanted.run_step < 0 else "as it was named"
    origin = Origin(run=other.run, checkpoint=found.whole.checkpoint)
    return _given(view, found.whole, origin, 0, wanted.token, f"{which}, chosen by hand")


def _given_again(view: RestoreView, head: Lineage, origin: Origin) -> Fresh | Given | Refuse:
    """The last attempt began with given contents and nothing of its own is whole: once more.

    Another run's checkpoint serves as a base would: what the attempt left unfinished is passed
    over. Where the contents were nothing, that would be a silent fresh start, as `_from_nothing`.
    """
    restarts, token = _restarts(view, head, None), _applied(view)
    started = [c for c in {copy.checkpoint for copy in view.copies} if head.contains(c)]
    if origin.checkpoint is None:
        if started:
            return Refuse(
                reason="no checkpoint since the fresh start that was chosen by hand can be "
                "restored; to forget these too change `restore.fresh` to another choice and back",
                findings=_findings(view, head),
            )
        if _may_hide_some(view):
            return Refuse(reason="the remote tier could not be listed; it may hold checkpoints")
        why = "nothing was saved since the fresh start that was chosen by hand: starting so again"
        return Fresh(restarts=restarts, choice=token, reason=why, origin=origin)
    other = view.others.get(origin.run)
    if other is None:
        return Refuse(reason=_not_listed(origin.run, view))
    step, attempt = origin.checkpoint.step, origin.checkpoint.attempt
    found = find(other, step, attempt, view.struck_origins)
    if found.whole is None:
        return Refuse(
            reason=f"attempt {head.attempt} started from {origin}, no checkpoint of its own is "
            f"whole yet, and {found.why}; name another checkpoint in `restore` in the job",
            findings=_findings(view, head),
        )
    left = f"; {len(started)} begun since then are not whole" if started else ""
    return _given(
        view, found.whole, origin, restarts, token, f"again, as no newer one is whole yet{left}"
    )


def _given(
    view: RestoreView,
    found: CompleteCheckpoint,
    origin: Origin,
    restarts: int,
    token: str,
    remark: str,
) -> Given:
    if found.world_size != view.world_size:
        remark += f"; saved by {found.world_size} ranks, read by {view.world_size}"
    return Given(
        origin=origin,
        checkpoint=found.checkpoint,
        plan=found.plan,
        saved_world_size=found.world_size,
        shards=found.shards,
        restarts=restarts,
        choice=token,
        reason=f"{origin}: {remark}",
    )


def _not_listed(run: str, view: RestoreView) -> str:
    if not view.remote_configured:
        return (
            f"the job asks to start from run {run}, and has no remote tier to read it from: give "
            "it `checkpoint.remote`, or remove `restore.from`"
        )
    return f"run {run}, whose checkpoint the job starts from, could not be listed"


def _findings(view: RestoreView, head: Lineage | None) -> tuple[str, ...]:
    """One sentence per existing checkpoint, newest first."""
    counted = usable(view, under_intent=True)
    whole = complete(counted)
    faults = incomplete(counted)
    every = sorted({copy.checkpoint for copy in view.copies}, reverse=True)
    return tuple(
        f"step {c.step} of attempt {c.attempt}: {_finding(c, view, head, whole, faults)}"
        for c in every
    )


def _finding(
    checkpoint: CheckpointId,
    view: RestoreView,
    head: Lineage | None,
    whole: Mapping[CheckpointId, CompleteCheckpoint],
    faults: Mapping[CheckpointId, str],
) -> str:
    bad = sum(1 for strike in view.struck if strike[0] == checkpoint)
    struck = f" ({bad} bad copies were struck out)" if bad else ""
    if checkpoint not in whole:
        return faults.get(checkpoint, "no copy that counts is left") + struck
    by_name = f"{{step: {checkpoint.step}, attempt: {checkpoint.attempt}}}"
    how = f"choose it by hand with `restore: {by_name}`"
    if head is not None and head.contains(checkpoint):
        return f"whole{struck}; {how}"
    return f"whole, but off the lineage{struck}; {how}"
