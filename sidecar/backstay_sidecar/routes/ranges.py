"""The Range header of shard reads. Pure.

One range of bytes per request (RFC 9110, section 14): what is not understood as bytes is ignored,
what can't be satisfied, several ranges included, is 416.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ONE = re.compile(r"\s*([0-9]*)\s*-\s*([0-9]*)\s*")
_DIGITS = 19  # no file is longer than a 64-bit offset


class Unsatisfiable(Exception):
    """The range can't be served. The message says why."""


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, stop) of the whole."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """What is asked of `size` bytes; None: the whole. Raises Unsatisfiable."""
    unit, equals, ranges = (header or "").partition("=")
    if not equals or unit.strip().lower() != "bytes":
        return None
    if "," in ranges:
        raise Unsatisfiable("several ranges in one request; ask for one at a time")
    match = _ONE.fullmatch(ranges)
    if match is None or not (match[1] or match[2]) or max(map(len, match.groups())) > _DIGITS:
        raise Unsatisfiable(
            f"{ranges[:60]!r} is not a range; expected first-last, first- or -count"
        )
    first, last = match[1], match[2]
    if not first:
        return _suffix(int(last), size)
    start, stop = int(first), int(last) + 1 if last else size
    if last and stop <= start:
        raise Unsatisfiable(f"the range ends ({last}) before it begins ({first})")
    if start >= size:
        raise Unsatisfiable(f"the range begins at byte {start}; there are {size}")
    return ByteRange(start, min(stop, size))


def _suffix(count: int, size: int) -> ByteRange:
    if count == 0:
        raise Unsatisfiable("the last 0 bytes are no range")
    return ByteRange(max(0, size - count), size)
