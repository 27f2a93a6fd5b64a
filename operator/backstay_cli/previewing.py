"""What a restore would take now: by the leader, else by the same pure choice over what is in sight.

Used by `backstay restore`. It begins nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from backstay_cli.catalog.sight import Sight
from backstay_cli.client import SidecarClient
from backstay_cli.errors import CommandError
from backstay_cli.told import ToldWorld
from backstay_protocol.choice import RestoreView, choose
from backstay_protocol.errors import Refused
from backstay_protocol.explain import explain
from backstay_protocol.messages import RestorePreview
from backstay_protocol.names import URL_RESTORE_PREVIEW
from backstay_protocol.origins import OtherRun, run_to_list
from backstay_protocol.topology import ManualChoice

_BY_HAND = "backstay restore --dry-run"
"""Token of a choice that nobody has applied."""
_PREVIEW_SECONDS = 90.0
"""The leader lists the remote tier before it answers."""


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
        return ManualChoice.asked(
            _BY_HAND, step=self.step, attempt=self.attempt, run=self.run, fresh=self.fresh
        )

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
    try:
        return leader.get(RestorePreview, path, timeout=_PREVIEW_SECONDS)
    except Refused as error:
        if error.status != 404:
            raise
        raise CommandError(
            "the job's sidecars are of a version that can't tell what a restore would take",
            "ask its bucket: --bucket, --endpoint and --run; its next pods have a newer version",
        ) from error


def from_sight(
    run: str, sight: Sight, wanted: Wanted, told: ToldWorld, others: Iterable[OtherRun] = ()
) -> RestorePreview:
    """As the next attempt's leader would decide, with its claim taken and the remote tier listed.

    `told`: what the job says by itself; `others`: other runs that were listed.
    """
    view = RestoreView(
        attempt=max(sight.attempts, default=0) + 1,
        world_size=told.world_size or sight.world_size,
        records=sight.records,
        bases=sight.bases,
        copies=sight.copies,
        chains=sight.chains,
        remote_configured=sight.remote,
        claimed=sight.remote,
        listed=sight.remote,
        intents=sight.intents,
        others={other.run: other for other in others},
        manual=wanted.choice or told.restore.choice,
        quarantine_after=told.restore.quarantine_after,
    )
    found = explain(view, choose(view))
    return RestorePreview(
        run=run,
        attempt=0,
        outcome=found.outcome,
        reason=found.reason,
        checkpoint=found.checkpoint,
        checkpoint_run=found.origin_run,
        candidates=found.candidates,
        more_candidates=found.more,
    )


def other_run(sight: Sight, wanted: Wanted, told: ToldWorld) -> str:
    """The run that must be listed, too; empty: none."""
    return run_to_list(wanted.choice or told.restore.choice, (*sight.records, *sight.bases))
