"""Quantities as Kubernetes writes them, and sizes as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_operator.api.quantity import format_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1Ki", 1024),
        ("1.5Gi", 1.5 * 2**30),
        ("2M", 2e6),
        (7, 7),
        ("500m", 0.5),
        ("0", 0),
        ("250u", 0.00025),
        ("1e3", 1000),
        ("2E", 2e18),
        (".5", 0.5),
        ("5.", 5),
    ],
)
def test_quantities_are_read_as_kubernetes_does(text: Any, number: float) -> None:
    parsed = parse_quantity(text)
    assert parsed is not None
    assert float(parsed) == number


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "-1", "1e3x", None, True, [], "1gi"])
def test_what_is_no_quantity_is_none(text: Any) -> None:
    assert parse_quantity(text) is None


def test_bytes_are_shown_in_binary_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
    ]
