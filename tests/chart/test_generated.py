"""The generated pages are current, and cover everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.rendered_chart import schema

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_and_the_charts_readme_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reference_has_every_field_of_the_spec() -> None:
    page = (ROOT / "docs" / "crd-reference.md").read_text(encoding="utf-8")

    def fields(node: dict[str, object]) -> list[str]:
        inner = node.get("properties")
        found = []
        for name, child in inner.items() if isinstance(inner, dict) else ():
            found += [name, *fields(child)]
        return found

    assert [
        name for name in fields(schema()["properties"]["spec"]) if f"`{name}`" not in page
    ] == []


def test_every_value_of_the_chart_has_a_comment() -> None:
    text = (ROOT / "charts" / "backstay" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if row.rstrip().endswith("|  |")] == []
