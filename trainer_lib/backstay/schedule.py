"""When a step is due for a save: from the words that the sidecar wrote into the control block.

Pure; called by checkpointer.py at every step, so it looks at five words and allocates nothing where
nothing is due. All ranks come to the same answer: the leader announces a step early enough for all
of them to see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backstay_protocol.control import Word
from backstay_protocol.manifest import FORCED, SCHEDULE


class Words(Protocol):
    """The control block, as far as it is read here."""

    def __getitem__(self, word: Word) -> int: ...


@dataclass(frozen=True)
class Due:
    """A save at this step."""

    reason: str
    """`schedule`: the tiers take it by their own schedules; `forced`: every tier."""
    replan: bool = False
    """All ranks plan anew in it."""


def due(words: Words, before: int, step: int) -> Due | None:
    """What to do at `step`; `before` is the step that was reported before it.

    An order for a step that the script left out (it reports every fourth) holds for the next one.
    """
    order = words[Word.SAVE_AT_STEP]  # negative: forced, by order of people or a drain
    forced = order < 0 and before < -order <= step
    replan = before < words[Word.REPLAN_AT_STEP] <= step
    if not (forced or replan or before < order <= step or _scheduled(words, step)):
        return None
    return Due(FORCED if forced else SCHEDULE, replan)


def _scheduled(words: Words, step: int) -> bool:
    old = step < words[Word.EVERY_FROM]
    every = words[Word.PREVIOUS_EVERY_STEPS if old else Word.EVERY_STEPS]
    return every > 0 and step % every == 0
