"""The operator's logs: JSON or text, as the settings file says. Main configures them.

Every line that is written while a job is looked at says which: a worker opens `about_job` around
its pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from backstay_protocol.loglines import JsonLines, Masks, TextLines
from backstay_protocol.loglines import configure as configure_lines

_CHATTY = ("kopf", "httpx", "httpcore", "urllib3", "kubernetes", "aiohttp")
_job: ContextVar[tuple[str, str]] = ContextVar("job", default=("", ""))


@contextmanager
def about_job(namespace: str, name: str) -> Iterator[None]:
    """Lines of this task, and of those that it starts, are about this job."""
    token = _job.set((namespace, name))
    try:
        yield
    finally:
        _job.reset(token)


def configure(level: str, *, as_json: bool) -> None:
    """Everything to stderr. Raises ValueError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log.level is {level!r}; expected debug, info, warning or error")
    mask = Masks()
    formatter = JsonLines(_context, mask) if as_json else _Text(mask)
    configure_lines(formatter, number, _CHATTY)


class _Text(TextLines):
    """A person reads of many jobs in one log: the job stands before the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        namespace, name = _job.get()
        if name:
            record.message = f"{namespace}/{name}: {record.message}"
        return super().formatMessage(record)


def _context() -> Mapping[str, object]:
    namespace, name = _job.get()
    return {"namespace": namespace, "job": name} if name else {}
