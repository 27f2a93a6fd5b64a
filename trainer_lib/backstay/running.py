"""A rank whose training has begun: reports steps, saves what is due, and ends well.

Made by the Checkpointer after the go-ahead. Nothing here raises or blocks without bound, but for
mistakes in a call and for `wait` (docs/guarantees.md, 5).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay import preflight
from backstay.attachment import Attachment
from backstay.capture import CaptureEngine, SaveResult
from backstay.durability import Reached, wait_for_others, wait_for_tier
from backstay.errors import MisuseError, UnsupportedValue
from backstay.metadata import plain_json
from backstay.restore import Joined, Messages
from backstay.schedule import due
from backstay.settings import Settings
from backstay.structure import Structure
from backstay.telling import teller, warn
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.control import State, Word
from backstay_protocol.errors import BackstayError
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import FORCED, SCHEDULE
from backstay_protocol.messages import CaptureNotice
from backstay_protocol.names import MEMORY

logger = logging.getLogger("backstay")

COPY_SECONDS = 300.0
RETRY_SECONDS = 1.0
PERSIST_SECONDS = 60.0
OTHERS_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """What the script said about its saves; see Checkpointer."""

    gradients: bool = False
    overlap: bool = True
    replicated: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Running:
    """Saves of one attempt. Used from the training thread only."""

    def __init__(
        self,
        state: Mapping[str, Any],
        settings: Settings,
        attachment: Attachment,
        joined: Joined,
        options: CaptureOptions,
    ) -> None:
        """`joined` is the go-ahead. Raises UnsupportedValue: nothing was trained yet."""
        point, reply = joined.point, joined.reply
        self._settings = settings
        self._attachment = attachment
        self._words = attachment.words
        self._client = attachment.client
        self._tiers = reply.tiers or (MEMORY,)
        self._attempt = point.attempt
        self._chain = joined.decision.chain
        self._beside_leader = reply.replica == 0 and settings.world_size > settings.local_world_size
        self._metadata = options.metadata
        self._tell = teller(settings)
        self._begun_at = self._step = point.step
        self._given = bool(point.run)
        """Another run's checkpoint was loaded: this run has none of its own yet."""
        self._went_back = False
        self._told_of_metadata = False
        self._last: SaveResult | None = None
        self._last_reason = SCHEDULE
        self._base = point.checkpoint if not point.run else None
        self._engine = CaptureEngine(
            state,
            memory=attachment.memory,
            run=reply.run,
            rank=settings.rank,
            world_size=settings.world_size,
            replica=reply.replica,
            control=attachment.words,
            num_slots=reply.slots,
            gradients=options.gradients,
            overlap=options.overlap,
            replicated=options.replicated,
            notify=self._notify,
        )
        structure = self._engine.check()
        attachment.begin(point.attempt, point.step)
        self._warn_of_what_is_wanting(structure, joined)

    def _warn_of_what_is_wanting(self, structure: Structure, joined: Joined) -> None:
        settings = self._settings
        if settings.local_rank != 0:
            return
        seen = preflight.observe(
            self._client, settings.volume, structure, joined.reply, settings.local_world_size
        )
        for warning in preflight.warnings(seen, of_the_job=settings.rank == 0):
            warn(warning)

    def _notify(self, notice: CaptureNotice) -> None:
        self._client.notify(notice, self._settings.notice_seconds)

    # --- while training --------------------------------------------------------------------------

    def step(self, step: int, metadata: Mapping[str, Any] | None) -> None:
        """Checkpointer.step."""
        before = self._step
        if step <= before:
            self._refuse_to_go_back(step)
            return
        self._step = step
        self._attachment.report(step)
        order = due(self._words, before, step)
        if order is not None:
            self._save(order.reason, metadata, replan=order.replan)

    def save(self, step: int | None, metadata: Mapping[str, Any] | None) -> SaveResult:
        """Checkpointer.save."""
        if step is not None and step < self._step:
            return not_saved(step, f"step {step} is over, the last one reported is {self._step}")
        replan = False
        if step is not None and step > self._step:
            order = due(self._words, self._step, step)
            replan = order is not None and order.replan
            self._step = step
            self._attachment.report(step)
        saved = self._save(FORCED, metadata, replan=True) if replan else self._force(metadata)
        saved.settle = self._engine.wait
        return saved

    def wait(self, tier: str | None, timeout: float | None) -> bool:
        """Checkpointer.wait."""
        if tier is None:
            return self._engine.wait(timeout)
        deadline = float("inf") if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
        if tier not in self._tiers:
            raise MisuseError(
                f"wait(tier={tier!r}): this job has {', '.join(self._tiers)}; name one of them, or "
                f"configure spec.checkpoint.{tier}"
            )
        if not self._engine.wait(timeout) or (self._last and not self._last.published):
            return False
        checkpoint = self._newest()
        if checkpoint is None:
            return True
        left = max(0.0, deadline - SYSTEM_CLOCK.monotonic())
        return self._wait_for(checkpoint, tier, left).reached

    def _refuse_to_go_back(self, step: int) -> None:
        if self._step == self._begun_at:
            raise MisuseError(
                f"step({step}) after a restore to step {self._begun_at}: report how many steps are "
                f"done in all, the first one here is {self._begun_at + 1} (in the usual loop: "
                "checkpointer.step(step + 1))"
            )
        if not self._went_back:
            self._went_back = True
            warn(f"step({step}) after step({self._step}): steps only grow; it is ignored")

    def _save(
        self,
        reason: str,
        metadata: Mapping[str, Any] | None,
        *,
        replan: bool = False,
        overlap: bool | None = None,
    ) -> SaveResult:
        self._last_reason = reason
        self._last = self._engine.save(
            self._step,
            self._attempt,
            chain=self._chain,
            reason=reason,
            metadata={**self._metadata, **self._plain(metadata)},
            replan=replan,
            overlap=overlap,
        )
        return self._last

    def _plain(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """A checkpoint without its metadata is worth more than none."""
        try:
            return plain_json(metadata)
        except UnsupportedValue as error:
            if not self._told_of_metadata:
                self._told_of_metadata = True
                warn(f"step {self._step} is saved without the metadata of its call: {error}")
            return {}

    def _force(self, metadata: Mapping[str, Any] | None, overlap: bool | None = None) -> SaveResult:
        """A save of this step for every tier; if it is saved already, every tier is asked."""
        last = self._last
        if last is None or last.step != self._step or (last.done.is_set() and not last.published):
            return self._save(FORCED, metadata, overlap=overlap)
        if self._last_reason != FORCED:
            self._last_reason = FORCED
            self._persist(last)
        return last

    def _persist(self, saved: SaveResult) -> None:
        """In the background: the sidecar may not even know the checkpoint yet."""
        thread = threading.Thread(
            target=self._ask_to_persist, args=(saved,), name="backstay-persist", daemon=True
        )
        thread.start()

    def _ask_to_persist(self, saved: SaveResult) -> None:
        saved.done.wait(COPY_SECONDS)
        if saved.published:
            self._persist_now(CheckpointId(saved.step, saved.attempt), PERSIST_SECONDS)

    def _persist_now(self, checkpoint: CheckpointId, bound_seconds: float) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + bound_seconds
        while True:
            try:
                self._client.persist(checkpoint)
                return
            except BackstayError as error:
                if SYSTEM_CLOCK.monotonic() > deadline:
                    logger.warning("the tiers could not be asked for %s: %s", checkpoint, error)
                    return
            SYSTEM_CLOCK.sleep(RETRY_SECONDS / 2)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, timeout_seconds: float) -> None:
        """The last save, and wait until it is as safe as the job can make it. Bounded."""
        deadline = SYSTEM_CLOCK.monotonic() + timeout_seconds
        self._words[Word.STATE] = State.FINISHING
        outermost = self._tiers[-1]
        try:
            checkpoint = self._last_checkpoint(deadline)
        except _NotSaved as error:
            warn(f"the last step, {self._step}, could not be saved: {error}")
            checkpoint = None
        if checkpoint is not None:
            left = max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            got = self._wait_for(checkpoint, outermost, left)
            if got.reached:
                logger.info("step %d is complete in %s", checkpoint.step, outermost)
            else:
                warn(
                    f"step {checkpoint.step} did not reach the {outermost} tier within "
                    f"{timeout_seconds:.0f} s: {got.why}"
                )
        self._words[Word.STATE] = State.FINISHED
        if self._beside_leader:
            wait_for_others(self._client, OTHERS_SECONDS)

    def _last_checkpoint(self, deadline: float) -> CheckpointId | None:
        """The checkpoint that has to be safe at the end; None if there is nothing to save."""
        if self._step == self._begun_at and self._last is None and not self._given:
            if self._base is not None:  # an earlier process may have died while it waited for this
                self._persist_now(self._base, 2 * RETRY_SECONDS)
            return self._base
        messages = Messages(self._tell, SYSTEM_CLOCK)
        while True:
            saved = self._force(None, overlap=False)
            self._engine.wait(COPY_SECONDS)
            if saved.published:
                return CheckpointId(saved.step, saved.attempt)
            if SYSTEM_CLOCK.monotonic() + RETRY_SECONDS > deadline:
                raise _NotSaved(saved.why or "its copy is still under way")
            messages(f"the last step can't be saved yet: {saved.why}")
            SYSTEM_CLOCK.sleep(RETRY_SECONDS)

    def _newest(self) -> CheckpointId | None:
        if self._last is not None and self._last.published:
            return CheckpointId(self._last.step, self._last.attempt)
        return self._base

    def _wait_for(self, checkpoint: CheckpointId, tier: str, seconds: float) -> Reached:
        return wait_for_tier(self._client, self._words, checkpoint, tier, seconds, self._tell)

    def close(self) -> None:
        """Let go of the engine's thread, hook and mappings."""
        self._engine.close()


class _NotSaved(Exception):
    """The last save was given up; the text says why."""


def not_saved(step: int, why: str) -> SaveResult:
    """A save that did not take place."""
    result = SaveResult(step, 0, why=why)
    result.done.set()
    return result
