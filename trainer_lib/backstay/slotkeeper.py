"""Gets a slot that the next save may overwrite: waits, bounded, and withdraws its manifest.

Called by capture, in the training thread: each wait here is stall. What was waited for in vain
is not waited for again until it has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from backstay.savejob import Skip
from backstay.slotchoice import Chain, Choice, SlotContent, Word, choose_slot
from backstay.slotmap import Mapping, Slot, SlotMap
from backstay_protocol import slots as protocol
from backstay_protocol.clock import Clock
from backstay_protocol.control import Word as ControlWord
from backstay_protocol.errors import BackstayError
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout

POLL_SECONDS = 0.002
LONGEST_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long a save may hold up training, at most, before it is given up."""

    word_seconds: float = 1.0
    """For the word that all ranks published the newest step, before it is overwritten."""
    slot_seconds: float = 5.0
    """For a slot that may be withdrawn and that no reader holds."""
    reserve_seconds: float = 60.0
    """For slots that are still being made, or must grow."""
    copy_seconds: float = 300.0
    """For the copy of an earlier save."""


class SlotKeeper:
    """The slots of one rank and what this process knows to be in them."""

    def __init__(
        self,
        memory: MemoryLayout,
        rank: int,
        slots: SlotMap,
        told: Callable[[ControlWord], int],
        bounds: Bounds,
        clock: Clock,
    ) -> None:
        """`told` reads a word of the control block (0: nothing)."""
        self._memory, self._rank = memory, rank
        self._slots = slots
        self._told = told
        self._bounds = bounds
        self._clock = clock
        self._contents = {slot.index: self._content_left_in(slot) for slot in slots.slots}
        self._no_word_at = -1
        self._patient = True

    def published(self, index: int, checkpoint: CheckpointId) -> None:
        """A slot holds this one now."""
        self._contents[index] = checkpoint

    def acquire(self, size: int, attempt: int, chain: Chain) -> tuple[Slot, Mapping]:
        """A withdrawn slot that holds `size` bytes. Raises Skip when there is none in time."""
        if not self._slots.wait_for(size, self._bounds.reserve_seconds):
            raise Skip(self._slots.trouble or "its slots are still being made")
        slot = self._withdraw(size, attempt, chain)
        assert slot.mapping is not None
        return slot, slot.mapping

    def _withdraw(self, size: int, attempt: int, chain: Chain) -> Slot:
        begun, pause = self._clock.monotonic(), POLL_SECONDS
        while True:
            waited = self._clock.monotonic() - begun
            choice = self._choose(size, attempt, chain)
            candidates = choice.now or (choice.at_last if self._no_word(waited) else ())
            for index in candidates:
                with suppress(protocol.SlotBusy):
                    return self._withdraw_one(index)
            if waited >= self._bounds.slot_seconds or not self._patient:
                self._patient = False
                being_read = "the sidecar is still reading the slot that is next"
                raise Skip(being_read if candidates else choice.why)
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)

    def _withdraw_one(self, index: int) -> Slot:
        fault("capture.before_withdraw")
        protocol.withdraw(self._memory, self._rank, index)
        fault("capture.after_withdraw")
        self._contents[index] = None
        self._patient = True
        return self._slots.slots[index]

    def _choose(self, size: int, attempt: int, chain: Chain) -> Choice:
        contents = [
            SlotContent(slot.index, self._content_of(slot), slot.capacity >= size)
            for slot in self._slots.slots
        ]
        complete = self._told(ControlWord.COMPLETE_STEP)
        safe = max(self._told(ControlWord.SAFE_STEP), self._told(ControlWord.DURABLE_STEP))
        only_one = sum(slot.usable for slot in contents) == 1 and not self._slots.busy
        return choose_slot(
            contents,
            attempt=attempt,
            chain=chain,
            word=Word(complete, safe),
            num_slots=1 if only_one else len(contents),
        )

    def _no_word(self, waited: float) -> bool:
        """Whether to do without the word of the sidecar."""
        complete = self._told(ControlWord.COMPLETE_STEP)
        if complete == self._no_word_at or not self._told(ControlWord.SIDECAR_TIME):
            return True
        if waited >= self._bounds.word_seconds:
            self._no_word_at = complete
            return True
        return False

    def _content_left_in(self, slot: Slot) -> CheckpointId | None:
        """By an earlier process of this rank."""
        try:
            manifest = protocol.peek(self._memory, self._rank, slot.index)
        except (OSError, BackstayError):
            return None  # not a manifest: nothing that anybody could restore
        return manifest.checkpoint if manifest else None

    def _content_of(self, slot: Slot) -> CheckpointId | None:
        """As published, unless the sidecar has struck it out since."""
        content = self._contents[slot.index]
        path = self._memory.slot_manifest(self._rank, slot.index)
        return content if content is not None and os.path.exists(path) else None
