"""Every reason and condition that the operator can tell has a line in the docs."""

from __future__ import annotations

import re
from pathlib import Path

from backstay_operator.api import names

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"


def told_in_tables() -> set[str]:
    section = (
        PAGE.read_text(encoding="utf-8").split("## Conditions and reasons")[1].split("\n## ")[0]
    )
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {word for cell in cells for word in re.findall(r"\w+", cell)}


def test_each_condition_and_reason_is_explained() -> None:
    reasons = {value for name, value in vars(names).items() if name.startswith("REASON_")}
    assert reasons | set(names.CONDITIONS) <= told_in_tables()


def test_nothing_is_explained_that_is_never_told() -> None:
    known = {value for value in vars(names).values() if isinstance(value, str)}
    assert told_in_tables() - known <= {"condition", "reason", "Resumed"}
