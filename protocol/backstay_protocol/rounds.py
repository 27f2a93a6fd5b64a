"""A restore round as a pure state machine: how an attempt begins. Driven by the sidecar's leader.

`begin` opens a round, `advance` takes one event and answers the new round and what to do now. The
leader carries effects out one message at a time and may crash between any two of them; nothing is
kept here that the next round can't find again. The walk: gather, promise, claim, list (here),
decide, load, base, store, go (round_load.py). Rules carried here (tests/support/protocol_rules.py):
fence, promise, claimnobase, standdown, known, current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backstay_protocol.completeness import ranks_in_words
from backstay_protocol.ids import first_attempt_of
from backstay_protocol.messages import (
    AGAIN,
    FAILED,
    GO,
    LOAD,
    WAIT,
    Inventory,
    JoinReply,
    JoinRequest,
    PromiseRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.origins import run_to_list
from backstay_protocol.promises import (
    current_attempt,
    heeds,
    in_line,
    merge,
    promise,
    replaced_pods,
    store,
)
from backstay_protocol.records import AttemptRecord, Claim
from backstay_protocol.round_events import (
    BARRIER,
    LISTING_FAILED,
    MEMBER_REFUSED,
    MISFIT,
    NUMBER_TAKEN,
    REJOINED,
    Announce,
    AskPromise,
    AskStore,
    BaseUnreachable,
    BaseWritten,
    Begin,
    ClaimMade,
    ClaimTaken,
    ClaimUnreachable,
    Effect,
    Event,
    GiveUp,
    Joined,
    ListingFailed,
    ListRemote,
    MakeClaim,
    PromiseAnswered,
    PromiseUnreachable,
    RemoteListed,
    RemoteView,
    StoreAnswered,
    StoreUnreachable,
    Summary,
    Tick,
    VerdictGiven,
    Waiting,
    WriteBase,
)
from backstay_protocol.round_load import (
    announce,
    answers_this_decision,
    ask_store,
    decide,
    on_base_silence,
    on_base_written,
    on_store,
    on_store_silence,
    on_verdict,
)
from backstay_protocol.round_state import Phase, Round, RoundSettings, round_settings
from backstay_protocol.round_steps import (
    RETRY_SECONDS,
    Step,
    give_up,
    heard,
    outranked,
    remote_away,
    remote_is_away,
    remote_waited_out,
    silence,
    stand_down,
    wait,
    wait_for_remote,
)

__all__ = [
    "Announce",
    "AskPromise",
    "AskStore",
    "BaseUnreachable",
    "BaseWritten",
    "Begin",
    "ClaimMade",
    "ClaimTaken",
    "ClaimUnreachable",
    "Effect",
    "Event",
    "GiveUp",
    "Joined",
    "ListRemote",
    "ListingFailed",
    "MakeClaim",
    "Phase",
    "PromiseAnswered",
    "PromiseUnreachable",
    "RemoteListed",
    "RemoteView",
    "Round",
    "RoundSettings",
    "StoreAnswered",
    "StoreUnreachable",
    "Summary",
    "Tick",
    "VerdictGiven",
    "Waiting",
    "WriteBase",
    "advance",
    "answer_join",
    "answer_verdict",
    "begin",
    "current_attempt",
    "heeds",
    "in_line",
    "merge",
    "promise",
    "round_settings",
    "store",
]


def begin(name: str, now: float, previous: Round | None = None) -> Round:
    """Open a round. `previous`: the last one of this leader.

    Joins are not taken over: feed `Joined` for every join that still waits. Strikes and the time
    waited are, unless the previous round began an attempt.
    """
    fresh = Round(name=name, started=now, gathering_since=now, now=now)
    if previous is None:
        return fresh
    known = max(previous.known, previous.attempt)
    if previous.phase is Phase.BEGUN:
        return replace(fresh, known=known)
    return replace(
        fresh,
        known=known,
        started=previous.started,
        struck=previous.struck,
        struck_origins=previous.struck_origins,
        remote_away_since=previous.remote_away_since,
    )


def advance(current: Round, event: Event, settings: RoundSettings) -> Step:
    """Take one event. What does not belong to the round as it stands changes nothing."""
    if current.over:
        return current, ()
    return _HANDLERS[type(event)](current, event, settings)


def answer_join(current: Round, request: JoinRequest) -> JoinReply:
    """What to answer a waiting join at this moment: wait, load, or failed."""
    joined = current.joins.get(request.replica)
    if joined is not None and request.generation < joined.generation:
        return JoinReply(
            status=FAILED,
            message=f"this pod (generation {request.generation} of replica {request.replica}) "
            f"was replaced by generation {joined.generation}",
        )
    if current.give_up is not None and not current.give_up.retry:
        return JoinReply(status=FAILED, message=current.give_up.why)
    if current.give_up is None and current.decision is not None and _same(joined, request):
        return JoinReply(status=LOAD, message=current.message, decision=current.decision)
    return JoinReply(status=WAIT, message=current.message)


def answer_verdict(current: Round, request: VerdictRequest) -> VerdictReply:
    """What to answer a waiting verdict at this moment: wait, go, again, or failed."""
    if current.give_up is not None and not current.give_up.retry:
        return VerdictReply(status=FAILED, message=current.give_up.why)
    if current.give_up is not None or not answers_this_decision(current, request):
        return VerdictReply(status=AGAIN, message=current.message)
    if current.summary is None:
        return VerdictReply(status=WAIT, message=current.message)
    return VerdictReply(
        status=GO,
        message=current.message,
        record=current.record,
        bytes_by_tier=current.summary.bytes_by_tier,
        bad=current.summary.bad,
        lost_steps=current.summary.lost_steps,
    )


def _same(joined: JoinRequest | None, request: JoinRequest) -> bool:
    """Whether these are the processes that joined (all of them, or those that asked again)."""
    if joined is None or joined.generation != request.generation:
        return False
    nonces = {rank.rank: rank.nonce for rank in joined.ranks}
    return all(nonces.get(rank.rank) == rank.nonce for rank in request.ranks)


# --- gather ---------------------------------------------------------------------------------------


def _on_joined(current: Round, event: Joined, settings: RoundSettings) -> Step:
    request = event.request
    joined = current.joins.get(request.replica)
    if joined is not None and request.generation < joined.generation:
        return current, ()  # a replaced pod; answer_join tells it
    if current.phase is not Phase.GATHER:
        if _same(joined, request):
            return current, ()
        why = f"processes of replica {request.replica} started anew while the world restored"
        return give_up(current, REJOINED, why, retry=True)
    misfit = _misfit(request, settings)
    if misfit and request.generation < current.generation:
        return current, ()  # left over from a job of another size
    if misfit:
        return give_up(current, MISFIT, misfit, retry=False)
    return _form(replace(current, joins={**current.joins, request.replica: request}), settings)


def _misfit(request: JoinRequest, settings: RoundSettings) -> str:
    """Rank, replica and world must fit the topology."""
    if request.replica not in range(settings.replicas):
        return f"replica {request.replica} joined; the job has {settings.replicas} replicas"
    own = settings.ranks_of(request.replica)
    for rank in request.ranks:
        if rank.world_size != settings.world_size:
            return (
                f"rank {rank.rank} says that the world has {rank.world_size} ranks; "
                f"the job's topology says {settings.world_size}"
            )
        if rank.rank not in own:
            return (
                f"rank {rank.rank} runs in replica {request.replica}, which should hold ranks "
                f"{own.start} to {own.stop - 1}; give the launcher the replica's index as node rank"
            )
    return ""


def _form(current: Round, settings: RoundSettings) -> Step:
    """A world is whole when every rank has joined, from exactly the pods that are current."""
    missing = set(range(settings.world_size)) - set(current.nonces)
    if missing:
        return wait(current, f"waiting for {ranks_in_words(missing)} to call restore()")
    old = replaced_pods(current.members, _current_pods(current))
    if old:
        return wait(current, f"waiting for the newer pod of replica {old[0]} to join")
    return _take_number(current, settings)


def _current_pods(current: Round) -> dict[int, int]:
    """Rule `current`: which pods the world consists of, by its newest one's word."""
    newest = max(current.joins.values(), key=lambda join: join.generation)
    return newest.current


