"""The rules of the attempt protocol and how to do without each: what each of them prevents.

`without(monkeypatch, rule)` replaces the line of production code that carries the rule by what a
protocol without it would do. Used by tests only; each entry names the place that guards the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from backstay_protocol import choice, commit, history, promises, retention, rounds
from backstay_protocol.choice import RestoreView
from backstay_protocol.history import Chain, Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.records import AttemptRecord, AttemptState
from backstay_protocol.retention import ThinView
from backstay_protocol.round_load import decide
from backstay_protocol.round_steps import Step
from backstay_protocol.rounds import Phase, Round, RoundSettings

Patch = pytest.MonkeyPatch


def without(patch: Patch, *rules: str) -> None:
    """Take rules out of the production code, for the length of a test."""
    for rule in rules:
        _WAYS[rule](patch)


def _fence(patch: Patch) -> None:
    """rounds._take_number and round_steps.outranked: the generation is the number's high part."""
    patch.setattr(rounds, "first_attempt_of", lambda generation: 1)
    patch.setattr(rounds, "outranked", lambda current, attempt: False)


def _promise(patch: Patch) -> None:
    """promises._outbid and current_attempt: a promise binds rounds, words and copies."""
    patch.setattr(promises, "_outbid", lambda state, request: "")
    patch.setattr(promises, "_not_promised", lambda state, request: "")
    patch.setattr(promises, "_not_in_order", lambda stored, record: "")
    patch.setattr(promises, "current_attempt", _recorded)


def _recorded(state: AttemptState) -> int:
    return state.record.attempt if state.record else 0


def _owner(patch: Patch) -> None:
    """promises._outbid: an equal number of another round is refused as a smaller one is."""

    def outbid(state: AttemptState, request: Any) -> str:
        known = max(state.promised, _recorded(state))
        return "" if request.attempt >= known else "smaller"

    patch.setattr(promises, "_outbid", outbid)


def _claimed(patch: Patch) -> None:
    """choice._remote_counts: without a claim the remote tier is no source."""

    def list_anyway(current: Round, event: Any, settings: RoundSettings) -> Step:
        return replace(current, phase=Phase.LIST), (rounds.ListRemote(current.attempt),)

    patch.setattr(choice, "_remote_counts", lambda view: view.listed)
    patch.setitem(rounds._HANDLERS, rounds.ClaimUnreachable, list_anyway)


def _standdown(patch: Patch) -> None:
    """rounds._on_listed: a greater claim in the listing ends the round."""
    patch.setattr(rounds, "_greatest_beside", lambda attempt, view: 0)


def _known_a(patch: Patch) -> None:
    """rounds._on_listing_failed: once claimed, look or end the round."""

    def go_on(current: Round, event: Any, settings: RoundSettings) -> Step:
        return decide(replace(current, claimed=False), settings)

    patch.setitem(rounds._HANDLERS, rounds.ListingFailed, go_on)


def _known_b(patch: Patch) -> None:
    """rounds._may_begin_unclaimed: without a claim only with a member in line."""
    patch.setattr(rounds, "_may_begin_unclaimed", lambda current: True)


def _current(patch: Patch) -> None:
    """rounds._form and promises._replaced_pod_among: exactly the pods that were current."""
    patch.setattr(rounds, "replaced_pods", lambda members, current: [])
    patch.setattr(promises, "replaced_pods", lambda members, current: [])


def _claimfirst(patch: Patch) -> None:
    """commit.may_upload: no byte before the claim and the base."""

    def upload(checkpoint: CheckpointId, standing: commit.Standing) -> commit.Answer:
        return commit.Answer(checkpoint not in standing.intents, "")

    patch.setattr(commit, "may_upload", upload)


def _intent(patch: Patch) -> None:
    """commit.Deletion: list claims, write the intent, list claims again, delete."""
    patch.setitem(commit._NEXT, commit.Deleting.LIST_CLAIMS, commit.Deleting.REMOVE_COMMIT)


def _further(patch: Patch) -> None:
    """retention.safe: local and neighbor are thinned together."""

    def either(view: ThinView) -> frozenset[CheckpointId]:
        return view.complete_local | view.complete_neighbor

    patch.setattr(retention, "safe", either)


def _freshlist(patch: Patch) -> None:
    """choice._may_hide_some: from nothing only after a listing."""
    patch.setattr(choice, "_may_hide_some", lambda view: False)


def _manifest(patch: Patch) -> None:
    """choice.head_of: manifests tell of attempts too."""

    def by_records(records: Iterable[AttemptRecord], chains: Mapping[int, Chain]) -> Lineage | None:
        return history.newest_lineage(records, {})

    patch.setattr(choice, "newest_lineage", by_records)


def _tries(patch: Patch) -> None:
    """choice._deaths: the count is in the record (else it is lost with the leader)."""
    patch.setattr(choice, "_deaths", lambda view, head, base: 0)


def _onlyran(patch: Patch) -> None:
    """choice._ran: only attempts that got their go-ahead count."""
    patch.setattr(choice, "_ran", lambda view, attempt: True)


def _lastresort(patch: Patch) -> None:
    """choice._preferences: quarantine and intents order, they never forbid."""
    every = choice._preferences

    def only_the_best(view: RestoreView, head: Lineage) -> Iterable[Any]:
        return list(every(view, head))[:1]

    patch.setattr(choice, "_preferences", only_the_best)


def _once(patch: Patch) -> None:
    """choice.asks_by_hand: a choice applies until a record in sight carries its token."""
    patch.setattr(choice, "asks_by_hand", lambda manual, records: manual is not None)


def _origin(patch: Patch) -> None:
    """choice.origin_of: what was given by hand is in the record, and is given again."""
    patch.setattr(choice, "origin_of", lambda attempt, records: None)


def _apart(patch: Patch) -> None:
    """choice.usable: what is seen of another run never meets the own run's numbers."""
    own = choice.usable

    def joined(view: RestoreView, *, under_intent: bool) -> list[Any]:
        others = [copy for other in view.others.values() for copy in other.copies]
        return [*own(view, under_intent=under_intent), *others]

    patch.setattr(choice, "usable", joined)


_WAYS: dict[str, Callable[[Patch], None]] = {
    "fence": _fence,
    "promise": _promise,
    "owner": _owner,
    "claimed": _claimed,
    "standdown": _standdown,
    "known a": _known_a,
    "known b": _known_b,
    "current": _current,
    "claimfirst": _claimfirst,
    "intent": _intent,
    "further": _further,
    "freshlist": _freshlist,
    "manifest": _manifest,
    "tries": _tries,
    "onlyran": _onlyran,
    "lastresort": _lastresort,
    "once": _once,
    "origin": _origin,
    "apart": _apart,
}
RULES = tuple(_WAYS)
