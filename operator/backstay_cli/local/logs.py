"""Following the logs of all containers, line by line, without being in the way of their bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_MOST_BYTES = 256 << 10


class LogTail:
    """Reads what was appended since the last look."""

    def __init__(self, tell: Callable[[int, str, str], None]) -> None:
        """`tell(replica, container, line)`."""
        self._tell = tell
        self._offsets: dict[Path, int] = {}
        self._partial: dict[Path, bytes] = {}

    def skip(self, log: Path) -> None:
        """Begin at the log's present end (what an earlier run wrote is not told again)."""
        self._offsets.setdefault(log, _size(log))

    def look(self, replica: int, container: str, log: Path) -> None:
        """Tell new whole lines of one log."""
        offset = self._offsets.get(log, 0)
        while _size(log) > offset:
            with open(log, "rb") as file:
                file.seek(offset)
                data = file.read(_MOST_BYTES)
            if not data:
                break
            offset += len(data)
            *lines, rest = (self._partial.get(log, b"") + data).split(b"\n")
            self._partial[log] = rest[-_MOST_BYTES:]
            for line in lines:
                self._tell(replica, container, line.decode(errors="replace").rstrip("\r"))
        self._offsets[log] = offset


def _size(log: Path) -> int:
    try:
        return os.stat(log).st_size
    except FileNotFoundError:
        return 0