# --- promise --------------------------------------------------------------------------------------


def _take_number(current: Round, settings: RoundSettings) -> Step:
    """The next number above everything known, fenced by the world's generation."""
    if outranked(current, current.known):
        return stand_down(current, current.known)
    attempt = max(first_attempt_of(current.generation), current.known + 1)
    current = replace(
        current,
        phase=Phase.PROMISE,
        attempt=attempt,
        promises={},
        silent={},
        claimed=False,
        remote=None,
        message=f"attempt {attempt}: every sidecar is asked for its promise",
    )
    asks = tuple(_ask_promise(current, replica) for replica in sorted(current.joins))
    return current, asks


def _ask_promise(current: Round, replica: int) -> AskPromise:
    request = PromiseRequest(round=current.name, attempt=current.attempt, members=current.members)
    return AskPromise(replica, request)


def _on_promise(current: Round, event: PromiseAnswered, settings: RoundSettings) -> Step:
    if current.phase is not Phase.PROMISE or event.attempt != current.attempt:
        return current, ()
    reply = event.reply
    used = _greatest_used(reply.inventory)
    known = max(current.known, reply.known, used)
    current = heard(replace(current, known=known), event.replica)
    taken = used == known or not reply.granted
    if known > current.attempt or (taken and known == current.attempt):
        return _take_number(current, settings)
    if not reply.granted:
        why = f"replica {event.replica} refused attempt {current.attempt}: {reply.why}"
        return give_up(current, MEMBER_REFUSED, why, retry=True, after=RETRY_SECONDS)
    current = replace(current, promises={**current.promises, event.replica: reply})
    if len(current.promises) < len(current.joins):
        return current, ()
    if not settings.remote_configured:
        return decide(current, settings)
    return _make_claim(current, settings)


