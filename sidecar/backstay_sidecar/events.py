"""The sidecar's event bus: what happened, for GET /v1/events and for the log.

`Events.emit` is handed to everything that has something to tell. It never blocks or raises and may
be called from any thread. The newest events are kept for those who connect later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from backstay_protocol import codec
from backstay_protocol.clock import Clock
from backstay_protocol.ids import CheckpointId

KEPT_EVENTS = 512
QUEUED_EVENTS = 512  # a listener that is further behind misses events, and is told so

log = logging.getLogger("backstay.events")


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    number: int
    time: float
    kind: str
    fields: dict[str, Any]

    @property
    def plain(self) -> dict[str, Any]:
        """As it goes onto the wire."""
        return {
            "number": self.number,
            "time": self.time,
            "kind": self.kind,
            **codec.to_plain(self.fields),
        }


class Events:
    """One per sidecar."""

    def __init__(self, clock: Clock) -> None:
        """Needs no running loop."""
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._number = 0
        self._listeners: set[_Listener] = set()

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Tell everybody who listens, and the log."""
        with self._lock:
            self._number += 1
            event = Event(self._number, self._clock.time(), kind, fields)
            self._kept.append(event)
            listeners = tuple(self._listeners)
        self._log(event)
        for listener in listeners:
            listener.put(event)

    def _log(self, event: Event) -> None:
        words = "".join(f" {name}={_short(value)}" for name, value in event.fields.items())
        told = {name: _short_plain(value) for name, value in event.fields.items()}
        log.info(
            "%s%s",
            event.kind,
            words,
            extra={"event": event.kind, "fields": told, **_about(event.fields)},
        )

    async def listen(self, after: int | None = None) -> AsyncGenerator[Event, None]:
        """Events as they happen; with `after`, first those kept since that number."""
        listener = _Listener(asyncio.get_running_loop())
        with self._lock:
            kept = [] if after is None else [e for e in self._kept if e.number > after]
            self._listeners.add(listener)
        try:
            for event in kept:
                yield event
            while True:
                yield await listener.queue.get()
        finally:
            with self._lock:
                self._listeners.discard(listener)


class _Listener:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = loop
        self._missed = 0

    def put(self, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event) -> None:
        if self.queue.qsize() >= QUEUED_EVENTS:
            self._missed += 1
            return
        if self._missed:
            missed = {"count": self._missed, "hint": "reconnect with Last-Event-ID"}
            self.queue.put_nowait(Event(event.number - 1, event.time, "events_missed", missed))
            self._missed = 0
        self.queue.put_nowait(event)


def _about(fields: Mapping[str, Any]) -> dict[str, int]:
    """Rank, attempt and step that an event is about, for its line in the log."""
    found = {name: fields[name] for name in ("rank", "attempt", "step") if name in fields}
    with contextlib.suppress(ValueError):
        checkpoint = CheckpointId.parse(str(fields.get("checkpoint")))
        found |= {"attempt": checkpoint.attempt, "step": checkpoint.step}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _short_plain(value: Any) -> Any:
    plain = codec.to_plain(value)
    return plain if isinstance(plain, (int, float, bool)) or plain is None else _cut(str(plain))


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


def _short(value: Any) -> str:
    text = _cut(str(value))
    return repr(text) if " " in text or not text else text
