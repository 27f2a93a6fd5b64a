"""Kubernetes quantities (`512Mi`, `1.5Gi`, `500m`), read and written."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** (i + 1) for i, unit in enumerate("kMGTP")},
    **{f"{unit}i": Decimal(1024) ** (i + 1) for i, unit in enumerate("KMGTP")},
}


def parse_quantity(value: object) -> Decimal | None:
    """The number that a quantity names, or None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    match = _QUANTITY.fullmatch(str(value).strip())
    return Decimal(match[1]) * _FACTORS[match[2] or ""] if match else None


def format_bytes(num_bytes: float) -> str:
    """For people: at most four digits and a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