def _on_promise_silence(current: Round, event: PromiseUnreachable, settings: RoundSettings) -> Step:
    if current.phase is not Phase.PROMISE or event.attempt != current.attempt:
        return current, ()
    return silence(current, event.replica, event.why, settings)


# --- claim, then look -----------------------------------------------------------------------------


def _make_claim(current: Round, settings: RoundSettings) -> Step:
    claim = Claim(attempt=current.attempt, round=current.name, owner=settings.owner, created=0.0)
    message = f"attempt {current.attempt} is claimed in the remote tier"
    current = replace(current, phase=Phase.CLAIM, ask_remote_at=None, message=message)
    return current, (MakeClaim(claim),)


def _on_claim_made(current: Round, event: ClaimMade, settings: RoundSettings) -> Step:
    if current.phase is not Phase.CLAIM or event.attempt != current.attempt:
        return current, ()
    current = replace(
        current, phase=Phase.LIST, claimed=True, message="the remote tier is being listed"
    )
    return current, (_list_remote(current, (), settings),)


def _list_remote(
    current: Round, bases: tuple[AttemptRecord, ...], settings: RoundSettings
) -> ListRemote:
    """The own run, and the other one that the decision may need by what is known so far."""
    run = run_to_list(settings.restore.choice, (*_records_of(current), *bases))
    return ListRemote(current.attempt, (run,) if run else ())


def _records_of(current: Round) -> tuple[AttemptRecord, ...]:
    replies = current.promises.values()
    return tuple(reply.record for reply in replies if reply.record is not None)


def _on_claim_taken(current: Round, event: ClaimTaken, settings: RoundSettings) -> Step:
    if current.phase is not Phase.CLAIM or event.attempt != current.attempt:
        return current, ()
    if event.round == current.name:  # our own: the answer to an earlier try was lost
        return _on_claim_made(current, ClaimMade(event.attempt), settings)
    known = max(current.known, event.attempt, event.greatest)
    return _take_number(replace(current, known=known), settings)


def _on_claim_silence(current: Round, event: ClaimUnreachable, settings: RoundSettings) -> Step:
    if current.phase is not Phase.CLAIM or event.attempt != current.attempt:
        return current, ()
    current = remote_is_away(current)
    if _may_begin_unclaimed(current):
        return decide(current, settings)
    return wait_for_remote(current, event.why, settings)


def _may_begin_unclaimed(current: Round) -> bool:
    """Rule `known`: one member knows of everything that can have run since its newest record."""
    return any(reply.in_line for reply in current.promises.values())


