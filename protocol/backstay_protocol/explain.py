"""Why a restore takes what it takes, checkpoint by checkpoint. Used by round_load.py and previews.

Says nothing that `choose` does not decide: it sees the same frozen view and what was chosen, and
tells of every checkpoint in sight, the own run's and the other one's, whether it was taken and why
not. Bounded: the newest are told, the rest is counted. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from backstay_protocol import choice
from backstay_protocol.completeness import complete, incomplete
from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    BASE_OUTCOME,
    FRESH_OUTCOME,
    ORIGIN_OUTCOME,
    REFUSE_OUTCOME,
    Candidate,
)
from backstay_protocol.names import TIERS
from backstay_protocol.origins import OtherRun, asks_by_hand

MOST_CANDIDATES = 50


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What was chosen, and of every checkpoint in sight why it was taken or not."""

    outcome: str = ""
    """base | origin | fresh | refuse; empty: nothing was decided."""
    checkpoint: CheckpointId | None = None
    origin: str = ""
    """The contents given by hand, in words; empty: none were."""
    origin_run: str = ""
    reason: str = ""
    candidates: tuple[Candidate, ...] = ()
    more: int = 0
    """So many older ones are left out."""


def explain(view: choice.RestoreView, chosen: choice.Chosen | choice.Refuse) -> Explanation:
    """Of what `choose(view)` answered."""
    found = [*_own(view, chosen), *_others(view, chosen)]
    found.sort(key=lambda candidate: (candidate.taken, not candidate.run), reverse=True)
    told = Explanation(
        reason=chosen.reason,
        candidates=tuple(found[:MOST_CANDIDATES]),
        more=max(0, len(found) - MOST_CANDIDATES),
    )
    match chosen:
        case choice.Base():
            return replace(told, outcome=BASE_OUTCOME, checkpoint=chosen.checkpoint)
        case choice.Given():
            origin = chosen.origin
            return replace(
                told,
                outcome=ORIGIN_OUTCOME,
                checkpoint=chosen.checkpoint,
                origin=str(origin),
                origin_run=origin.run,
            )
        case choice.Fresh():
            by_hand = "" if chosen.origin is None else str(chosen.origin)
            return replace(told, outcome=FRESH_OUTCOME, origin=by_hand)
    why = "; ".join((chosen.reason, *chosen.findings))
    return replace(told, outcome=REFUSE_OUTCOME, reason=why)


# --- the own run ----------------------------------------------------------------------------------


def _own(view: choice.RestoreView, chosen: choice.Chosen | choice.Refuse) -> list[Candidate]:
    """Every checkpoint of the own run in sight, newest first."""
    sight = _Sight(view, chosen)
    by_name: dict[CheckpointId, set[str]] = defaultdict(set)
    for copy in view.copies:
        by_name[copy.checkpoint].add(copy.tier)
    taken = chosen.checkpoint if isinstance(chosen, choice.Base) else None
    return [
        Candidate(
            checkpoint=checkpoint,
            taken=checkpoint == taken,
            why=_sentence(chosen.reason if checkpoint == taken else sight.why_not(checkpoint)),
            tiers=_in_order(by_name[checkpoint]),
        )
        for checkpoint in sorted(by_name, reverse=True)
    ]


class _Sight:
    """What is asked of each checkpoint of the own run, worked out once."""

    def __init__(self, view: choice.RestoreView, chosen: choice.Chosen | choice.Refuse) -> None:
        self._view = view
        self._chosen = chosen
        self._head = choice.head_of(view)
        usable = choice.usable(view, under_intent=True)
        self._whole = complete(usable)
        self._safe = complete(choice.usable(view, under_intent=False))
        self._faults = incomplete(usable)

    def why_not(self, checkpoint: CheckpointId) -> str:
        """The first reason that applies."""
        return (
            self._not_whole(checkpoint)
            or self._not_asked_for()
            or self._off_lineage(checkpoint)
            or self._last_resort(checkpoint)
            or self._older(checkpoint)
        )

    def _not_whole(self, checkpoint: CheckpointId) -> str:
        if checkpoint in self._whole:
            return ""
        bad = sum(1 for strike in self._view.struck if strike[0] == checkpoint)
        struck = f"; {bad} of its copies were found bad and struck out" if bad else ""
        if checkpoint in self._faults:
            return f"not whole: {self._faults[checkpoint]}{struck}"
        away = "it is only in the remote tier, which does not count while this attempt has no claim"
        return f"not whole{struck}" if struck else away

    def _not_asked_for(self) -> str:
        if not asks_by_hand(self._view.manual, choice.records_of(self._view)):
            return ""
        return "whole, but `restore` in the job asks for something else"

    def _off_lineage(self, checkpoint: CheckpointId) -> str:
        head: Lineage | None = self._head
        if head is None or head.contains(checkpoint):
            return ""
        by_name = f"{{step: {checkpoint.step}, attempt: {checkpoint.attempt}}}"
        return (
            f"whole, but not history: it is off the lineage of attempt {head.attempt}, the "
            f"greatest in sight; `restore: {by_name}` chooses it by hand"
        )

    def _last_resort(self, checkpoint: CheckpointId) -> str:
        head = self._head
        if head is not None and checkpoint == choice.quarantined(self._view, head):
            return "whole, but quarantined: too many attempts that started from it died"
        if checkpoint not in self._safe:
            return "whole, but its remote copies are about to be deleted"
        return ""

    def _older(self, checkpoint: CheckpointId) -> str:
        if isinstance(self._chosen, choice.Base):
            return f"whole, but older than step {self._chosen.checkpoint.step}, which was taken"
        return "whole"


# --- the other run --------------------------------------------------------------------------------


def _others(view: choice.RestoreView, chosen: choice.Chosen | choice.Refuse) -> Iterable[Candidate]:
    taken = chosen.origin if isinstance(chosen, choice.Given) else None
    for run, other in sorted(view.others.items()):
        mine = taken.checkpoint if taken is not None and taken.run == run else None
        yield from _of_run(other, mine, view, chosen.reason)


def _of_run(
    other: OtherRun, taken: CheckpointId | None, view: choice.RestoreView, reason: str
) -> list[Candidate]:
    struck = view.struck_origins
    usable = [c for c in other.copies if (other.run, c.checkpoint, c.rank) not in struck]
    whole, faults, lineage = complete(usable), incomplete(usable), other.lineage
    tiers: dict[CheckpointId, set[str]] = defaultdict(set)
    for copy in other.copies:
        tiers[copy.checkpoint].add(copy.tier)

    def why(checkpoint: CheckpointId) -> str:
        if checkpoint == taken:
            return reason
        if checkpoint not in whole:
            fault = faults.get(checkpoint, "its shards were found bad or are gone")
            return f"not whole: {fault}"
        if lineage is not None and not lineage.contains(checkpoint):
            return f"whole, but off the lineage of attempt {lineage.attempt} of that run"
        if checkpoint not in other.commits:
            return "whole, but not durable: it has no commit record"
        if checkpoint in other.intents:
            return "whole, but that run is about to delete it"
        return "whole, but not the one that was asked for"

    return [
        Candidate(
            checkpoint=checkpoint,
            run=other.run,
            taken=checkpoint == taken,
            why=_sentence(why(checkpoint)),
            tiers=_in_order(tiers[checkpoint]),
        )
        for checkpoint in sorted(tiers, reverse=True)
    ]


def _in_order(tiers: Collection[str]) -> tuple[str, ...]:
    return tuple(tier for tier in TIERS if tier in tiers)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
