"""Which rank processes live, and whether those that died had come as far as restore().

Under torchrun a rank's death shows nowhere else: its agent starts a new one inside the container.
A script that can't even be imported would so be started for ever; `early_deaths` counts that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backstay_cli.local import tree
from backstay_cli.local.tree import ProcessId
from backstay_protocol.control import ControlBlock, State, Word
from backstay_protocol.errors import BackstayError
from backstay_protocol.layout import MemoryLayout

_TAIL_BYTES = 16 << 10
_LAST_WORDS = re.compile(r"^(?:\[[^]]*\]:)?\s*[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")


@dataclass(frozen=True, kw_only=True)
class TrainerRoot:
    """Where to look for one replica's ranks."""

    replica: int
    shim: int
    memory: Path
    first_rank: int


@dataclass(frozen=True, kw_only=True)
class Death:
    """A rank process that is no more."""

    replica: int
    rank: int
    joined: bool


class Census:
    """Taken again and again; each `look` compares with the one before."""

    def __init__(self) -> None:
        """Nobody is known."""
        self._living: dict[int, tuple[TrainerRoot, ProcessId]] = {}
        self._joined: set[ProcessId] = set()
        self._early: dict[int, int] = {}

    @property
    def early_deaths(self) -> int:
        """The most deaths in a row of one rank before it joined."""
        return max(self._early.values(), default=0)

    def look(self, roots: Mapping[int, TrainerRoot]) -> list[Death]:
        """Deaths since the last look. `roots`: by replica, those whose trainer container runs."""
        table = tree.children_by_parent()
        living: dict[int, tuple[TrainerRoot, ProcessId]] = {}
        for root in roots.values():
            for local, process in tree.rank_processes(root.shim, table).items():
                living[root.first_rank + local] = (root, process)
                self._note_join(root, root.first_rank + local, process)
        deaths = [
            self._bury(root, rank, process)
            for rank, (root, process) in self._living.items()
            if rank not in living or living[rank][1] != process
        ]
        self._living = living
        return deaths

    def _note_join(self, root: TrainerRoot, rank: int, process: ProcessId) -> None:
        if process not in self._joined and _has_joined(root.memory, rank, process.pid):
            self._joined.add(process)
            self._early[rank] = 0

    def _bury(self, root: TrainerRoot, rank: int, process: ProcessId) -> Death:
        self._note_join(root, rank, process)
        joined = process in self._joined
        self._joined.discard(process)
        if not joined:
            self._early[rank] = self._early.get(rank, 0) + 1
        return Death(replica=root.replica, rank=rank, joined=joined)


def _has_joined(memory: Path, rank: int, pid: int) -> bool:
    try:
        block = ControlBlock(MemoryLayout(str(memory)).control(rank), create=False)
    except (OSError, BackstayError):
        return False
    try:
        return block[Word.PID] == pid and block[Word.STATE] >= State.RESTORING
    finally:
        block.close()


def last_words(log: Path) -> str:
    """The line of a log that says most likely why a program ended."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    telling = [line.strip() for line in lines if _LAST_WORDS.match(line)]
    rest = [line.strip() for line in lines if line.strip()]
    return (telling or rest or [""])[-1][:300]
