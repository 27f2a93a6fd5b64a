"""Logs: one JSON object a line for machines, or plain lines for people. Main configures them."""

from __future__ import annotations

import json
import logging
import sys
import time

FIELDS = ("job", "replica", "attempt", "step")
"""What a record may carry (`extra=`), beside time, level, logger and message."""
_CHATTY = ("kopf", "httpx", "httpcore", "urllib3", "kubernetes", "aiohttp")


class JsonFormatter(logging.Formatter):
    """One object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Times in UTC with milliseconds."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        tree: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        tree |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            tree["exception"] = self.formatException(record.exc_info)
        return json.dumps(tree, default=str)


def configure(level: str, *, as_json: bool) -> None:
    """Everything to stderr. Raises ValueError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log.level is {level!r}; expected debug, info, warning or error")
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))
