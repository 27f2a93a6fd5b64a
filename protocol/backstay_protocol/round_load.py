"""The second half of a restore round: decide, load, verify, record, go. Used by rounds.py only.

Rules carried here (tests/support/protocol_rules.py): claimed (an attempt without a claim that finds
nothing waits for one), and "go-ahead only when all have stored".
"""

from __future__ import annotations

from dataclasses import replace

from backstay_protocol.choice import (
    Base,
    Chosen,
    Fresh,
    Given,
    Refuse,
    RestoreView,
    Strike,
    choose,
)
from backstay_protocol.explain import explain
from backstay_protocol.history import Chain
from backstay_protocol.messages import BadSource, LeaderDecision, StoreRequest, VerdictRequest
from backstay_protocol.origins import OriginStrike
from backstay_protocol.records import AttemptRecord
from backstay_protocol.round_events import (
    CANT_LOAD,
    MEMBER_REFUSED,
    NOTHING_USABLE,
    RESTARTS_SPENT,
    SOURCES_AWAY,
    Announce,
    AskStore,
    BaseUnreachable,
    BaseWritten,
    Begin,
    RemoteView,
    StoreAnswered,
    StoreUnreachable,
    Summary,
    VerdictGiven,
    WriteBase,
)
from backstay_protocol.round_state import Phase, Round, RoundSettings
from backstay_protocol.round_steps import (
    RETRY_SECONDS,
    Step,
    give_up,
    heard,
    remote_is_away,
    silence,
    wait,
    wait_for_remote,
)

MAX_BACKOFF_SECONDS = 60.0


def answers_this_decision(current: Round, request: VerdictRequest) -> bool:
    """A go-ahead names the joins it answers: same round, same decision, same processes."""
    if current.decision is None or request.round != current.name:
        return False
    if request.serial != current.decision.serial:
        return False
    return all(current.decision.nonces.get(v.rank) == v.nonce for v in request.verdicts)


# --- decide ---------------------------------------------------------------------------------------


def decide(current: Round, settings: RoundSettings) -> Step:
    """Choose by what promises and listing showed; announce it, hold it back, or give up."""
    view = _view(current, settings)
    chosen = choose(view)
    current = replace(current, explanation=explain(view, chosen))
    if isinstance(chosen, Refuse):
        if settings.remote_configured and not current.claimed:
            return wait_for_remote(remote_is_away(current), chosen.reason, settings)
        why = "; ".join((chosen.reason, *chosen.findings))
        return give_up(current, NOTHING_USABLE, why, retry=False)
    budget = settings.restore.max_restarts
    if chosen.restarts > budget:
        why = (
            f"{chosen.restarts} attempts in a row made no newer checkpoint; "
            f"restore.maxRestarts is {budget}"
        )
        return give_up(current, RESTARTS_SPENT, why, retry=False)
    current = replace(current, choice=chosen)
    pause = backoff_seconds(chosen.restarts) if current.serial == 0 else 0.0
    if pause > 0:
        current = replace(current, phase=Phase.HOLD, hold_until=current.now + pause)
        tries = f"{chosen.restarts} attempts in a row made no newer checkpoint"
        return wait(current, f"{tries}: going on in {pause:.0f} s")
    return announce(current, chosen)


def backoff_seconds(restarts: int) -> float:
    """Pause before an attempt: none for the first two without a new checkpoint, then doubling."""
    return 0.0 if restarts < 2 else min(MAX_BACKOFF_SECONDS, 2.0 ** min(restarts - 1, 10))


def _view(current: Round, settings: RoundSettings) -> RestoreView:
    """Everything that promises and listing showed, as one frozen value."""
    replies = [current.promises[replica] for replica in sorted(current.promises)]
    remote = current.remote or RemoteView()
    inventories = [reply.inventory for reply in replies] + [remote.inventory]
    chains: dict[int, Chain] = {}
    for inventory in inventories:
        chains.update(inventory.chains)
    return RestoreView(
        attempt=current.attempt,
        world_size=settings.world_size,
        replicas=settings.replicas,
        records=tuple(reply.record for reply in replies if reply.record is not None),
        bases=remote.bases,
        copies=tuple(copy for inventory in inventories for copy in inventory.copies),
        chains=chains,
        remote_configured=settings.remote_configured,
        claimed=current.claimed,
        listed=current.remote is not None,
        intents=remote.intents,
        struck=frozenset(current.struck),
        others={other.run: other for other in remote.others},
        struck_origins=frozenset(current.struck_origins),
        manual=settings.restore.choice,
        quarantine_after=settings.restore.quarantine_after,
    )