def _on_listed(current: Round, event: RemoteListed, settings: RoundSettings) -> Step:
    if current.phase is not Phase.LIST or event.attempt != current.attempt:
        return current, ()
    newer = _greatest_beside(current.attempt, event.view)
    current = replace(
        current,
        remote=event.view,
        remote_away_since=None,
        known=max(current.known, newer),
    )
    if newer:  # rule `standdown`
        if outranked(current, newer):
            return stand_down(current, newer)
        why = f"attempt {newer} exists beside {current.attempt}, which was being prepared"
        return give_up(current, NUMBER_TAKEN, why, retry=True)
    needed = _list_remote(current, event.view.bases, settings)
    if not {other.run for other in event.view.others}.issuperset(needed.runs):
        return current, (needed,)  # what was listed tells of another run that is needed
    return decide(current, settings)


def _greatest_beside(attempt: int, view: RemoteView) -> int:
    """A greater claim, or anything done under this number or a greater one; 0: neither."""
    done = max(_greatest_used(view.inventory), *(base.attempt for base in view.bases), 0)
    greatest = max((done, *view.claims))
    return greatest if greatest > attempt or done == attempt else 0


def _greatest_used(inventory: Inventory) -> int:
    """Greatest number that something was saved under: never to be taken again."""
    named = (copy.checkpoint.attempt for copy in inventory.copies)
    return max((*inventory.chains, *named), default=0)


def _on_listing_failed(current: Round, event: ListingFailed, settings: RoundSettings) -> Step:
    """Rule `known`: once claimed, look or end the round."""
    if current.phase is not Phase.LIST or event.attempt != current.attempt:
        return current, ()
    current = remote_is_away(current)
    if remote_waited_out(current, settings):
        return remote_away(current, event.why, settings)
    why = f"the remote tier could not be listed: {event.why}"
    return give_up(current, LISTING_FAILED, why, retry=True, after=settings.ask_again_seconds)


# --- time and silence -----------------------------------------------------------------------------


def _on_tick(current: Round, event: Tick, settings: RoundSettings) -> Step:
    current = replace(current, now=event.now)
    if current.phase is Phase.GATHER:
        return _tick_gather(current, settings)
    if current.ask_remote_at is not None and event.now >= current.ask_remote_at:
        return _make_claim(current, settings)
    if current.phase is Phase.HOLD and event.now >= current.hold_until:
        assert current.choice is not None
        return announce(current, current.choice)
    if current.phase is Phase.LOAD:
        return _tick_load(current, settings)
    return _ask_the_silent(current)


def _tick_gather(current: Round, settings: RoundSettings) -> Step:
    waited = current.now - current.gathering_since
    if waited <= settings.restore.barrier_seconds:
        return current, ()
    missing = set(range(settings.world_size)) - set(current.nonces)
    who = f"{ranks_in_words(missing)} did not call restore()" if missing else current.message
    return give_up(current, BARRIER, f"after {waited:.0f} s {who}", retry=False)


def _tick_load(current: Round, settings: RoundSettings) -> Step:
    waited = current.now - current.announced
    if waited <= settings.restore.barrier_seconds:
        return current, ()
    ranks = (r for i in current.joins if i not in current.verdicts for r in settings.ranks_of(i))
    why = f"after {waited:.0f} s {ranks_in_words(ranks)} had not finished loading"
    return give_up(current, BARRIER, why, retry=False)


def _ask_the_silent(current: Round) -> Step:
    due = [replica for replica, (_, again) in current.silent.items() if again <= current.now]
    asked = {replica: (current.silent[replica][0], float("inf")) for replica in due}
    current = replace(current, silent={**current.silent, **asked})
    if current.phase is Phase.PROMISE:
        return current, tuple(_ask_promise(current, replica) for replica in due)
    if current.phase in (Phase.STORE, Phase.GO):
        return current, tuple(ask_store(current, replica) for replica in due)
    return current, ()


_HANDLERS: dict[type, Callable[[Round, Any, RoundSettings], Step]] = {
    Tick: _on_tick,
    Joined: _on_joined,
    PromiseAnswered: _on_promise,
    PromiseUnreachable: _on_promise_silence,
    ClaimMade: _on_claim_made,
    ClaimTaken: _on_claim_taken,
    ClaimUnreachable: _on_claim_silence,
    RemoteListed: _on_listed,
    ListingFailed: _on_listing_failed,
    VerdictGiven: on_verdict,
    BaseWritten: on_base_written,
    BaseUnreachable: on_base_silence,
    StoreAnswered: on_store,
    StoreUnreachable: on_store_silence,
}
