"""What the leader says (GET /v1/job), turned into events and into facts for decisions.

Polled, because the leader's sidecar may come and go; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx

from backstay_cli.local.events import Event, Notice, Progress, RestoreBegun, RestoreDone
from backstay_cli.local.incidents import Incidents
from backstay_operator.decide import LeaderFacts
from backstay_operator.observe.leader import facts_of
from backstay_protocol import codec
from backstay_protocol.clock import Clock
from backstay_protocol.errors import ProtocolError
from backstay_protocol.ids import attempt_for_people
from backstay_protocol.messages import JobView, RestoreView
from backstay_protocol.names import PORT_API, URL_JOB

_BEGINNING = ("Joining", "Restoring")
_PROGRESS_SECONDS = 1.0
_MOST_RESTORES = 100


class LeaderWatch:
    """The newest word of the leader."""

    def __init__(
        self,
        host: str,
        token: str,
        first_generation: int,
        incidents: Incidents,
        emit: Callable[[Event], None],
        clock: Clock,
    ) -> None:
        """`host`: address of replica 0."""
        self.view: JobView | None = None
        """The last answer, kept while the leader is away."""
        self.reachable = False
        self._first_generation = first_generation
        self._incidents = incidents
        self._emit = emit
        self._clock = clock
        self._phase = ""
        self._told_restores: list[tuple[int, float]] = []
        self._told_warnings: set[str] = set()
        self._told_progress: tuple[object, ...] = ()
        self._progress_at = 0.0
        self._client = httpx.AsyncClient(
            base_url=f"http://{host}:{PORT_API}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(3.0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def poll(self) -> JobView | None:
        """Ask once. None: no answer."""
        try:
            answer = await self._client.get(URL_JOB)
            answer.raise_for_status()
            view = codec.loads(JobView, answer.content)
        except (httpx.HTTPError, ProtocolError):
            self.reachable = False
            return None
        self.reachable = True
        self._heard(view)
        return view

    def facts(self) -> LeaderFacts | None:
        """For `decide`; None while the leader does not answer."""
        view = self.view
        if view is None or not self.reachable:
            return None
        facts = facts_of(view)
        # Hung trainers are found by containers' times, which a stopped machine bends here.
        return replace(facts, last_steps={}) if facts is not None else None

    def attempt_name(self, attempt: int) -> str:
        """`k.n`, for people."""
        return attempt_for_people(attempt, self._first_generation) if attempt else "-"

    def _heard(self, view: JobView) -> None:
        now = self._clock.time()
        if view.phase in _BEGINNING and self._phase not in _BEGINNING:
            self._emit(RestoreBegun(time=now, message=view.message))
        self._phase = view.phase
        self.view = view
        for restore in view.restores:
            self._tell_restore(restore)
        for warning in view.warnings:
            if warning not in self._told_warnings:
                self._told_warnings.add(warning)
                self._emit(Notice(time=now, level="warning", text=warning))
        recovered = self._incidents.saw(view, now)
        if recovered is not None:
            self._emit(recovered)
        self._tell_progress(view, now)

    def _tell_restore(self, restore: RestoreView) -> None:
        key = (restore.attempt, restore.finished)
        if key in self._told_restores:
            return
        self._told_restores = [*self._told_restores[-_MOST_RESTORES:], key]
        self._emit(
            RestoreDone(
                time=restore.finished,
                attempt=restore.attempt,
                attempt_name=self.attempt_name(restore.attempt),
                base=str(restore.base) if restore.base else None,
                base_step=restore.began_at,
                bytes_by_tier=restore.bytes_by_tier,
                lost_steps=restore.lost_steps,
                seconds=restore.seconds,
                bad=restore.bad,
                reason=restore.reason,
            )
        )

    def _tell_progress(self, view: JobView, now: float) -> None:
        newest = newest_steps(view)
        durable = view.newest_durable.step if view.newest_durable else -1
        state = (view.step, view.attempt, view.phase, newest, durable)
        if state == self._told_progress or now - self._progress_at < _PROGRESS_SECONDS:
            return
        self._told_progress, self._progress_at = state, now
        self._emit(
            Progress(
                time=now,
                step=view.step,
                attempt=view.attempt,
                attempt_name=self.attempt_name(view.attempt),
                phase=view.phase,
                newest=newest,
                durable_step=durable,
                warnings=view.warnings,
            )
        )


def newest_steps(view: JobView) -> dict[str, int]:
    """Tier -> newest step that is complete there."""
    return {tier.tier: tier.newest.step for tier in view.tiers if tier.newest is not None}
