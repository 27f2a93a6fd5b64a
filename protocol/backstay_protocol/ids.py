"""Names of attempts and checkpoints, and how they are written.

An attempt is one integer, generation x 10^6 + n: a world that contains a newer pod always outranks
a world of older pods, and worlds of the same newest pod are counted by n.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ATTEMPTS_PER_GENERATION = 1_000_000
STEP_DIGITS = 12
ATTEMPT_DIGITS = 18
RANK_DIGITS = 5
_CHECKPOINT = re.compile(r"(\d{1,12})-(\d{1,18})")


def generation_of(attempt: int) -> int:
    """The generation in an attempt's high part."""
    return attempt // ATTEMPTS_PER_GENERATION


def first_attempt_of(generation: int) -> int:
    """The smallest attempt number that a world of this generation may take."""
    return generation * ATTEMPTS_PER_GENERATION + 1


def format_attempt(attempt: int) -> str:
    """Zero-padded, so that names sort as numbers do."""
    return f"{attempt:0{ATTEMPT_DIGITS}d}"


def format_rank(rank: int) -> str:
    """Zero-padded rank, the stem of a shard's file name."""
    return f"{rank:0{RANK_DIGITS}d}"


def attempt_for_people(attempt: int, first_generation: int) -> str:
    """`k.n`: k-th generation counted from the job's first one (1-based), n-th attempt of it."""
    k = generation_of(attempt) - first_generation + 1
    return f"{k}.{attempt % ATTEMPTS_PER_GENERATION}"


@dataclass(frozen=True, order=True)
class CheckpointId:
    """One checkpoint: all shards of one (step, attempt). Named by both, everywhere."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step:0{STEP_DIGITS}d}-{format_attempt(self.attempt)}"

    @staticmethod
    def parse(text: str) -> CheckpointId:
        """Read `<step>-<attempt>`, padded or not. Raises ValueError naming the text."""
        match = _CHECKPOINT.fullmatch(text)
        if not match:
            raise ValueError(f"not a checkpoint name: {text!r}; expected <step>-<attempt>")
        return CheckpointId(int(match[1]), int(match[2]))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        """How FastAPI reads and documents it: as its name, a string."""
        text = {"type": "str", "pattern": r"^\d{1,12}-\d{1,18}$"}
        return {
            "type": "function-plain",
            "function": {"type": "no-info", "function": cls._from_wire},
            "json_schema_input_schema": text,
            "serialization": {
                "type": "function-plain",
                "function": str,
                "return_schema": {"type": "str"},
            },
        }

    @classmethod
    def _from_wire(cls, value: Any) -> CheckpointId:
        return value if isinstance(value, cls) else cls.parse(str(value))
