"""Whether the hints still come: a LIST that shows what no watch brought tells a dead watch.

Pure but for what it was told. `/healthz` asks it; the kubelet then restarts the operator.
"""

from __future__ import annotations

from backstay_operator.handlers.queue import Key

STALE_SECONDS = 90.0


class Watchdog:
    """Compares resourceVersions of jobs by watch and by LIST."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._watched: dict[Key, str] = {}
        self._missing: dict[Key, tuple[str, float]] = {}

    def saw(self, key: Key, version: str) -> None:
        """The watch brought it."""
        self._watched[key] = version
        if key in self._missing and self._missing[key][0] == version:
            del self._missing[key]

    def gone(self, key: Key) -> None:
        """The job is no more."""
        self._watched.pop(key, None)
        self._missing.pop(key, None)

    def listed(self, key: Key, version: str, now: float) -> None:
        """A LIST showed it."""
        if self._watched.get(key) == version:
            self._missing.pop(key, None)
        elif self._missing.get(key, ("", 0.0))[0] != version:
            self._missing[key] = (version, now)

    def stale(self, now: float) -> str:
        """The job whose change no watch brought for too long; empty: all is well."""
        for (namespace, name), (_, since) in self._missing.items():
            if now - since > STALE_SECONDS:
                return f"{namespace}/{name}"
        return ""
