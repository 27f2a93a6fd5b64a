"""The bundle's file: what is in it, what is missing and why. Every byte passes the masker."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay_cli.bundle.mask import Masker
from backstay_cli.errors import UsageError
from backstay_protocol import codec
from backstay_protocol.errors import BackstayError

ROOT = "backstay-bundle"
INDEX_FILE = "index.json"
MISSING_FILE = "MISSING"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is taken."""

    pods: int = 20
    """Pods whose logs and sidecars are looked at; those in trouble first."""
    log_bytes: int = 1 << 20
    """Of each log, its end."""
    keys: int = 100_000
    """Of a listing."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of the bundle."""

    path: str
    what: str
    bytes: int
    cut: bool = False
    """Only its end is there."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """index.json: what the bundle holds; `-o json` prints it."""

    about: str
    created: float
    command: str
    """Version of the command."""
    files: tuple[Entry, ...]
    missing: tuple[str, ...]


class Bundle:
    """Collects files; threads may add at once. `write` makes the archive in one rename."""

    def __init__(self, about: str, masker: Masker, limits: Limits) -> None:
        """`about`: the job, for people."""
        self.about = about
        self.masker = masker
        self.limits = limits
        self._lock = threading.Lock()
        self._files: dict[str, tuple[Entry, bytes]] = {}
        self._missing: list[str] = []

    def text(self, path: str, text: str, what: str, *, cut: bool = False) -> None:
        """A text file, masked; the end of one that is too long."""
        data = self.masker.text(text).encode()
        self._put(path, data, what, cut)

    def log(self, path: str, data: bytes, what: str) -> None:
        """A log: its end, from a whole line on."""
        cut = len(data) > self.limits.log_bytes
        if cut:
            data = data[-self.limits.log_bytes :].partition(b"\n")[2]
        self.text(path, data.decode(errors="replace"), what, cut=cut)

    def json(self, path: str, value: Any, what: str) -> None:
        """A message or plain values, masked."""
        tree = self.masker.tree(codec.to_plain(value))
        self._put(path, _pretty(tree), what, False)

    def missing(self, path: str, why: object) -> None:
        """What should be there and is not; a line of MISSING."""
        line = " ".join(f"{path}: {why}".split())
        with self._lock:
            self._missing.append(self.masker.text(line))

    @contextmanager
    def attempt(self, path: str) -> Iterator[None]:
        """What goes wrong within is told as missing, and the rest goes on."""
        try:
            yield
        except (BackstayError, OSError, ValueError, KeyError) as error:
            self.missing(path, error)

    def fetch(self, path: str, what: str, get: Callable[[], Any]) -> None:
        """Add what `get` gives, as JSON; or that it is missing."""
        with self.attempt(path):
            self.json(path, get(), what)

    def _put(self, path: str, data: bytes, what: str, cut: bool) -> None:
        with self._lock:
            entry = Entry(path=path, what=what, bytes=len(data), cut=cut)
            self._files[path] = (entry, data)

    def index(self, created: float, command: str) -> Index:
        """What is there so far."""
        with self._lock:
            return Index(
                about=self.about,
                created=created,
                command=command,
                files=tuple(entry for _, (entry, _) in sorted(self._files.items())),
                missing=tuple(self._missing),
            )

    def write(self, out: Path, index: Index) -> None:
        """Make the archive (mode 0600). Raises UsageError where it can't be made."""
        parts = {path: data for path, (_, data) in self._files.items()}
        parts[INDEX_FILE] = _pretty(codec.to_plain(index))
        if index.missing:
            parts[MISSING_FILE] = "".join(f"{line}\n" for line in index.missing).encode()
        partial = ""
        try:
            descriptor, partial = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
            with os.fdopen(descriptor, "wb") as file:
                _pack(file, parts, int(index.created))
            os.replace(partial, out)
        except OSError as error:
            if partial:
                Path(partial).unlink(missing_ok=True)
            raise UsageError(f"--out: {out} can't be written: {error.strerror}") from error


def _pack(file: Any, parts: dict[str, bytes], created: int) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path, data in sorted(parts.items()):
            member = tarfile.TarInfo(f"{ROOT}/{path}")
            member.size, member.mtime, member.mode = len(data), created, 0o600
            archive.addfile(member, io.BytesIO(data))


def _pretty(tree: Any) -> bytes:
    return json.dumps(tree, indent=1, sort_keys=True).encode() + b"\n"
