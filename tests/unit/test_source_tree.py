"""The traps of the layout, guarded: each was met once and was hard to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_operator_folder_is_never_a_package() -> None:
    assert not list((ROOT / "operator").glob("*.py"))


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    command = [sys.executable, "-S", "-c", "import operator; operator.itemgetter"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_there_is_no_package_in_the_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_source_unpickles() -> None:
    forbidden = ("import pickle", "torch.load(", "torch.save(", "pickle.loads", "marshal.loads")
    folders = ("protocol", "trainer_lib", "sidecar", "operator")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for word in forbidden
        if word in path.read_text(encoding="utf-8")
    ]
    assert not found
