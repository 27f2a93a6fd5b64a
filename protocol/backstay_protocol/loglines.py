"""Lines of logs: one JSON object a line for machines, or text for people. Secrets are masked.

Sidecar and operator configure their logs with it, each with a context of its own (their `logs.py`):
what every line is about. Nothing else writes to their stdout or stderr once it is in force.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

JSON = "json"
TEXT = "text"
FORMATS = (JSON, TEXT)
FIELDS = ("namespace", "job", "replica", "rank", "attempt", "step")
"""What a line may be about, in this order: of the record (`extra=`), else of the context."""
MASK = "***"
_SIGNED = re.compile(
    r"(X-Amz-(?:Signature|Security-Token|Credential)=|\bBearer )[^&\s\"'\\]+", re.IGNORECASE
)
_MASKED = rf"\g<1>{MASK}"

Context = Callable[[], Mapping[str, object]]

log = logging.getLogger("backstay.process")


class Masks:
    """Takes secrets out of a line. They may become known after the logs are configured."""

    def __init__(self) -> None:
        """Presigned URLs are always masked."""
        self._secrets: tuple[str, ...] = ()

    def hide(self, secrets: Iterable[str]) -> None:
        """These, too; empty ones are nothing."""
        plain = {*self._secrets, *filter(None, secrets)}
        escaped = {json.dumps(secret)[1:-1] for secret in plain}
        self._secrets = tuple(sorted(plain | escaped, key=len, reverse=True))

    def __call__(self, line: str) -> str:
        """The line without them."""
        for secret in self._secrets:
            line = line.replace(secret, MASK)
        return mask_signatures(line)


def mask_signatures(text: str) -> str:
    """The text without what lets others use a presigned URL, or a bearer, that stands in it."""
    return _SIGNED.sub(_MASKED, text)


class JsonLines(logging.Formatter):
    """One object a record: time (UTC), level, logger, message, what it is about, and an exception.

    An event (`extra={"event": kind, "fields": {...}}`) says its kind and fields by themselves.
    """

    def __init__(self, context: Context, mask: Masks) -> None:
        """`context`: asked for each line, from any thread."""
        super().__init__()
        self._context = context
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        tree: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        tree |= about(record, self._context)
        if hasattr(record, "event"):
            fields = dict(getattr(record, "fields", {}))
            tree["message"] = fields.pop("message", record.event)
            tree |= {"event": record.event, "fields": fields}
        if record.exc_info:
            tree["exception"] = self.formatException(record.exc_info)
        return self._mask(json.dumps(tree, default=str))


class TextLines(logging.Formatter):
    """A line for people, in UTC; `who` stands before the logger's name."""

    def __init__(self, mask: Masks, who: str = "") -> None:
        """`who` without spaces, or nothing."""
        prefix = "%(asctime)s.%(msecs)03dZ %(levelname)-7s "
        who = f"{who} ".replace("%", "%%") if who else ""
        super().__init__(f"{prefix}{who}%(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the exception's lines below it."""
        return self._mask(super().format(record))


def about(record: logging.LogRecord, context: Context) -> dict[str, object]:
    """What a record is about, as far as it is known."""
    around = context()
    found = {name: getattr(record, name, around.get(name)) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def configure(formatter: logging.Formatter, level: int, chatty: Iterable[str]) -> None:
    """Everything goes to stderr in this form: warnings and what nobody caught, too.

    `chatty`: loggers of libraries, of which only warnings and worse are shown.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in chatty:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("ended by a %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_type is SystemExit or found.exc_value is None:
        return
    name = found.thread.name if found.thread is not None else "?"
    error = (found.exc_type, found.exc_value, found.exc_traceback)
    log.error("thread %s ended by a %s", name, found.exc_type.__name__, exc_info=error)
