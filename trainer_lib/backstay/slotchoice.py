"""Which slot the next save may overwrite. Pure: from what slots hold and what the sidecar said.

A common step must stay in memory: ranks skew by a step, so a slot is given up only while another
one holds a step that all ranks are known to have published. With one slot its step must be complete
in another tier first.

Called by capture, again and again while it waits for the sidecar's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backstay_protocol.ids import CheckpointId

Chain = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlotContent:
    """One slot, and the checkpoint published in it, if any."""

    index: int
    checkpoint: CheckpointId | None
    usable: bool = True
    """Whether it is big enough for the next save (else it is still growing, or can't)."""


@dataclass(frozen=True)
class Word:
    """What is known of checkpoints elsewhere; 0 is "nothing"."""

    complete_step: int = 0
    """Newest step of the attempt that all ranks have published."""
    safe_step: int = 0
    """Newest step that is complete in local or neighbor, else durable."""


@dataclass(frozen=True)
class Choice:
    """Slots that may be withdrawn, best first."""

    now: tuple[int, ...]
    """At once."""
    at_last: tuple[int, ...]
    """When the bound has passed without a better word."""
    why: str
    """What is being waited for, if `now` is empty."""


def choose_slot(
    slots: Sequence[SlotContent], *, attempt: int, chain: Chain, word: Word, num_slots: int
) -> Choice:
    """Decide for a save of `attempt`, whose lineage is `chain`.

    `num_slots`: how many there will be; fewer may exist while others are still being made.
    """
    free = [s for s in slots if not _on_lineage(s.checkpoint, attempt, chain)]
    held = [s for s in slots if s not in free]
    usable = sorted((s for s in free if s.usable), key=lambda s: s.checkpoint is not None)
    if usable:
        return Choice(tuple(slot.index for slot in usable), (), "")
    held.sort(key=_age)
    if num_slots == 1:
        return _only_slot(held, word)
    if len(held) < 2:
        return Choice((), (), "the slots are not ready yet")
    return _among(held, attempt, chain, word)


def _age(slot: SlotContent) -> tuple[int, int]:
    assert slot.checkpoint is not None
    return slot.checkpoint.attempt, slot.checkpoint.step


def _only_slot(held: list[SlotContent], word: Word) -> Choice:
    usable = [slot for slot in held if slot.usable]
    if not usable:
        return Choice((), (), "the slot is not ready yet")
    step = _age(usable[0])[1]
    if step <= word.safe_step:
        return Choice((usable[0].index,), (), "")
    return Choice((), (), f"step {step}, in the only slot, is in no other tier yet")


def _among(held: list[SlotContent], attempt: int, chain: Chain, word: Word) -> Choice:
    """Several, all full. `held`: oldest first."""
    known = [slot for slot in held if _confirmed(slot.checkpoint, attempt, chain, word)]
    why = f"no word yet that all ranks have published step {_age(held[-1])[1]}"
    if not known:
        return Choice((), _indexes(held[:1]), why)
    newest = held.index(known[-1])
    return Choice(_indexes(held[:newest]), _indexes(held[newest + 1 :]), why)


def _indexes(slots: Sequence[SlotContent]) -> tuple[int, ...]:
    return tuple(slot.index for slot in slots if slot.usable)


def _confirmed(checkpoint: CheckpointId | None, attempt: int, chain: Chain, word: Word) -> bool:
    """Whether all ranks are known to have published it, as they have the base of an attempt."""
    assert checkpoint is not None
    if checkpoint.attempt == attempt:
        return checkpoint.step == word.complete_step
    return bool(chain) and (checkpoint.attempt, checkpoint.step) == chain[0]


def _on_lineage(checkpoint: CheckpointId | None, attempt: int, chain: Chain) -> bool:
    if checkpoint is None:
        return False
    if checkpoint.attempt == attempt:
        return True
    return any(checkpoint.attempt == older and checkpoint.step <= left for older, left in chain)
