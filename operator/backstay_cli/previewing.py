"""What a restore would take now: by the leader, else by the same pure choice over what is in sight.

Used by `backstay restore`. It begins nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from backstay_cli.catalog.sight import Sight
from backstay_cli.client import SidecarClient
from backstay_protocol.choice import Base, Fresh, Refuse, RestoreView, choose
from backstay_protocol.completeness import complete, incomplete
from backstay_protocol.history import newest_lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    BASE_OUTCOME,
    FRESH_OUTCOME,
    REFUSE_OUTCOME,
    Candidate,
    RestorePreview,
)
from backstay_protocol.names import TIERS, URL_RESTORE_PREVIEW
from backstay_protocol.topology import ManualChoice

_BY_HAND = "backstay restore --dry-run"
"""Token of a choice that nobody has applied."""
_SHOWN = 50
_PREVIEW_SECONDS = 90.0
"""The leader lists the remote tier before it answers."""
_OUTCOMES: dict[type, str] = {Base: BASE_OUTCOME, Fresh: FRESH_OUTCOME, Refuse: REFUSE_OUTCOME}


@dataclass(frozen=True, kw_only=True)
class Previewed:
    """What `restore --dry-run -o json` prints."""

    source: str
    """Who says so."""
    preview: RestorePreview


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a person asks for; nothing: what a restore takes by itself."""

    step: int = -1
    attempt: int = 0
    """0: the one on the lineage."""
    run: str = ""
    """`<namespace>/<run name>`: another run's checkpoint, that of `step` or its newest durable."""
    fresh: bool = False

    @property
    def query(self) -> str:
        """Of the leader's route."""
        if self.fresh:
            return "?fresh=true"
        asked: dict[str, str | int] = {"run": self.run} if self.run else {}
        if self.step >= 0:
            asked |= {"step": self.step, "attempt": self.attempt}
        return f"?{urlencode(asked)}" if asked else ""

    @property
    def choice(self) -> ManualChoice | None:
        """As the job's `restore` field says it."""
        if self.fresh:
            return ManualChoice(token=_BY_HAND, fresh=True)
        step, attempt = self.step, self.attempt
        if self.run:
            return ManualChoice(token=_BY_HAND, run=self.run, run_step=step, run_attempt=attempt)
        return ManualChoice(token=_BY_HAND, step=step, attempt=attempt) if step >= 0 else None

    @property
    def field(self) -> dict[str, Any]:
        """Of a manifest: what `spec.restore` must say."""
        if self.fresh:
            return {"fresh": True}
        found: dict[str, Any] = {}
        if self.run:
            namespace, _, name = self.run.partition("/")
            found["from"] = {"namespace": namespace, "runName": name}
        if self.step >= 0:
            found["step"] = self.step
            if self.attempt:
                found["attempt"] = self.attempt
        return found


def ask_leader(leader: SidecarClient, wanted: Wanted) -> RestorePreview:
    """GET /v1/restore/preview."""
    path = f"{URL_RESTORE_PREVIEW}{wanted.query}"
    return leader.get(RestorePreview, path, timeout=_PREVIEW_SECONDS)


def from_sight(run: str, sight: Sight, wanted: Wanted, world_size: int = 0) -> RestorePreview:
    """As the next attempt's leader would decide, with its claim taken and the remote tier listed.

    `world_size`: of the job; 0: that of what is kept.
    """
    view = RestoreView(
        attempt=max(sight.attempts, default=0) + 1,
        world_size=world_size or sight.world_size,
        records=sight.records,
        bases=sight.bases,
        copies=sight.copies,
        chains=sight.chains,
        remote_configured=sight.remote,
        claimed=sight.remote,
        listed=sight.remote,
        intents=sight.intents,
        manual=wanted.choice,
    )
    decided = choose(view)
    taken = decided.checkpoint if isinstance(decided, Base) else None
    every = list(_candidates(view, taken, decided.reason))
    return RestorePreview(
        run=run,
        attempt=0,
        outcome=_OUTCOMES[type(decided)],
        reason=decided.reason,
        checkpoint=taken,
        candidates=tuple(every[:_SHOWN]),
        more_candidates=max(0, len(every) - _SHOWN),
    )


def _candidates(view: RestoreView, taken: CheckpointId | None, reason: str) -> Iterator[Candidate]:
    told = {copy.checkpoint.attempt: () for copy in view.copies} | dict(view.chains)
    head = newest_lineage([*view.records, *view.bases], told)
    faults, whole = incomplete(view.copies), complete(view.copies)
    for checkpoint in sorted({copy.checkpoint for copy in view.copies}, reverse=True):
        if checkpoint == taken:
            why = reason
        elif checkpoint not in whole:
            why = faults.get(checkpoint, "no copy that counts is left")
        elif head is None or not head.contains(checkpoint):
            why = "whole, but off the lineage: what a failed attempt saved never became history"
        elif checkpoint in view.intents:
            why = "whole, but about to be deleted from the remote tier"
        else:
            why = "whole, and older than the one taken" if taken else "whole, but not chosen"
        there = {copy.tier for copy in view.copies if copy.checkpoint == checkpoint}
        yield Candidate(
            checkpoint=checkpoint,
            taken=checkpoint == taken,
            why=why,
            tiers=tuple(tier for tier in TIERS if tier in there),
        )
