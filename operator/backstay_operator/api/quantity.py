"""Kubernetes quantities (`512Mi`, `1.5Gi`, `500m`), read and written."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})"
    r"(?:[eE]([+-]?\d{1,2})|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?"
)
_FACTORS = {
    "": Decimal(1),
    **{unit: Decimal(1000) ** -(i + 1) for i, unit in enumerate("mun")},
    **{unit: Decimal(1000) ** (i + 1) for i, unit in enumerate("kMGTPE")},
    **{f"{unit}i": Decimal(1024) ** (i + 1) for i, unit in enumerate("KMGTPE")},
}


def parse_quantity(value: object) -> Decimal | None:
    """The number that a quantity names, or None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    return Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTORS[match[3] or ""]


def format_bytes(num_bytes: float) -> str:
    """For people: at most four digits and a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def as_quantity(num_bytes: int) -> str:
    """The smallest whole number of MiB that holds so many bytes, for people to write: `1185Mi`."""
    mebibytes = -(-num_bytes // (1 << 20))
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
