"""The JSON lines in which the trainer tells its losses: written by train.py, read by demo.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

ENV_LOSSES = "CHAR_GPT_LOSSES"  # file for the lines; set by the demo, read by the trainer


class LossLog:
    """Writes lines to standard output and to the end of a file, which all ranks may share.

    A line is one write to a file opened for appending: whole or not there, whatever is killed.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        self._file = open(path, "a", buffering=1) if path else None  # noqa: SIM115

    def write(self, *, every_rank: bool = False, **fields: Any) -> None:
        """One line, by rank 0 or by every rank, out of this process's hands when this returns."""
        if self._rank and not every_rank:
            return
        line = json.dumps(fields | {"time": round(time.time(), 3)})
        print(line, flush=True)
        if self._file:
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


class LossReader:
    """Reads the lines of a file while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take in what is new, whole lines only."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]

    @property
    def loss(self) -> float | None:
        """The newest loss."""
        return next((line["loss"] for line in reversed(self.lines) if "loss" in line), None)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0: not said yet."""
        return next((line["num_steps"] for line in self.lines if "num_steps" in line), 0)