def announce(current: Round, chosen: Chosen) -> Step:
    """Tell every joined rank what to load."""
    base = None if isinstance(chosen, Fresh) else chosen
    decision = LeaderDecision(
        round=current.name,
        serial=current.serial + 1,
        attempt=current.attempt,
        base=base.checkpoint if base else None,
        saved_world_size=base.saved_world_size if base else 0,
        plan=base.plan if base else "",
        chain=chosen.chain if isinstance(chosen, Base) else (),
        shards=base.shards if base else (),
        reason=chosen.reason,
        skipped_bad=_struck_out(current),
        nonces=current.nonces,
        unreachable={reader: tuple(sorted(marks)) for reader, marks in current.unreachable.items()},
        base_run=chosen.origin.run if isinstance(chosen, Given) else "",
    )
    current = replace(
        current,
        phase=Phase.LOAD,
        serial=decision.serial,
        decision=decision,
        announced=current.now,
        verdicts={},
        message=chosen.reason,
    )
    return current, (Announce(decision),)


# --- load and verify ------------------------------------------------------------------------------


def on_verdict(current: Round, event: VerdictGiven, settings: RoundSettings) -> Step:
    """The ranks of one replica have loaded, or say what hindered them."""
    request = event.request
    if current.phase is not Phase.LOAD or not answers_this_decision(current, request):
        return current, ()
    failed = [verdict for verdict in request.verdicts if not verdict.ok and not verdict.bad]
    if failed:
        why = "; ".join(f"rank {verdict.rank}: {verdict.error}" for verdict in failed)
        return give_up(current, CANT_LOAD, why, retry=False)
    bad = [source for verdict in request.verdicts for source in verdict.bad]
    if bad and not all(verdict.ok for verdict in request.verdicts):
        return _strike(current, request.replica, bad, settings)
    current = _note_bad(current, bad)
    if {v.rank for v in request.verdicts} != set(settings.ranks_of(request.replica)):
        return current, ()
    verdicts = {**current.verdicts, request.replica: request.verdicts}
    current = replace(current, verdicts=verdicts, announced=current.now)
    if len(verdicts) < len(current.joins):
        return current, ()
    return _verified(current, settings)


def _strike(current: Round, reader: int, bad: list[BadSource], settings: RoundSettings) -> Step:
    """Proven bad: gone for everyone. Out of reach: last for this reader. Then decide again."""
    before = len(current.struck) + len(current.struck_origins)
    known = current.unreachable.get(reader, frozenset())
    unreachable = known | {
        f"{source.shard_rank}/{source.tier}/{source.holder}" for source in bad if not source.proven
    }
    current = _note_bad(current, bad)
    if len(current.struck) + len(current.struck_origins) == before and unreachable == known:
        why = f"replica {reader} can't reach any source: {bad[0].detail}"
        return give_up(current, SOURCES_AWAY, why, retry=True, after=RETRY_SECONDS)
    marks = {**current.unreachable, reader: unreachable}
    return decide(replace(current, unreachable=marks), settings)


def _note_bad(current: Round, bad: list[BadSource]) -> Round:
    """What is proven bad stays struck out, whether another source served instead or not."""
    decision = current.decision
    assert decision is not None
    struck: dict[Strike, str] = dict(current.struck)
    origins: dict[OriginStrike, str] = dict(current.struck_origins)
    for source in bad:
        if not source.proven or decision.base is None:
            continue
        copy = (decision.base, source.shard_rank, source.tier, source.holder)
        if decision.base_run:
            shard = (decision.base_run, decision.base, source.shard_rank)
            origins[shard] = f"{_what_is_bad(copy, source.detail)} (run {decision.base_run})"
        else:
            struck[copy] = _what_is_bad(copy, source.detail)
    return replace(current, struck=struck, struck_origins=origins)


def _struck_out(current: Round) -> tuple[str, ...]:
    return (*current.struck.values(), *current.struck_origins.values())


def _what_is_bad(copy: Strike, detail: str) -> str:
    checkpoint, rank, tier, holder = copy
    where = tier if holder < 0 else f"{tier} copy at replica {holder}"
    return f"rank {rank} of step {checkpoint.step}, {where}: {detail}"


