"""A `kubectl` for tests of the command: a real program on the PATH that answers from a file.

    kubectl = FakeKubectl(tmp_path, monkeypatch)
    kubectl.add("trainingjobs.backstay.dev", tree)
    kubectl.forbid("secret")

It knows `get`, `apply --dry-run=server`, `logs`, `config view`, `version` and a `port-forward` that
carries bytes to a TCP address. Words of refusals are the real one's.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).parent / "local_fakes" / "kubectl.py"


class FakeKubectl:
    """One cluster, as kubectl shows it to one person."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._state = folder / "kubectl.json"
        self._calls = folder / "kubectl.calls"
        self._tree: dict[str, Any] = {
            "objects": [],
            "forbidden": [],
            "unknown": [],
            "apply": "",
            "logs": {},
            "forwards": {},
            "namespace": "default",
            "down": False,
            "broken": "",
        }
        program = folder / "bin" / "kubectl"
        program.parent.mkdir()
        words = [sys.executable, str(_PROGRAM), str(self._state), str(self._calls)]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        self._write()

    def _write(self) -> None:
        self._state.write_text(json.dumps(self._tree))

    def add(self, kind: str, tree: dict[str, Any]) -> None:
        """An object that `get KIND` shows."""
        self._tree["objects"].append([kind, tree])
        self._write()

    def remove(self, kind: str) -> None:
        """All of a kind."""
        self._tree["objects"] = [one for one in self._tree["objects"] if one[0] != kind]
        self._write()

    def forbid(self, *kinds: str) -> None:
        """The person may not read these."""
        self._tree["forbidden"] += kinds
        self._write()

    def set(self, **state: Any) -> None:
        """`apply` (a refusal's words), `down`, `broken` (last words), `namespace`, `logs`, ..."""
        self._tree |= state
        self._write()

    @property
    def calls(self) -> list[str]:
        """What it was called with."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []


def named(name: str, *, labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """An object with a name."""
    return {"metadata": {"name": name, "labels": labels or {}}, **more}
