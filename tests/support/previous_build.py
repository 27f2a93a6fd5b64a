"""The last build of the previous minor protocol version, taken out of the git history.

    build = unpack(folder)      # a PYTHONPATH: put it before everything else in an environment

It needs no environment of its own: the present one has all that it imports.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "trainer_lib", "sidecar", "operator")
NAMES = "protocol/backstay_protocol/names.py"


class NoHistory(Exception):
    """A shallow clone, no clone at all, or a history that begins later; says which."""


def unpack(folder: Path) -> str:
    """Unpack it under `folder`; the PYTHONPATH of it. Raises NoHistory."""
    commit = previous_commit()
    archive = _git("archive", commit, *PACKAGES)
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return os.pathsep.join(str(folder / package) for package in PACKAGES)


def previous_commit() -> str:
    """The parent of the commit that raised PROTOCOL_MINOR last. Raises NoHistory."""
    raised = _git("log", "-1", "--format=%H", "-G", "^PROTOCOL_MINOR = ", "--", NAMES)
    if not raised.strip():
        raise NoHistory(f"no commit changes PROTOCOL_MINOR in {NAMES}")
    before = f"{raised.decode().strip()}^"
    _git("cat-file", "-e", f"{before}:{NAMES}")
    return _git("rev-parse", before).decode().strip()


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise NoHistory("git is not installed") from error
    if done.returncode:
        raise NoHistory(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
