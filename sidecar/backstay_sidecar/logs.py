"""The sidecar's logs: text for people, or JSON where BACKSTAY_LOG_FORMAT says so (in a cluster).

Main configures them before anything else; from then on every line says job, replica, attempt and
the step that this pod's ranks have come to, as far as they are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from backstay_protocol.loglines import JSON, JsonLines, Masks, TextLines, configure

_CHATTY = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "urllib3")


class Logs:
    """One per process."""

    def __init__(self, form: str) -> None:
        """In force at once, as `form` says (json; anything else is text)."""
        self.as_json = form == JSON
        self._mask = Masks()
        self._job: Mapping[str, object] = {}
        self._where: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._configure("")

    def belong_to(self, namespace: str, job: str, replica: int, secrets: Iterable[str]) -> None:
        """What the whole process is about, and what no line may show."""
        self._job = {"namespace": namespace, "job": job, "replica": replica}
        self._mask.hide(secrets)
        self._configure(f"replica-{replica}")

    def follow(self, where: Callable[[], tuple[int, int]]) -> None:
        """`where`: (attempt, step) of now; 0: not known. Called for each line, from any thread."""
        self._where = where

    def _configure(self, who: str) -> None:
        text = TextLines(self._mask, who)
        formatter = JsonLines(self._context, self._mask) if self.as_json else text
        configure(formatter, logging.INFO, _CHATTY)

    def _context(self) -> Mapping[str, object]:
        attempt, step = self._where()
        return {**self._job, "attempt": attempt or None, "step": step or None}