def _verified(current: Round, settings: RoundSettings) -> Step:
    """Every rank has loaded the same base: record it, remote first where we have a claim."""
    chosen = current.choice
    assert chosen is not None
    base = chosen if isinstance(chosen, Base) else None
    record = AttemptRecord(
        attempt=current.attempt,
        base=base.checkpoint if base else None,
        chain=base.chain if base else (),
        deaths=base.deaths if base else 0,
        restarts=chosen.restarts,
        world_size=settings.world_size,
        replicas=settings.replicas,
        choice=chosen.choice,
        origin=None if isinstance(chosen, Base) else chosen.origin,
    )
    current = replace(current, record=record, message="all ranks have loaded; recording the base")
    if not current.claimed:
        return _ask_stores(current, Phase.STORE, settings)
    return replace(current, phase=Phase.BASE), (WriteBase(record),)


def on_base_written(current: Round, event: BaseWritten, settings: RoundSettings) -> Step:
    """The lineage stands in the remote tier; now every member stores it."""
    if current.phase is not Phase.BASE or event.attempt != current.attempt:
        return current, ()
    return _ask_stores(replace(current, base_recorded=True), Phase.STORE, settings)


def on_base_silence(current: Round, event: BaseUnreachable, settings: RoundSettings) -> Step:
    """Go on: the members' records tell the lineage, and nothing is uploaded before the base is."""
    if current.phase is not Phase.BASE or event.attempt != current.attempt:
        return current, ()
    return _ask_stores(current, Phase.STORE, settings)


# --- store and go ---------------------------------------------------------------------------------


def _ask_stores(current: Round, phase: Phase, settings: RoundSettings) -> Step:
    current = replace(current, phase=phase, stored=frozenset(), silent={})
    return current, tuple(ask_store(current, replica) for replica in sorted(current.joins))


def ask_store(current: Round, replica: int) -> AskStore:
    """Ask one member to keep the record; in the last phase with the go-ahead."""
    assert current.record is not None
    record = replace(current.record, ran=current.phase is Phase.GO)
    return AskStore(replica, StoreRequest(round=current.name, record=record))


def _awaits_store(current: Round, event: StoreAnswered | StoreUnreachable) -> bool:
    phase = Phase.GO if event.ran else Phase.STORE
    return current.phase is phase and event.attempt == current.attempt


def on_store(current: Round, event: StoreAnswered, settings: RoundSettings) -> Step:
    """A member has stored; when all have, the next phase."""
    if not _awaits_store(current, event):
        return current, ()
    if not event.reply.stored:
        why = f"replica {event.replica} did not store attempt {current.attempt}: {event.reply.why}"
        return give_up(current, MEMBER_REFUSED, why, retry=True, after=RETRY_SECONDS)
    stored = current.stored | {event.replica}
    current = heard(replace(current, stored=stored), event.replica)
    if len(stored) < len(current.joins):
        return current, ()
    if current.phase is Phase.STORE:
        return _ask_stores(current, Phase.GO, settings)
    return _begun(current)


def on_store_silence(current: Round, event: StoreUnreachable, settings: RoundSettings) -> Step:
    """A member did not answer its store."""
    if not _awaits_store(current, event):
        return current, ()
    return silence(current, event.replica, event.why, settings)


def _begun(current: Round) -> Step:
    assert current.record is not None
    assert current.choice is not None
    record = replace(current.record, ran=True)
    summary = Summary(
        reason=current.choice.reason,
        bytes_by_tier=_bytes_by_tier(current),
        lost_steps=_lost_steps(current, record),
        bad=_struck_out(current),
        seconds=current.now - current.started,
        claimed=current.claimed,
        base_recorded=current.base_recorded,
        explanation=current.explanation,
    )
    current = replace(
        current, phase=Phase.BEGUN, record=record, summary=summary, message=summary.reason
    )
    return current, (Begin(record, summary),)


def _bytes_by_tier(current: Round) -> dict[str, int]:
    total: dict[str, int] = {}
    for verdicts in current.verdicts.values():
        for verdict in verdicts:
            for tier, count in verdict.bytes_by_tier.items():
                total[tier] = total.get(tier, 0) + count
    return total


def _lost_steps(current: Round, record: AttemptRecord) -> int:
    """Steps that the last attempt trained beyond the base, as far as control blocks remember."""
    if record.origin is not None:
        return -1  # steps of other contents are not counted from these
    ranks = [rank for join in current.joins.values() for rank in join.ranks if rank.last_step >= 0]
    if not ranks:
        return -1
    last = max((rank.last_attempt, rank.last_step) for rank in ranks)[1]
    return max(0, last - (record.base.step if record.base else 0))
